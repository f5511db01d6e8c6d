"""Export of a version or a dataset in one format."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import MANIFEST_FILENAME, Artifact
from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.fine_tuning import model_card
from pipelines.provenance.exports import croissant, dossier, hub_card, ml_bom, version_facts
from pipelines.provenance.exports.version_facts import UNKNOWN, VersionFacts
from pipelines.provenance.lineage import RESTORE_HINT, LineageError, open_trace

Format = Literal["ml-bom", "croissant", "model-card", "dossier"]
REVISION_SCHEME = "dvc://"


@dataclass(frozen=True)
class Export:
    """The text of an export.

    Attributes:
        name, version: the registered version; None for a dataset.
        missing: artifacts that were not found, so that their facts are unknown, each with the reason.
        items: numbers of a dossier's items by state: filled, partly filled, open.
    """

    text: str
    name: str | None = None
    version: str | None = None
    missing: list[str] = field(default_factory=list)
    items: dict[str, list[str]] | None = None


def export(
    reference: str,
    format_: Format,
    workdir: Workdir,
    config: DataVersioningConfig,
    reporter: Reporter,
    *,
    as_html: bool = False,
) -> Export:
    """Return the export of a version; with the format croissant also of a dataset's folder or revision.

    Args:
        reference: NAME@ALIAS, NAME@3, NAME/3 or NAME (its champion), the folder of a dataset or a dvc:// URI.
        as_html: return a dossier as HTML instead of Markdown.

    Raises:
        RegistryError: the model, version or alias does not exist.
        LineageError: an artifact of the lineage is damaged, or the dataset of a Croissant export was not found.
        UsageError: `reference` is malformed, or an artifact that the format does not describe.
    """
    is_revision = reference.startswith(REVISION_SCHEME)
    is_path = reference.startswith((".", "/"))  # a model's name does not start with these
    if is_revision or is_path or (Path(reference) / MANIFEST_FILENAME).exists():
        if format_ != "croissant":
            raise UsageError(
                f"{reference} is an artifact; the format {format_} requires a registered version",
                hint="Pass NAME@champion, or use --format croissant to export a dataset.",
            )
        with tempfile.TemporaryDirectory(prefix="tuneline-export-") as scratch:
            if is_revision:
                dataset = versioning.fetch(
                    reference, Path(scratch) / "dataset", config, workdir=workdir.root, reporter=reporter
                )
            else:
                dataset = artifact_folder.read(Path(reference), "dataset")
            licence = model_card.find_data_licence("", dataset.manifest.inputs)
            licence = UNKNOWN if licence == model_card.UNSTATED else licence
            return Export(_render_dataset(dataset, licence, workdir, config))
    with open_trace(reference, workdir, config, reporter) as lineage:
        facts = version_facts.collect_facts(lineage, workdir.store)
        reporter.step(f"writing the {format_} of {lineage.name} version {lineage.version}")
        items = None
        if format_ == "dossier":
            document = dossier.render_dossier(facts)
            text, items = (dossier.render_html(document) if as_html else document.text), document.items
        elif format_ == "croissant":
            text = _render_training_data(facts, workdir, config, reporter)
        else:
            render: Callable[[VersionFacts], str] = (
                ml_bom.render_ml_bom if format_ == "ml-bom" else hub_card.render_card
            )
            text = render(facts)
        missing = [f"{link.title} {link.sha256[:12]}: {link.detail}" for link in facts.missing_links]
        return Export(text, lineage.name, lineage.version, missing, items)


def _render_training_data(
    facts: VersionFacts, workdir: Workdir, config: DataVersioningConfig, reporter: Reporter
) -> str:
    """Describe the dataset of a version, which is fetched from its revision if no store has it."""
    dataset, revision = facts.find_artifact("dataset"), facts.find_link("revision")
    if dataset is None:
        raise LineageError(
            f"the dataset of {facts.registered.name} version {facts.registered.version} was not found",
            hint=RESTORE_HINT,
            stage="export",
        )
    with tempfile.TemporaryDirectory(prefix="tuneline-export-") as scratch:
        if revision and not (dataset.path / MANIFEST_FILENAME).exists():
            folder = Path(scratch) / "dataset"
            dataset = versioning.fetch(revision.uri, folder, config, workdir=workdir.root, reporter=reporter)
        return _render_dataset(dataset, facts.data_licence, workdir, config)


def _render_dataset(dataset: Artifact, licence: str, workdir: Workdir, config: DataVersioningConfig) -> str:
    """Describe a dataset, with the first revision that has its content."""
    entries = versioning.list_entries(config, workdir=workdir.root)
    entry = next((one for one in entries if one.content_sha256 == dataset.sha256), None)
    if entry is None:
        return croissant.render_croissant(dataset, name=f"dataset-{dataset.sha256[:12]}", licence=licence)
    url = version_facts.shorten_uri(entry.uri)
    return croissant.render_croissant(dataset, name=entry.tag, licence=licence, url=url, published=entry.date)
