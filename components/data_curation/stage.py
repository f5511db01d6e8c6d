"""Raw text in, clean train, validation and test rows out; every dropped row with its reason."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, personal_data
from components.common.artifacts import Artifact, Input, Manifest
from components.common.errors import InputError
from components.common.personal_data import names as name_finder
from components.common.progress import Reporter, Silent
from components.data_curation import duplicates, page, scrubbing, splits, staging, writing
from components.data_curation.config import DataCurationConfig
from components.data_curation.contamination import Index
from components.data_curation.facts import Facts, Personal
from components.data_curation.judging import Judged, Similar, drops_by_filter, judge, nothing_similar
from components.data_curation.readers import Unread
from components.data_curation.rows import CONTENT, Kind
from components.data_curation.sources import Source, list_sources, named
from components.data_curation.staging import Earlier, Staged
from components.data_curation.tokens import measure
from components.data_curation.work import Done
from components.data_curation.writing import SPLIT_FILES

__all__ = [
    "Curated",
    "Earlier",
    "Source",
    "check_splits",
    "counts",
    "curate",
    "key_of",
    "list_sources",
    "named",
    "planned_earlier",
    "survey",
]

STAGE = "data_curation"
APART = ("sources", "engine", "ray_address", "workers", "tokens")  # settings that no row depends on
EARLIER = "earlier"  # kind of input: a revision published before
PAYLOAD = (*SPLIT_FILES.values(), "rejected.parquet", "quarantine.jsonl")
ENGINE_FOLDER = ".engine"
SHOWN = 3  # sources that an error names
FORMATS = "docs/data.md shows the formats that are read."
# What to do about a source of which nothing could be read, by what was found in it.
ICONV = "Convert it: iconv -f {encoding} -t UTF-8 {{file}} > utf8-{{file}}, then name the new file."
RENAME = "Rename it: .gz or .zst at its end for a compressed file, .parquet for Parquet."
COPY = "Copy or download {file} again, and compare its size or checksum with the original's."
ADVICE = {
    "UTF-16LE": ICONV.format(encoding="UTF-16LE"),
    "UTF-16BE": ICONV.format(encoding="UTF-16BE"),
    "not UTF-8": ICONV.format(encoding="LATIN1").replace("Convert it:", "Convert it from the encoding it has, for example:"),
    "its name does not say": RENAME,
    "breaks off": COPY,
    "damaged": COPY,
    "WAT file": "Name the WARC or the WET file of the same crawl: a WAT file holds no text.",
}


@dataclass(frozen=True)
class Curated:
    """What became of the rows: counts of the kept ones by split and of the dropped ones by reason, and how many groups of rows that belong
    together there are; one goes into one split as a whole."""

    staged: Staged
    judged: Judged
    rejected: dict[str, int]

    @property
    def kind(self) -> Kind:
        """The kind of all rows."""
        return self.staged.kind

    def contents(self, split: str) -> Iterator[dict[str, Any]]:
        """What the rows of a split hold, one after the other (see rows.CONTENT)."""
        begin = 0
        for done in self.staged.chunks:
            table = self.staged.table(done, CONTENT[self.kind]) if done.rows else None
            for number, content in enumerate(table.to_pylist() if table else [], begin):
                if self.judged.splits[number] == split:
                    yield content
            begin += done.rows


def curate(
    sources: Sequence[Source],
    output: Path,
    config: DataCurationConfig,
    *,
    seed: int,
    reporter: Reporter,
    overwrite: bool = False,
    benchmarks: Sequence[Source] = (),
    earlier: Sequence[Earlier] = (),
) -> Artifact:
    """Make a dataset of the sources in the folder `output` and return it; one finished there under the same key is returned as it is.

    The dataset has train, validation and test rows, those rejected (with reason and detail) and a list of what was unreadable. Rows that
    share text with `benchmarks` are dropped; rows of `earlier` revisions keep their split. Raises InputError when a source has changed
    since it was listed, kinds of rows are mixed, nothing is kept or a split stays empty (which of plain text is only noted), and
    EngineMissingError when Daft gives no result.
    """
    sources, earlier = sorted(sources, key=_order), () if config.published == "ignore" else earlier
    inputs = _inputs(sources, benchmarks, earlier)
    key = key_of(inputs, config, seed)
    if finished := artifacts.begin(output, key, overwrite=overwrite):
        return finished
    with _working(output / ENGINE_FOLDER) as folder:
        staged = _stage(sources, benchmarks, earlier, config, folder, reporter)
        _note(sources, staged, reporter)
        _check_groups(staged, config, reporter)
        curated = _curated(staged, _engine(folder, config), config, seed, reporter)
        _note_judged(curated.judged, reporter)
        _check_new(curated, config)
        few = _too_few(curated, config, reporter)
        reporter.step("writing the dataset")
        summary = counts(curated)
        facts = writing.write(staged, curated.judged, output, config.personal_data.names)
        facts.notes += few
    _complete(facts, staged, benchmarks, config, output, reporter)
    summary["personal_data"] = {kind: asdict(one) for kind, one in facts.personal.items()}
    artifacts.write_atomically(output / "report.html", page.render(summary, sources, facts))
    return artifacts.publish(
        output, "dataset", payload=PAYLOAD, inputs=inputs, config=_settings(config), seed=seed, key=key, summary=summary
    )


@contextmanager
def _working(folder: Path) -> Iterator[Path]:
    """A folder for the prepared rows, as large as the data: it goes however the work ends."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _engine(folder: Path, config: DataCurationConfig) -> Similar:
    """What finds similar texts among the rows in the folder."""
    address = staging.ray_address(config) if config.engine == "ray" else None
    return lambda places: duplicates.similar(folder, places, config.near_duplicate_threshold, address)


@contextmanager
def survey(
    sources: Sequence[Source],
    config: DataCurationConfig,
    *,
    seed: int,
    reporter: Reporter,
    benchmarks: Sequence[Source] = (),
    earlier: Sequence[Earlier] = (),
) -> Iterator[Curated]:
    """What curation would make of the sources, without the Daft engine and without writing anything but temporary files.

    Rows that are only similar to each other are not found, so what is kept is an upper bound, and exact where there are none. Raises
    InputError as curate does, but for a split that stays empty: see check_splits.
    """
    with tempfile.TemporaryDirectory(prefix="tuneline-survey-") as folder:
        here = config.model_copy(update={"engine": "native"})
        staged = _stage(sorted(sources, key=_order), benchmarks, earlier, here, Path(folder), reporter)
        _check_groups(staged, config, reporter)
        curated = _curated(staged, nothing_similar, config, seed, reporter)
        _check_new(curated, config)
        yield curated


def check_splits(curated: Curated, config: DataCurationConfig) -> None:
    """Raise InputError where there is nothing to train on or nothing to test with."""
    splits.check_filled(curated.judged.sizes(), curated.judged.groups, config.fractions)


def _too_few(curated: Curated, config: DataCurationConfig, reporter: Reporter) -> list[str]:
    """As check_splits; of plain text, which may be one page or one book, a split that stays empty is only noted: the notes."""
    try:
        check_splits(curated, config)
    except InputError as few:
        if curated.kind != "text":
            raise
        reporter.note(f"{few.message}. {few.hint}")
        return [f"{few.message}. {few.hint}"]
    return []


def _order(source: Source) -> tuple[str, str]:
    """Equal sources in any order give equal datasets."""
    return source.name, source.sha256


def _inputs(sources: Sequence[Source], benchmarks: Sequence[Source], earlier: Sequence[Earlier]) -> list[Input]:
    raw = [Input(kind="raw", content_sha256=one.sha256, uri=one.name) for one in sources]
    sets = [Input(kind="evaluation_set", content_sha256=one.sha256, uri=one.name) for one in benchmarks]
    return [*raw, *sets, *(Input(kind=EARLIER, content_sha256=one.dataset.sha256, uri=one.label) for one in earlier)]


def planned_earlier(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    published: Sequence[tuple[str, Manifest]],
    config: DataCurationConfig,
    seed: int,
) -> list[tuple[str, str]]:
    """The earlier revisions that a curation of these sources looks at, as (label, content_sha256), oldest first.

    `published` are the revisions there are, oldest first, by their labels. A revision that came of these very files and settings is not
    its own predecessor, and only what it was placed by is one: so curating again finds what was made. Where a revision that it was placed
    by has been deleted since, it cannot be made again: it counts as an earlier one, so that its rows stay where they are.
    """
    inputs = _inputs(sorted(sources, key=_order), benchmarks, ())
    recipe = _recipe(inputs, _settings(config), seed)
    found: dict[str, str] = {}
    for label, manifest in published:
        raw = [one for one in manifest.inputs if one.kind != EARLIER]
        before = {one.content_sha256 for one in manifest.inputs if one.kind == EARLIER}
        if _recipe(raw, manifest.config, manifest.seed) == recipe and before <= found.keys():
            return [(tag, sha256) for sha256, tag in found.items() if sha256 in before]
        found.setdefault(manifest.content_sha256, label)
    return [(label, sha256) for sha256, label in found.items()]


def _settings(config: DataCurationConfig) -> dict[str, Any]:
    """The configuration as the manifest has it: a default of 3 is told as 3.0 where a fraction may stand, as when it was read."""
    return config.model_dump(mode="json")


def _recipe(inputs: Sequence[Input], config: Mapping[str, Any], seed: int | None) -> str:
    """What decides the rows besides the code and earlier revisions: not where things lie, where the work is done, or what is only told."""
    named = [[one.kind, one.uri, one.content_sha256] for one in inputs]
    settings = {name: value for name, value in config.items() if name not in APART}
    if names := settings.get("personal_data", {}).get("names"):
        settings["personal_data"] = {**settings["personal_data"], "names": {**names, "model": bool(names.get("model"))}}
    return hashing.digest({"inputs": named, "config": settings, "seed": seed})


def key_of(inputs: Sequence[Input], config: DataCurationConfig, seed: int) -> str:
    """Digest of what the result depends on. Raises ConfigurationError where the model that finds names is not there."""
    told = {"recipe": _recipe(inputs, _settings(config), seed), "tokens": config.tokens.model_dump()}
    names = name_finder.identity(config.personal_data.names)
    return hashing.digest({"stage": STAGE, "code": hashing.code_sha256(STAGE), "names_model": names, **told})


def _stage(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    earlier: Sequence[Earlier],
    config: DataCurationConfig,
    folder: Path,
    reporter: Reporter,
) -> Staged:
    """All rows cleaned and filtered, in a folder. Raises InputError where not one row can be kept, or kinds of rows are mixed."""
    reporter.step("reading")
    chunks, rows = [], 0
    with closing(staging.prepare(sources, benchmarks, config, folder, reporter)) as prepared:
        for done in prepared:
            chunks.append(done)
            rows += done.rows + len(done.unread)
            reporter.progress(rows, None, "rows")
    reporter.progress(rows, rows, "rows")
    staged = Staged(folder, _one_kind(chunks, sources), chunks=chunks)
    staging.add_earlier(staged, earlier, config)
    return staged


def _complete(
    facts: Facts, staged: Staged, benchmarks: Sequence[Source], config: DataCurationConfig, output: Path, reporter: Reporter
) -> None:
    """Add to the facts what is not counted row by row: personal data, evaluation sets, tokens."""
    facts.personal = _personal(staged, config)
    facts.sets = {name: dict(counts) for name, counts in Index.of(benchmarks, config, Silent()).sets.items()} if benchmarks else {}
    told, splits = config.tokens, [output / name for name in SPLIT_FILES.values()]
    tokens = measure(splits, staged.kind, told.base_model, told.max_length, sample=told.sample, reporter=reporter)
    facts.notes += [tokens] if isinstance(tokens, str) else []
    facts.tokens = None if isinstance(tokens, str) else tokens


def _personal(staged: Staged, config: DataCurationConfig) -> dict[str, Personal]:
    """What was found in all rows that were read, by kind."""
    actions, counted = scrubbing.actions(config.personal_data), dict[str, Personal]()
    for done in staged.chunks:
        for kind, (found, rows) in done.personal.items():
            before = counted.get(kind, Personal())
            counted[kind] = Personal(before.found + found, before.rows + rows, actions[kind])
    return dict(sorted(counted.items()))


def _note(sources: Sequence[Source], staged: Staged, reporter: Reporter) -> None:
    """Say what nobody may learn from a file only: what was unreadable, and sources without rows."""
    if unread := staged.unread:
        reporter.note(f"{_places(unread)}; quarantine.jsonl lists {'it' if len(unread) == 1 else 'them all'}")
    heard = {one.file for one in unread}.union(*(done.files for done in staged.chunks))
    for source in sources:
        if source.name not in heard:
            reporter.note(f"{source.name} {'is empty' if source.bytes == 0 else 'holds no row'}")


def _check_groups(staged: Staged, config: DataCurationConfig, reporter: Reporter) -> None:
    """Say which rows have no group of their own. Raises InputError where none has one."""
    if not (key := config.group_by):
        return
    grouped, masked = (sum(getattr(done, name) for done in staged.chunks) for name in ("grouped", "masked"))
    if not grouped:
        raise InputError(
            f"no row has a field {key!r}, by which data_curation.group_by would have the rows split",
            hint="Name a field of the records that is no part of their conversation or text, or source for where a row is from.",
        )
    if grouped < staged.rows:
        reporter.note(f"{staged.rows - grouped:,} rows have no {key}; each of them is a group by itself")
    if masked:
        reporter.note(f"{key} is redacted in {masked:,} rows: their groups hold in this dataset, and against earlier revisions they do not")


def _check_new(curated: Curated, config: DataCurationConfig) -> None:
    """Raise InputError where all rows were published before, and such rows were to go."""
    if config.published == "drop" and curated.staged.splits and not any(curated.judged.splits):
        reasons = ", ".join(f"{count} dropped as {reason}" for reason, count in curated.rejected.items())
        raise InputError(
            f"no row is left to keep: {reasons}; rows that repeat an earlier revision's go, as data_curation.published says",
            hint="Add new rows, or set data_curation.published to place: then published rows are kept, in their splits.",
        )


def _note_judged(judged: Judged, reporter: Reporter) -> None:
    """Say which ids were taken, and where a split that may be empty is."""
    if judged.splits and not judged.sizes()["validation"]:
        reporter.note("no row fell into the validation split")
    if judged.at_home:
        reporter.note(f"{judged.at_home:,} rows lie where earlier revisions put them; data_curation.fractions is for the others")
    if judged.torn_groups:
        reporter.note(
            f"{judged.torn_groups:,} groups of data_curation.group_by lie in several splits, where earlier revisions put their rows; "
            "data_curation.published: ignore splits all rows anew"
        )
    first, count = judged.renamed
    if count:
        what = "row has the id of an earlier one" if count == 1 else "rows have the id of an earlier one"
        first = personal_data.masked(first) + (" and so on" if count > 1 else "")
        reporter.note(f"{count:,} {what} and got a running number: {first}")


def _places(unread: Sequence[Unread]) -> str:
    first = f"{unread[0].file}:{unread[0].line}: {unread[0].why}"
    return f"1 place is unreadable: {first}" if len(unread) == 1 else f"{len(unread):,} places are unreadable, the first {first}"


def _curated(staged: Staged, similar: Similar, config: DataCurationConfig, seed: int, reporter: Reporter) -> Curated:
    filtered = drops_by_filter(staged)
    if filtered.total() == staged.rows:
        raise _nothing(filtered, staged.unread)
    reporter.step("comparing rows")
    judged = judge(staged, config, seed, similar)
    reasons = filtered + Counter(why.reason for why in judged.alike.values())
    return Curated(staged, judged, dict(sorted(reasons.items())))


def _no_row(sources: Sequence[Source], unread: Sequence[Unread]) -> InputError:
    """Not one row could be read."""
    if unread:
        return _nothing(Counter(), unread)
    names = ", ".join(source.name for source in sources[:SHOWN]) + (f" and {len(sources) - SHOWN} more" if len(sources) > SHOWN else "")
    are = "is" if len(sources) == 1 else "are"
    what = f"{are} empty" if not any(source.bytes for source in sources) else "holds no row" if len(sources) == 1 else "hold no row"
    return InputError(f"{names} {what}", hint=f"Name files with rows in data_curation.sources; {FORMATS}")


def _one_kind(chunks: Sequence[Done], sources: Sequence[Source]) -> Kind:
    """The kind that all rows have. Raises InputError when there is more than one, or no row."""
    first: dict[Kind, tuple[str, int]] = {}
    for done in chunks:
        for kind, place in done.kinds.items():
            first.setdefault(kind, place)
    if not first:
        raise _no_row(sources, [one for done in chunks for one in done.unread])
    if len(first) > 1:
        where = ", ".join(f"{kind} ({file}:{line})" for kind, (file, line) in first.items())
        raise InputError(
            f"the sources mix kinds of rows: {where}",
            hint="A dataset has one kind: name only sources of one, or force one way to read them with data_curation.format.",
        )
    return next(iter(first))


def _nothing(reasons: Counter[str], unread: Sequence[Unread]) -> InputError:
    """No row is left: the error counts why, and gives the first unreadable place."""
    counted = [f"{count} dropped as {reason}" for reason, count in sorted(reasons.items())] + ([_places(unread)] if unread else [])
    advice = next((told.format(file=unread[0].file) for sign, told in ADVICE.items() if unread and sign in unread[0].why), None)
    return InputError(
        f"no row is left to keep: {'; '.join(counted)}",
        hint=advice or f"Check data_curation.sources and data_curation.format; {FORMATS}",
    )


def counts(curated: Curated) -> dict[str, Any]:
    """The counts of the manifest. Rows in = kept + rejected + quarantined, or there is a fault here."""
    unread, sizes, rejected = len(curated.staged.unread), curated.judged.sizes(), sum(curated.rejected.values())
    kept, rows_in = sum(sizes.values()), curated.staged.rows + unread
    if rows_in != kept + rejected + unread:
        raise AssertionError(f"rows were lost: {rows_in} in, {kept} kept, {rejected} rejected, {unread} quarantined")
    rows = {"in": rows_in, "kept": kept, "quarantined": unread, "rejected": curated.rejected}
    return {"rows": rows, "splits": sizes, "rows_kind": curated.kind}
