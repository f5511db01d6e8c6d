"""Inputs of data curation: raw files, evaluation sets for decontamination, and previously published revisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.personal_data.named_entities import compute_model_digest
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.common.runtime.url_credentials import remove_password
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.config import DataCurationConfig
from components.data_curation.databases.database_registry import is_table_address
from components.data_curation.databases.table_extract import extract_table
from components.data_curation.quality_scoring.scoring_inputs import ScoringInputs, list_scoring_inputs
from components.data_curation.reading.extracts import open_extract, to_stored_source
from components.data_curation.reading.source_files import describe_skipped_files, list_evaluation_sets
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.reading.table_settings import TableSettings
from components.data_curation.semantic_duplicates import compute_model_digest as compute_embedding_digest
from components.data_curation.semantic_duplicates import fetch_model
from components.data_curation.source_preview import check_columns
from components.data_curation.stage import EarlierRevision, Source, list_sources, plan_earlier_revisions
from components.data_versioning import stage as versioning
from components.data_versioning.git_repository import is_url
from pipelines.config.customization_config import Customization

DEMO_SOURCE = "demo:python-docs"
FILE_SETTINGS = ("delimiter", "encoding", "sheet")  # settings of a source that do not apply to rows of a database
Revisions = Sequence[tuple[str, str]]  # (tag, content_sha256)


@dataclass(frozen=True)
class CurationInputs:
    """Files with digests, earlier revisions, the digests of the spaCy and embedding models ("" if off), and scoring inputs.

    An earlier revision is its tag and content digest.
    """

    sources: list[Source]
    benchmarks: list[Source]
    earlier_revisions: list[tuple[str, str]]
    names_model: str
    embedding_model: str
    scoring: ScoringInputs

    def as_plan(self) -> dict[str, object]:
        """Return the inputs as JSON values for the data curation plan."""
        return {
            "sources": [to_stored_source(source).model_dump() for source in self.sources],
            "benchmarks": [source.model_dump() for source in self.benchmarks],
            "earlier": [list(revision) for revision in self.earlier_revisions],
            "names_model": self.names_model,
            **({"embedding_model": self.embedding_model} if self.embedding_model else {}),
            "scoring": self.scoring.as_plan(),
        }


def list_inputs(
    config: Customization, workdir: Workdir, reporter: Reporter, scratch: Workdir | None = None
) -> CurationInputs:
    """List the inputs and their digests.

    Args:
        scratch: The workdir for built or fetched files; default: `workdir`.

    Raises:
        ConfigurationError: a source does not exist, or lacks a column of its settings.
    """
    curation, target = config.data_curation, scratch or workdir
    sources = list_raw_sources(
        curation, target, reporter, workdir.store, scratch.root / "extracts" if scratch else None
    )
    check_columns(sources, curation)
    embedding_model = ""
    if scratch is None:  # a dry run neither fetches the model nor compares meanings
        fetch_model(curation, reporter)
        embedding_model = compute_embedding_digest(curation)
    benchmarks = list_evaluation_sets(curation.decontamination.sets, Path.cwd())
    scoring = list_scoring_inputs(curation.quality_scores, Path.cwd(), reporter, fetch=scratch is None)
    names_model, earlier = compute_model_digest(curation.personal_data.names), []
    if curation.published != "ignore":
        root = repository_root(config, workdir, target)
        published = versioning.list_manifests(config.data_versioning, workdir=root)
        earlier = plan_earlier_revisions(sources, benchmarks, published, curation, config.seed, scoring)
    return CurationInputs(sources, benchmarks, earlier, names_model, embedding_model, scoring)


def list_raw_sources(
    curation: DataCurationConfig,
    target: Workdir,
    reporter: Reporter,
    store: Path,
    extracts: Path | None = None,
    preview_rows: int = 0,
) -> list[Source]:
    """List the raw files; fetch DVC sources, and read the rows of databases.

    Args:
        curation: The configuration of the stage.
        target: The workdir for built or fetched files.
        reporter: Receives steps and notes.
        store: The artifact store with the extracts of databases.
        extracts: The folder for extracts that are not stored; default: `store`.
        preview_rows: The number of rows of each table to read into `extracts`, for a preview; 0 for all rows.

    Raises:
        ConfigurationError: a source does not exist, or a database cannot be read.
    """
    files, tables = split_sources(curation.sources)
    fetched = target.state / "data_curation" / "sources"
    sources = list_sources(
        expand_demo_source(files, target),
        Path.cwd(),
        obtain=lambda uri: versioning.fetch_source(uri, fetched, reporter),  # dvc:// sources
    )
    if note := describe_skipped_files(files, Path.cwd()):
        reporter.note(note)
    for entry in tables:
        extract = extract_table(entry.path, entry.table_settings, Path.cwd(), store, reporter, extracts, preview_rows)
        source = open_extract(extract).model_copy(update={"settings": entry.settings})
        if source not in sources:  # as for a file that is listed twice
            sources.append(source)
    return sources


def split_sources(entries: Sequence[SourceEntry]) -> tuple[list[SourceEntry], list[SourceEntry]]:
    """Return the sources that are files, and the sources in databases.

    Raises:
        ConfigurationError: a source has a setting that does not apply to its kind.
    """
    files: list[SourceEntry] = []
    tables: list[SourceEntry] = []
    for entry in entries:
        is_table = is_table_address(entry.path)
        (tables if is_table else files).append(entry)
        other, kind = (FILE_SETTINGS, "files") if is_table else (tuple(TableSettings.model_fields), "databases")
        stated = entry.model_dump()
        if isinstance(stated, dict) and (names := [name for name in other if name in stated]):
            raise ConfigurationError(
                f"data_curation.sources: {remove_password(entry.path)!r} has the setting {names[0]}, which applies to {kind}",
                hint=f"Remove {names[0]} from this source.",
            )
    return files, tables


def repository_root(config: Customization, workdir: Workdir, scratch: Workdir) -> Path:
    """Return the workdir root for reading the data repository; a remote repository is mirrored to `scratch`."""
    return (scratch if is_url(config.data_versioning.repository) else workdir).root


def load_stored_revisions(earlier: Revisions, workdir: Workdir) -> list[EarlierRevision]:
    """Return the earlier revisions whose datasets are in the store."""
    return [
        EarlierRevision(tag, artifact_store.load_artifact(workdir.store, sha256, "dataset"))
        for tag, sha256 in earlier
        if artifact_store.has_artifact(workdir.store, sha256)
    ]


def fetch_earlier_revisions(
    config: Customization, earlier: Revisions, workdir: Workdir, reporter: Reporter
) -> list[EarlierRevision]:
    """Return the datasets of the earlier revisions from the store; fetch missing datasets first."""
    for tag, sha256 in earlier:
        if not artifact_store.has_artifact(workdir.store, sha256):
            reporter.step(f"fetching {tag}")
            with artifact_store.job_folder(workdir.store) as folder:
                dataset = versioning.fetch(
                    tag, folder / "earlier", config.data_versioning, workdir=workdir.root, reporter=reporter
                )
                artifact_store.add_artifact(workdir.store, dataset)
    return [
        EarlierRevision(tag, artifact_store.load_artifact(workdir.store, sha256, "dataset")) for tag, sha256 in earlier
    ]


def demo_dataset_path(workdir: Workdir) -> Path:
    """Return the path of the demo dataset's raw file."""
    return workdir.root / "demo" / "python-docs.jsonl"


def expand_demo_source(sources: list[SourceEntry], workdir: Workdir) -> list[SourceEntry]:
    """Replace demo:python-docs with the path of a file that is built from this machine's Python."""
    if all(entry.path != DEMO_SOURCE for entry in sources):
        return sources
    from components.data_curation.python_docs import build

    path = demo_dataset_path(workdir)
    path.parent.mkdir(parents=True, exist_ok=True)
    build(path)
    demo = {"path": str(path)}
    return [entry.model_copy(update=demo) if entry.path == DEMO_SOURCE else entry for entry in sources]
