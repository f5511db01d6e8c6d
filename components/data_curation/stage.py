"""Data curation: turns raw text into train, validation and test rows, and records a reason for every rejected row.

`curate` runs the steps: prepare chunks of rows, compare all rows, write the dataset, publish it with its manifest.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common import personal_data
from components.common.artifacts import artifact_folder, code_digest, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.personal_data import named_entities as name_finder
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter, SilentReporter
from components.data_curation import (
    chunk_worker,
    dataset_writer,
    prepared_chunks,
    report,
    row_kinds,
    semantic_duplicates,
    source_preview,
)
from components.data_curation.chunk_worker import ChunkSummary
from components.data_curation.comparison import engine_process, split_assignment
from components.data_curation.config import DataCurationConfig
from components.data_curation.dataset_writer import SPLIT_FILES
from components.data_curation.filters import redaction
from components.data_curation.filters.decontamination import EvaluationIndex
from components.data_curation.filters.reject_reasons import LOW_QUALITY_SCORE, NOT_SELECTED
from components.data_curation.prepared_chunks import EarlierRevision, PreparedRows
from components.data_curation.quality_scoring import row_scoring
from components.data_curation.quality_scoring.row_scoring import QualityScores
from components.data_curation.quality_scoring.scorer_interface import RowScorer
from components.data_curation.quality_scoring.scoring_inputs import ScoringInputs
from components.data_curation.reading import ocr, section_chunks
from components.data_curation.reading.document_extractors import (
    DOCUMENT_EXTRACTORS,
    EXTRACTORS,
    MARKDOWN_EXTRACTORS,
    PLAIN_TEXT_SUFFIXES,
    WEB_EXTRACTORS,
)
from components.data_curation.reading.extracts import EXTRACT_SCHEME, load_extracts
from components.data_curation.reading.raw_records import Source, UnreadableRecord, file_suffix
from components.data_curation.reading.record_formats import UNKNOWN_FORMAT
from components.data_curation.reading.source_files import find_sources_by_name, list_evaluation_sets, list_sources
from components.data_curation.report_statistics import CurationStatistics, DocumentCount, PersonalDataCount
from components.data_curation.rows import CONTENT_COLUMNS, Kind
from components.data_curation.token_statistics import measure_tokens

if TYPE_CHECKING:
    from components.data_curation.row_verdicts import RowVerdicts, SimilarityFinder

__all__ = [
    "CurationResult",
    "EarlierRevision",
    "ScoringInputs",
    "Source",
    "check_splits",
    "compute_key",
    "curate",
    "describe_few_test_rows",
    "find_sources_by_name",
    "list_evaluation_sets",
    "list_sources",
    "load_extracts",
    "plan_earlier_revisions",
    "preview_curation",
    "summarize_rows",
    "to_input",
]

STAGE = "data_curation"
SETTINGS_OUTSIDE_IDENTITY = (
    "sources",
    "max_other_kind_share",
    "engine",
    "ray_address",
    "workers",
    "tokens",
)  # do not affect the rows
EARLIER_INPUT_KIND = "earlier"  # kind of the inputs that are earlier revisions
PAYLOAD_FILES = (*SPLIT_FILES.values(), "rejected.parquet", "quarantine.jsonl")
ENGINE_FOLDER_NAME = ".engine"
MAX_NAMED_SOURCES = 3
MAX_NAMED_COLUMNS = 20
MIN_DECISIVE_ITEMS = 100  # the 95% interval of an accuracy of one half is then 10 percentage points wide on each side
FORMATS_HINT = "docs/how-to/data.md lists the supported formats."


@dataclass(frozen=True)
class CurationResult:
    """All rows with their splits and rejections, and the number of rejected rows by reason."""

    prepared: PreparedRows
    verdicts: RowVerdicts
    rejected: dict[str, int]

    @property
    def kind(self) -> Kind:
        """The kind of all rows."""
        return self.prepared.kind

    def find_first_rejected(self) -> dict[str, str]:
        """Return "FILE:LINE" of the first rejected row by reason."""
        from pyarrow import compute

        first: dict[str, str] = {}
        later = self.verdicts.rejections
        for begin, table in self.prepared.iterate_tables(["file", "line", "reason"]):
            filtered = compute.indices_nonzero(compute.not_equal(table["reason"].fill_null(""), "")).to_pylist()
            compared = [number - begin for number in later if begin <= number < begin + len(table)]
            for row in sorted({*filtered, *compared}):
                rejection = later.get(begin + row)
                reason = rejection.reason if rejection else table["reason"][row].as_py()
                if reason not in first:
                    first[reason] = f"{table['file'][row]}:{table['line'][row]}"
            if len(first) == sum(map(bool, self.rejected.values())):
                break
        return first

    def iterate_contents(self, split: str, others: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the content of a split's rows (see rows.CONTENT_COLUMNS), their `source`, and `others`, such as meta."""
        for begin, table in self.prepared.iterate_tables([*CONTENT_COLUMNS[self.kind], "source", *others]):
            splits = self.verdicts.splits[begin : begin + len(table)]
            yield from (content for content, one in zip(table.to_pylist(), splits, strict=True) if one == split)


def curate(
    sources: Sequence[Source],
    output: Path,
    config: DataCurationConfig,
    *,
    seed: int,
    reporter: Reporter,
    overwrite: bool = False,
    benchmarks: Sequence[Source] = (),
    earlier: Sequence[EarlierRevision] = (),
    scoring: ScoringInputs | None = None,
    state: Path | None = None,
) -> Artifact:
    """Create a dataset in `output`, or return the existing dataset if it has the same key.

    Args:
        sources: the raw files.
        output: the dataset's folder.
        config: the stage's configuration.
        seed: the seed of the split assignment.
        reporter: receives progress and notes.
        overwrite: whether to replace another artifact in `output`.
        benchmarks: evaluation sets; rows that share text with them are rejected.
        earlier: published revisions, whose rows keep their splits.
        scoring: the inputs of the quality scores.
        state: the folder of unfinished work of all stages, for the answers of the judge; None to store none.

    Raises:
        ConfigurationError: the spaCy model does not exist.
        InputError: a source changed since it was listed, too many rows are of another kind, or no row is kept. Also, the train
            or test split is empty; for plain text, the report notes the empty split instead. Also, the quality
            classifier has too few examples.
        EngineMissingError: Daft produced no result, the Ray cluster is unreachable, or tesseract is not installed.
    """
    sources = sorted(sources, key=_get_sort_key)
    earlier = () if config.published == "ignore" else earlier
    scoring = scoring or ScoringInputs()
    inputs = _list_inputs(sources, benchmarks, earlier, scoring)
    key = compute_key(inputs, config, seed)
    if finished := artifact_folder.claim_folder(output, key, overwrite=overwrite):
        return finished
    folder = output / ENGINE_FOLDER_NAME  # as large as the data, therefore always removed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)  # over NFS, a mkdir whose answer was lost is repeated
    try:
        scorers = row_scoring.build_scorers(config, scoring, seed, reporter, state and state / STAGE)
        prepared = _prepare_rows(sources, benchmarks, earlier, config, folder, reporter)
        _report_unreadable(sources, prepared, config, reporter)
        document_notes = _report_documents(prepared, config, reporter)
        _check_groups(prepared, config, reporter)
        result, scores, notes = _select_rows(sources, prepared, scorers, config, seed, reporter)
        reporter.step("writing the dataset")
        summary = summarize_rows(result)
        statistics = dataset_writer.write_dataset(prepared, result.verdicts, output, config.personal_data.names, scores)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    statistics.notes += [*notes, *document_notes]
    _complete_statistics(statistics, sources, prepared, output, config, reporter)
    if statistics.documents:
        types = {kind: asdict(count) for kind, count in statistics.documents.items()}
        summary["documents"] = {"types": types, "extractors": statistics.extractors}
    summary["evaluation_sets"] = statistics.evaluation_sets
    if scores.statistics:
        summary["quality_scores"] = {one.scorer.name: one.summarize() for one in scores.statistics}
    summary["personal_data"] = {kind: asdict(count) for kind, count in statistics.personal.items()}
    artifact_folder.write_atomically(output / "report.html", report.render(summary, sources, statistics))
    return artifact_folder.publish(
        output,
        "dataset",
        payload=PAYLOAD_FILES,
        inputs=inputs,
        config=_dump_settings(config),
        seed=seed,
        key=key,
        summary=summary,
    )


@contextmanager
def preview_curation(
    sources: Sequence[Source],
    config: DataCurationConfig,
    *,
    seed: int,
    reporter: Reporter,
    benchmarks: Sequence[Source] = (),
    earlier: Sequence[EarlierRevision] = (),
) -> Iterator[CurationResult]:
    """Curate in a temporary folder without the Daft engine.

    Near-duplicates whose words differ, and semantic duplicates, are not detected: the number of kept rows is an upper bound. The arguments are those of `curate`.

    Yields:
        The rows with their splits and rejections. The temporary folder is deleted when the context ends.

    Raises:
        InputError: as `curate` does, except for an empty split (see `check_splits`).
    """
    from components.data_curation.row_verdicts import find_no_similar

    with tempfile.TemporaryDirectory(prefix="tuneline-preview-") as folder:
        local = config.model_copy(update={"engine": "native"})
        sources = sorted(sources, key=_get_sort_key)
        prepared = _prepare_rows(sources, benchmarks, earlier, local, Path(folder), reporter)
        _check_groups(prepared, config, reporter)
        yield _compare_rows(sources, prepared, find_no_similar, config, seed, reporter, is_preview=True)


def check_splits(result: CurationResult, config: DataCurationConfig) -> None:
    """Raise InputError if the train or test split is empty."""
    split_assignment.check_not_empty(result.verdicts.count_splits(), result.verdicts.cluster_count, config.fractions)


def describe_sources_without_rows(sources: Sequence[Source], prepared: PreparedRows) -> list[str]:
    """Return a sentence for each source that is empty or contains no row."""
    files = {one.file for one in prepared.unread}.union(*(chunk.files for chunk in prepared.chunks))
    return [
        f"{source.name} {'is empty' if source.bytes == 0 else 'contains no row'}"
        for source in sources
        if source.name not in files
    ]


def describe_few_test_rows(items: int, *, is_limited: bool = False) -> str | None:
    """Return a warning if the held-out evaluation has too few items to show a small difference; None otherwise.

    Args:
        items: number of evaluated test rows.
        is_limited: whether evaluation.max_items leaves test rows out.
    """
    if not 0 < items < MIN_DECISIVE_ITEMS:
        return None
    action = "Add rows, or increase the test fraction in data_curation.fractions"
    if is_limited:
        action = "Raise evaluation.max_items"
    return (
        f"the held-out evaluation has {format_count(items, 'item')}: only a large difference is significant. {action}"
    )


# --- identity ---------------------------------------------------------------------------------------------------------


def _get_sort_key(source: Source) -> tuple[str, str, str]:
    return source.name, source.sha256, source.settings.model_dump_json()


def _list_inputs(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    earlier: Sequence[EarlierRevision],
    scoring: ScoringInputs,
) -> list[ArtifactInput]:
    return [
        *map(to_input, sources),
        *(ArtifactInput(kind="evaluation_set", content_sha256=one.sha256, uri=one.name) for one in benchmarks),
        *(ArtifactInput(kind=EARLIER_INPUT_KIND, content_sha256=one.dataset.sha256, uri=one.label) for one in earlier),
        *scoring.list_artifact_inputs(),
    ]


def to_input(source: Source) -> ArtifactInput:
    """Return a source's entry in the manifest. The digest of an extract covers the query; it keeps the extract in use."""
    uri = f"{EXTRACT_SCHEME}{source.name}" if source.extract else source.name
    sha256, settings = source.extract or source.sha256, source.settings.model_dump()
    return ArtifactInput(kind="raw", content_sha256=sha256, uri=uri, settings=settings)


def plan_earlier_revisions(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    published: Sequence[tuple[str, Manifest]],
    config: DataCurationConfig,
    seed: int,
    scoring: ScoringInputs | None = None,
) -> list[tuple[str, str]]:
    """Return the earlier revisions that a curation of these sources compares with, as (label, content_sha256).

    A revision built from these files and settings is not its own predecessor. If such a revision exists, its
    predecessors are returned, so that the same curation finds the existing result. If a predecessor has been deleted,
    the result cannot be reproduced, and the revision itself counts as an earlier revision: its rows keep their splits.

    Args:
        sources: the raw files.
        benchmarks: the evaluation sets.
        published: label and manifest of all revisions, oldest first.
        config: the stage's configuration.
        seed: the seed of the splits.
        scoring: the inputs of the quality scores.
    """
    inputs = _list_inputs(sorted(sources, key=_get_sort_key), benchmarks, (), scoring or ScoringInputs())
    recipe = _compute_recipe_digest(inputs, _dump_settings(config), seed)
    labels: dict[str, str] = {}
    for label, manifest in published:
        raw = [one for one in manifest.inputs if one.kind != EARLIER_INPUT_KIND]
        before = {one.content_sha256 for one in manifest.inputs if one.kind == EARLIER_INPUT_KIND}
        if _compute_recipe_digest(raw, manifest.config, manifest.seed) == recipe and before <= labels.keys():
            return [(known, sha256) for sha256, known in labels.items() if sha256 in before]
        labels.setdefault(manifest.content_sha256, label)
    return [(label, sha256) for sha256, label in labels.items()]


def _dump_settings(config: DataCurationConfig) -> dict[str, Any]:
    """Return the configuration as the manifest stores it: JSON mode writes a float default of 3 as 3.0."""
    return config.model_dump(mode="json")


def _compute_recipe_digest(inputs: Sequence[ArtifactInput], config: Mapping[str, Any], seed: int | None) -> str:
    """Return the digest of these inputs, the seed and the row settings, without the choice of the spaCy model."""
    settings = {name: value for name, value in config.items() if name not in SETTINGS_OUTSIDE_IDENTITY}
    if names := settings.get("personal_data", {}).get("names"):
        settings["personal_data"] = {**settings["personal_data"], "names": {**names, "model": bool(names.get("model"))}}
    if _has_documents(inputs, config):  # their chunks depend on the tokenizer and the maximum row length
        settings["chunks"] = {name: config.get("tokens", {}).get(name) for name in ("base_model", "max_length")}
    files = [[one.kind, one.uri, one.content_sha256, *([one.settings] if one.settings else [])] for one in inputs]
    return hashing.digest({"inputs": files, "config": settings, "seed": seed})


def _has_documents(inputs: Sequence[ArtifactInput], config: Mapping[str, Any]) -> bool:
    """Return whether a raw file may be split into chunks, see data_curation.documents."""
    chunked = set(DOCUMENT_EXTRACTORS)
    if (unit := config.get("text_unit")) in ("auto", "section"):
        chunked.update(MARKDOWN_EXTRACTORS, PLAIN_TEXT_SUFFIXES, WEB_EXTRACTORS if unit == "section" else ())
    return any(one.kind == "raw" and file_suffix(Path(one.uri)) in chunked for one in inputs)


def compute_key(inputs: Sequence[ArtifactInput], config: DataCurationConfig, seed: int) -> str:
    """Return the digest (hex) of everything that the result depends on.

    Raises:
        ConfigurationError: the spaCy model or the embedding model does not exist.
    """
    settings = _dump_settings(config)
    programs = {}
    if _has_documents(inputs, settings):
        programs["tokenizer"] = section_chunks.load_budget(config).tokenizer
        if config.documents.ocr == "tesseract":
            programs["ocr"] = ocr.read_version()
    return hashing.digest(
        {
            "stage": STAGE,
            "code": code_digest.code_sha256(STAGE),
            "names_model": name_finder.compute_model_digest(config.personal_data.names),
            "embedding_model": semantic_duplicates.compute_model_digest(config),
            "recipe": _compute_recipe_digest(inputs, settings, seed),
            "tokens": config.tokens.model_dump(),
            **programs,
        }
    )


# --- steps ------------------------------------------------------------------------------------------------------------


def _prepare_rows(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    earlier: Sequence[EarlierRevision],
    config: DataCurationConfig,
    folder: Path,
    reporter: Reporter,
) -> PreparedRows:
    """Clean and filter all rows. Raises InputError if no row can be kept or too many rows are of another kind."""
    if config.documents.ocr == "tesseract":
        ocr.check_program(config.documents.ocr_languages)
    index = EvaluationIndex.build(benchmarks, config, reporter) if benchmarks else None
    evaluation_sets = {name: dict(counts) for name, counts in index.sets.items()} if index else {}
    reporter.step("reading")
    sample = row_kinds.sample_kinds(sources, config)
    main = row_kinds.find_main_kind(sample)
    row_kinds.check_mix(sample, main, config.max_other_kind_share, is_estimate=True)
    estimate = main or "sft"  # without a row in the sample, any kind is as likely as another
    preparation = prepared_chunks.prepare_chunks(sources, benchmarks, estimate, index, config, folder)
    del index  # worker processes have their own
    chunks, kinds = _collect_chunks(preparation, reporter)
    main = row_kinds.find_main_kind(kinds)
    row_kinds.check_mix(kinds, main, config.max_other_kind_share)
    if main and main != estimate:
        reporter.note(f"most rows are of kind {main}, unlike the first rows of the files: preparing all rows again")
        chunk_worker.remove_chunks(folder)
        index = EvaluationIndex.build(benchmarks, config, SilentReporter()) if benchmarks else None
        preparation = prepared_chunks.prepare_chunks(sources, benchmarks, main, index, config, folder)
        del index
        chunks, _ = _collect_chunks(preparation, reporter)
    unread = [one for chunk in chunks for one in chunk.unread]
    if main is None:
        unselected = Counter({NOT_SELECTED.name: count} if (count := sum(chunk.rows for chunk in chunks)) else {})
        if unread or unselected:
            raise _build_nothing_kept_error(unselected, unread, sources, config)
        names = ", ".join(source.name for source in sources[:MAX_NAMED_SOURCES])
        if len(sources) > MAX_NAMED_SOURCES:
            names += f" and {len(sources) - MAX_NAMED_SOURCES} more"
        if any(source.bytes for source in sources):
            problem = "contains no row" if len(sources) == 1 else "contain no row"
        else:
            problem = "is empty" if len(sources) == 1 else "are empty"
        raise InputError(f"{names} {problem}", hint=f"Set data_curation.sources to files with rows; {FORMATS_HINT}")
    prepared = PreparedRows(folder, main, chunks=chunks, evaluation_sets=evaluation_sets)
    prepared_chunks.add_earlier_revisions(prepared, earlier, config)
    return prepared


def _collect_chunks(
    preparation: Generator[ChunkSummary, None, None], reporter: Reporter
) -> tuple[list[ChunkSummary], row_kinds.KindCounts]:
    """Run the preparation; return the summaries of the chunks, and the exact number of rows of each kind."""
    chunks, rows = [], 0
    kinds: row_kinds.KindCounts = {}
    with closing(preparation):
        for chunk in preparation:
            chunks.append(chunk)
            for kind, count in chunk.kinds.items():
                row_kinds.add_count(kinds, kind, count)
            rows += chunk.rows + len(chunk.unread)
            reporter.progress(rows, None, "rows")
    reporter.progress(rows, rows, "rows")
    return chunks, kinds


def _check_groups(prepared: PreparedRows, config: DataCurationConfig, reporter: Reporter) -> None:
    """Report rows without a group. Raises InputError if no row has a group."""
    if not (key := config.group_by):
        return
    grouped = sum(chunk.grouped for chunk in prepared.chunks)
    redacted = sum(chunk.redacted_groups for chunk in prepared.chunks)
    if not grouped:
        raise InputError(
            f"data_curation.group_by is {key!r}, but no row has that field",
            hint="Set data_curation.group_by to source, or to a field other than the conversation or text.",
        )
    if grouped < prepared.rows:
        rows = format_count(prepared.rows - grouped, "row has", "rows have")
        reporter.note(f"{rows} no {key}; each row without {key} is a separate group")
    if redacted:
        reporter.note(
            f"{key} is redacted in {format_count(redacted, 'row')}; a redacted value groups rows only within this "
            "dataset, not across revisions"
        )


def _select_rows(
    sources: Sequence[Source],
    prepared: PreparedRows,
    scorers: Sequence[RowScorer],
    config: DataCurationConfig,
    seed: int,
    reporter: Reporter,
) -> tuple[CurationResult, QualityScores, list[str]]:
    """Compare and score all rows, and check the splits; return the notes for the report too.

    Raises InputError if every row is rejected, or the train or test split of rows other than plain text is empty.
    """
    find_similar = functools.partial(
        engine_process.find_similar_texts,
        prepared.folder,
        threshold=config.near_duplicate_threshold,
        ray_address=prepared_chunks.resolve_ray_address(config) if config.engine == "ray" else None,
    )
    result = _compare_rows(sources, prepared, find_similar, config, seed, reporter)
    result, scores = _score_rows(result, scorers, reporter)
    _report_verdicts(result.verdicts, reporter)
    notes = [note for one in scores.statistics for note in one.notes]
    try:
        check_splits(result, config)
    except InputError as error:
        if result.kind != "text":  # plain text may be a single page or book
            raise
        notes.append(f"{error.message}. {error.hint}")
        reporter.note(notes[-1])
    if warning := describe_few_test_rows(result.verdicts.count_splits()["test"]):
        reporter.note(warning)
    return result, scores, notes


def _compare_rows(
    sources: Sequence[Source],
    prepared: PreparedRows,
    find_similar: SimilarityFinder,
    config: DataCurationConfig,
    seed: int,
    reporter: Reporter,
    *,
    is_preview: bool = False,
) -> CurationResult:
    """Compare all rows. Raises InputError if every row is rejected."""
    from components.data_curation.row_verdicts import compare_rows, count_filter_rejections

    filtered = count_filter_rejections(prepared)
    if filtered.total() == prepared.rows:
        raise _build_nothing_kept_error(filtered, prepared.unread, sources, config)
    reporter.step("comparing rows")
    verdicts = compare_rows(prepared, config, seed, find_similar)
    if not is_preview:
        verdicts = verdicts.reject(semantic_duplicates.find_semantic_duplicates(prepared, verdicts, config, reporter))
    reasons = filtered + Counter(rejection.reason for rejection in verdicts.rejections.values())
    if config.published == "drop" and prepared.published_splits and not any(verdicts.splits):
        raise InputError(
            f"no row is kept: {_describe_counts(reasons)}; data_curation.published is drop, so rows that repeat "
            "an earlier revision are rejected",
            hint="Add new rows, or set data_curation.published to place to keep published rows in their splits.",
        )
    return CurationResult(prepared, verdicts, dict(sorted(reasons.items())))


def _score_rows(
    result: CurationResult, scorers: Sequence[RowScorer], reporter: Reporter
) -> tuple[CurationResult, QualityScores]:
    """Score the kept rows and reject those beyond a threshold. Raises InputError if all are rejected."""
    verdicts, scores = row_scoring.score_rows(result.prepared, result.verdicts, scorers, reporter)
    if not scorers:
        return result, scores
    reasons = Counter(result.rejected)
    reasons.update({LOW_QUALITY_SCORE.name: sum(one.rejected for one in scores.statistics)})
    rejected = dict(sorted((+reasons).items()))
    if not any(verdicts.splits) and LOW_QUALITY_SCORE.name in rejected:
        raise InputError(
            f"no row is kept: {_describe_counts(rejected)}",
            hint="Relax the thresholds under data_curation.quality_scores; without a threshold, rows are only scored.",
        )
    return replace(result, verdicts=verdicts, rejected=rejected), scores


def _complete_statistics(
    statistics: CurationStatistics,
    sources: Sequence[Source],
    prepared: PreparedRows,
    output: Path,
    config: DataCurationConfig,
    reporter: Reporter,
) -> None:
    """Add the findings of personal data in all rows that were read, the evaluation sets and the token counts."""
    actions, counts = redaction.get_actions(config.personal_data), dict[str, PersonalDataCount]()
    for chunk in prepared.chunks:
        for kind, (found, rows) in chunk.personal.items():
            count = counts.setdefault(kind, PersonalDataCount(action=actions[kind]))
            count.found += found
            count.rows += rows
    statistics.personal = dict(sorted(counts.items()))
    _count_documents(statistics, sources, prepared, config)
    statistics.evaluation_sets = {
        name: {**counts, "rejected_rows": statistics.contaminated_rows[name]}
        for name, counts in prepared.evaluation_sets.items()
    }
    splits = [output / name for name in SPLIT_FILES.values()]
    tokens = measure_tokens(splits, prepared.kind, config.tokens, reporter)
    if isinstance(tokens, str):
        statistics.notes.append(tokens)
    else:
        statistics.tokens = tokens


def _count_documents(
    statistics: CurationStatistics, sources: Sequence[Source], prepared: PreparedRows, config: DataCurationConfig
) -> None:
    """Add the counts of the documents and the versions of their extractors."""
    for chunk in prepared.chunks:
        for kind, (chunks, pages, without_text) in chunk.documents.items():
            count = statistics.documents.setdefault(kind, DocumentCount())
            count.chunks += chunks
            count.pages += pages + without_text
            count.pages_without_text += without_text
        statistics.chunk_tokens.update({int(top): count for top, count in chunk.chunk_tokens.items()})
    statistics.documents = dict(sorted(statistics.documents.items()))
    for kind, count in statistics.documents.items():
        count.files = sum(file_suffix(Path(source.name)) == f".{kind}" for source in sources)
        if extractor := EXTRACTORS.get(f".{kind}"):
            statistics.extractors |= extractor.read_versions()
    if "pdf" in statistics.documents and config.documents.ocr == "tesseract":
        statistics.extractors["tesseract"] = ocr.read_version()


def summarize_rows(result: CurationResult) -> dict[str, Any]:
    """Return the counts of the manifest's summary, and check that rows in = kept + rejected + quarantined.

    Returns:
        rows: the numbers of rows `in`, `kept` and `quarantined`, and the number `rejected` by reason.
        splits: the number of rows by split.
        rows_kind: the kind of all rows.

    Raises:
        AssertionError: the counts do not add up.
    """
    unread, sizes = len(result.prepared.unread), result.verdicts.count_splits()
    kept, rejected, total = sum(sizes.values()), sum(result.rejected.values()), result.prepared.rows + unread
    if total != kept + rejected + unread:
        raise AssertionError(f"rows were lost: {total} in, {kept} kept, {rejected} rejected, {unread} quarantined")
    rows = {"in": total, "kept": kept, "quarantined": unread, "rejected": result.rejected}
    return {"rows": rows, "splits": sizes, "rows_kind": result.kind}


# --- notes and errors -------------------------------------------------------------------------------------------------


def _report_unreadable(
    sources: Sequence[Source], prepared: PreparedRows, config: DataCurationConfig, reporter: Reporter
) -> None:
    """Report unreadable records, and sources without rows."""
    if unread := prepared.unread:
        reporter.note(f"{_describe_unreadable(unread)}; see quarantine.jsonl")
        for hint in itertools.islice(_suggest_columns(unread, sources, config), MAX_NAMED_SOURCES):
            reporter.note(hint)
    for note in describe_sources_without_rows(sources, prepared):
        reporter.note(note)


def _report_documents(prepared: PreparedRows, config: DataCurationConfig, reporter: Reporter) -> list[str]:
    """Report text files that are read as documents, and estimated lengths. Return the notes for the report."""
    kinds = {kind for chunk in prepared.chunks for kind in chunk.documents}
    notes = []
    is_automatic = config.text_unit == "auto"
    if is_automatic and (wrapped := sorted(f".{kind}" for kind in kinds if f".{kind}" in PLAIN_TEXT_SUFFIXES)):
        notes.append(
            f"{' and '.join(wrapped)} files with wrapped paragraphs are read by section; set data_curation.text_unit to "
            "line to read them line by line"
        )
    if kinds and (estimate := section_chunks.load_budget(config).note):
        notes.append(estimate)
    for note in notes:
        reporter.note(note)
    return notes


def _report_verdicts(verdicts: RowVerdicts, reporter: Reporter) -> None:
    """Report an empty validation split, published rows and renamed ids."""
    if verdicts.splits and not verdicts.count_splits()["validation"]:
        reporter.note("the validation split is empty")
    if verdicts.republished_rows:
        reporter.note(
            f"{format_count(verdicts.republished_rows, 'row keeps the split', 'rows keep the splits')} of earlier "
            "revisions; data_curation.fractions applies to the other rows"
        )
    if verdicts.divided_groups:
        kind = "of data_curation.group_by"
        groups = format_count(verdicts.divided_groups, f"group {kind} is", f"groups {kind} are")
        reporter.note(
            f"{groups} in several splits, because rows "
            "keep the splits of earlier revisions; set data_curation.published to ignore to reassign all rows"
        )
    first, count = verdicts.renamed_ids
    if count:
        example = f"{', for example' if count > 1 else ':'} {personal_data.mask(first)}"
        reporter.note(
            f"{format_count(count, 'row has', 'rows have')} the id of an earlier row; a number was appended to the id{example}"
        )


def _describe_unreadable(unread: Sequence[UnreadableRecord]) -> str:
    first = f"{unread[0].file}:{unread[0].line}: {unread[0].reason}"
    return (
        f"1 record is unreadable: {first}"
        if len(unread) == 1
        else f"{len(unread):,} records are unreadable; the first is {first}"
    )


def _describe_counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} rejected as {reason}" for reason, count in sorted(reasons.items()))


def _build_nothing_kept_error(
    reasons: Counter[str], unread: Sequence[UnreadableRecord], sources: Sequence[Source], config: DataCurationConfig
) -> InputError:
    """Return the error for a curation without a kept row: counts by reason, and the first unreadable record."""
    parts = [_describe_counts(reasons)] if reasons else []
    hint = f"Check data_curation.sources and data_curation.format; {FORMATS_HINT}"
    if unread:
        parts.append(_describe_unreadable(unread))
        hint = source_preview.find_hint(unread[0]) or hint
        hint = next(_suggest_columns(unread, sources, config), hint)
    return InputError(f"no row is kept: {'; '.join(parts)}", hint=hint)


def _suggest_columns(
    unread: Sequence[UnreadableRecord], sources: Sequence[Source], config: DataCurationConfig
) -> Iterator[str]:
    """Yield a hint for each source with records of an unknown format whose columns can be mapped."""
    names = {one.file for one in unread if one.reason.startswith(UNKNOWN_FORMAT)}
    for source in (one for one in sources if one.name in names):
        preview = source_preview.preview_source(source, config, source_preview.CHECKED_RECORDS)
        if entry := preview.format_suggestion():
            columns = personal_data.mask(", ".join(preview.columns[:MAX_NAMED_COLUMNS]))
            action = f"map them with data_curation.sources: [{entry}]"
            if len(sources) > 1:  # the other files stay
                action = f"to read it, add {entry} to data_curation.sources"
            if preview.is_cached:
                action = f"add to its entry in data_curation.sources: {entry[1:-1]}"
            yield f"{source.name} has the columns {columns}; {action}. `tuneline curate --preview` shows the rows."
