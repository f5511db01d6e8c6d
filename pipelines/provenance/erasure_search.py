"""Search for a row in all revisions and datasets, and for the models, evaluations and packages built from the matches.

The result supports erasure requests, so it lists everything that could not be searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.databases.table_extract import iterate_rows
from components.data_curation.reading.extracts import EXTRACT_KIND
from components.data_versioning import row_search
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.row_search import Query
from components.model_registry import version_listing
from components.model_registry.promotion import CHAMPION
from components.model_registry.version_listing import RegisteredVersion

# Kinds of inputs that an artifact is only compared with, not built from.
COMPARISON_INPUT_KINDS = ("incumbent", "earlier", "evaluation_set", "quality_examples", "scoring_model")
Gap = dict[str, str]  # {"what", "why", "hint"} of an item that could not be searched


@dataclass
class StoredArtifact:
    """An artifact in the store: its address, its manifest, and a function that reads it and verifies every digest."""

    uri: str
    manifest: Manifest
    read: Callable[[], Artifact]

    @property
    def sha256(self) -> str:
        """The content digest."""
        return self.manifest.content_sha256


@dataclass
class ErasureReport:
    """The matches, the artifacts and runs built from them, and the items that could not be searched."""

    by: str
    searched: dict[str, int]
    revisions: list[dict[str, Any]]
    datasets: list[dict[str, Any]]
    models: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    packages: list[dict[str, Any]]
    runs: list[dict[str, str]] = field(default_factory=list)
    extracts: list[dict[str, Any]] = field(default_factory=list)
    not_searched: list[Gap] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether everything was searched."""
        return not self.not_searched

    @property
    def has_matches(self) -> bool:
        """Whether any dataset, or any extract of a database, contains the row."""
        return bool(self.revisions or self.datasets or self.extracts)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tuneline data find`. The object does not contain the search term."""
        return {"by": self.by, "found": self.has_matches, "complete": self.is_complete, **asdict(self)}


def find_rows(query: Query, work: Workdir, config: DataVersioningConfig, reporter: Reporter) -> ErasureReport:
    """Search all revisions of the data repository and all datasets in the store for a row.

    The report also lists the models, evaluations, packages and runs built from the matches.
    """
    reporter.step("searching the revisions")
    published = versioning.search_rows(query, config, workdir=work.root, reporter=reporter)
    gaps = list(published.not_searched)
    reporter.step("searching the artifact store")
    stored = _scan_store(work.store, gaps)
    datasets = [one for one in stored if one.manifest.kind == "dataset"]
    unpublished = _search_datasets(query, [one for one in datasets if one.sha256 not in published.read], gaps)
    in_revisions = {one.content_sha256 for one in published.found}
    # Stored copies of matching revisions contain the same rows.
    copies = [{"sha256": one.sha256, "uri": one.uri, "places": []} for one in datasets if one.sha256 in in_revisions]
    matches = in_revisions | {one["sha256"] for one in unpublished}
    reporter.step("searching the model registry")
    registered: list[RegisteredVersion] = []
    runs: list[dict[str, str]] = []
    target = "the model registry"
    try:
        registered = version_listing.list_registered_versions()
        target = "the MLflow runs"
        runs = version_listing.find_runs_using_datasets(matches)
    except TunelineError as error:
        gaps.append(_build_gap(target, error))
    reporter.step("searching the extracts of databases")
    extracts = _search_extracts(query, stored, matches, gaps)
    affected = find_descendants(matches, stored, registered)
    evaluations = _list_affected("evaluation", affected, stored, registered)
    packages = _list_affected("repository", affected, stored, registered)
    for package in packages:
        package["in_service"] = any(CHAMPION in version["aliases"] for version in package["versions"])
    return ErasureReport(
        by=query.by,
        searched={"revisions": published.revisions, "contents": len(published.read), "models": len(registered)},
        revisions=[asdict(one) for one in published.found],
        datasets=[*unpublished, *copies],
        models=_list_affected("model", affected, stored, registered),
        evaluations=[{"sha256": one["sha256"], "uri": one["uri"]} for one in evaluations],
        packages=packages,
        runs=runs,
        extracts=extracts,
        not_searched=gaps,
    )


def _scan_store(store: Path, gaps: list[Gap]) -> list[StoredArtifact]:
    """List the store's artifacts, including those that a job has moved aside and not replaced yet."""
    # The store is listed before and after the job folders, so that an artifact that moves meanwhile is in one list.
    digests = set(artifact_store.list_artifacts(store))
    aside, unfinished = artifact_store.list_unfinished(store)
    digests |= set(artifact_store.list_artifacts(store))
    reason = "unfinished output of a job that is running, or that was killed on another machine"
    hint = "Search again when no run is active, or one hour after the job was killed."
    gaps += [{"what": str(folder), "why": reason, "hint": hint} for folder in unfinished]
    artifacts = []
    for sha256 in sorted(digests):
        try:
            if manifest := artifact_store.read_manifest(store, sha256):
                uri = artifact_store.build_artifact_uri(store, sha256)
                artifacts.append(StoredArtifact(uri, manifest, partial(artifact_store.load_artifact, store, sha256)))
        except (TunelineError, OSError) as error:
            gaps.append(_build_gap(str(store / sha256), error))
    for folder in sorted({folder for folder in aside if folder.name not in digests}):
        try:
            manifest = artifact_folder.read_manifest(folder)
            uri = folder.absolute().as_uri()
            artifacts.append(StoredArtifact(uri, manifest, partial(artifact_folder.read, folder)))
        except (TunelineError, OSError) as error:
            gaps.append(_build_gap(str(folder), error))
    return artifacts


def _build_gap(target: str, error: TunelineError | OSError) -> Gap:
    if isinstance(error, TunelineError):
        return {"what": target, "why": error.message, "hint": error.hint}
    hint = "Check the permissions, and check that the disk is mounted and intact."
    return {"what": target, "why": str(error), "hint": hint}


def _search_datasets(query: Query, datasets: Collection[StoredArtifact], gaps: list[Gap]) -> list[dict[str, Any]]:
    """Return the stored datasets with matches; add those that cannot be searched to `gaps`."""
    matches = []
    for one in datasets:
        try:
            dataset = one.read()
            gap, places = row_search.describe_gap(query, dataset), row_search.search_dataset(query, dataset)
        except (TunelineError, OSError) as error:
            gaps.append(_build_gap(one.uri, error))
            continue
        if gap:
            gaps.append({"what": one.uri, **gap})
        if places:
            matches.append({"sha256": one.sha256, "uri": one.uri, "places": places})
    return matches


def _search_extracts(
    query: Query, stored: Collection[StoredArtifact], matches: set[str], gaps: list[Gap]
) -> list[dict[str, Any]]:
    """Return the extracts of databases with matches; they contain the rows before redaction and rejection.

    An extract has no row ids and sources of its own. A search for one returns the extracts of the matching datasets.
    """
    used = {one.content_sha256 for item in stored if item.sha256 in matches for one in item.manifest.inputs}
    found = []
    for one in stored:
        if one.manifest.kind != EXTRACT_KIND:
            continue
        rows = None
        if query.by == "text":
            try:
                rows = sum(query.matches(row) for row in iterate_rows(one.read()))
            except (TunelineError, OSError) as error:
                gaps.append(_build_gap(one.uri, error))
                continue
        if rows or one.sha256 in used:
            summary = one.manifest.summary
            found.append({"sha256": one.sha256, "uri": one.uri, "rows": rows, "address": summary.get("address", "")})
    return found


def find_descendants(
    matches: set[str], stored: Collection[StoredArtifact], registered: Collection[RegisteredVersion]
) -> set[str]:
    """Return the digests of all artifacts built from these datasets, directly or through other artifacts.

    A model that was tuned from an affected model is included.
    """
    links = [
        ({item.content_sha256 for item in one.manifest.inputs if item.kind not in COMPARISON_INPUT_KINDS}, {one.sha256})
        for one in stored
    ]
    for version in registered:
        tags = version.tags
        model = {tags["model_sha256"]}
        links.append(({tags.get("dataset_sha256", ""), tags.get("base_model_sha256", "")}, model))
        links.append((model, {tags.get(f"{kind}_sha256", "") for kind in ("evaluation", "repository")} - {""}))
    affected = set(matches)
    while True:
        added = {child for parents, children in links if parents & affected for child in children} - affected
        if not added:
            return affected - matches
        affected |= added


def _list_affected(
    kind: str, affected: set[str], stored: Collection[StoredArtifact], registered: Collection[RegisteredVersion]
) -> list[dict[str, Any]]:
    """List the affected artifacts of a kind with the address of their files and their registered versions."""
    found: dict[str, dict[str, Any]] = {}
    for one in stored:
        if one.manifest.role == kind and one.sha256 in affected:
            found[one.sha256] = {"sha256": one.sha256, "uri": one.uri, "versions": []}
    for version in registered:
        sha256 = version.tags.get(f"{kind}_sha256", "")
        if sha256 in affected:
            uri = version.tags.get("store_uri" if kind == "model" else f"{kind}_store_uri", "")
            artifact = found.setdefault(sha256, {"sha256": sha256, "uri": uri, "versions": []})
            artifact["versions"].append({"name": version.name, "version": version.version, "aliases": version.aliases})
    return list(found.values())
