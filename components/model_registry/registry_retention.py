"""Retention in the registry: digests to retain, and removable items in MLflow (ended runs, unversioned models)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from components.common.reporting import mlflow_tracking
from components.model_registry import mlflow_retry, model_versions, registry_history, version_listing
from components.model_registry.model_versions import MODEL_SHA256_TAG, TAG_PREFIX, is_registry_missing, iterate_pages
from components.model_registry.stage import LOGGED_MODEL_PREFIX
from components.model_registry.version_listing import RegisteredVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

ROLLBACK_KINDS = ("promote", "rollback", "foreign")  # moves by a registration have no rollback
DIGEST_KINDS = ("model", "evaluation", "repository", "dataset", "base_model", "incumbent")
PARENT_RUN_TAG = "mlflow.parentRunId"  # MLflow's tag for the parent of a nested run
# Replaces the digest's tag during the removal of the files, so that no registration finds the model.
REMOVING_TAG = f"{TAG_PREFIX}removing"


@dataclass(frozen=True)
class RetainedDigests:
    """Digests in a version's tags, and the reason to retain them."""

    reason: str
    digests: tuple[str, ...]


@dataclass(frozen=True)
class TrackedItem:
    """A run or a logged model in MLflow.

    Attributes:
        uri: location of the item's files.
        bytes: size of its files; 0 if the item is retained or younger than the limit.
        unused_seconds: time since its last change, by the clock of the machine that logged it.
        retention_reason: reason to retain the item; "" if it may be removed.
    """

    id: str
    name: str
    uri: str
    bytes: int
    unused_seconds: float
    retention_reason: str
    parent_run_id: str = ""


def list_retained_digests(keep_versions: int) -> list[RetainedDigests]:
    """Return the digests of versions with aliases, then of rollback targets, then of each model's newest versions.

    Args:
        keep_versions: number of the newest versions to retain per model.

    Raises:
        EngineMissingError: the server does not answer.
        RegistryError: the server rejects a request.
    """
    if is_registry_missing():
        return []
    listed = version_listing.list_registered_versions()
    by_model: dict[str, list[RegisteredVersion]] = defaultdict(list)
    for version in listed:
        by_model[version.name].append(version)
    retained = [
        _build_retained_digests(version, f"is {', '.join(reversed(version.aliases))}")
        for version in listed
        if version.aliases
    ]
    with model_versions.registry_client() as client:
        for name, versions in by_model.items():
            by_number = {version.version: version for version in versions}
            entries = registry_history.read(client, name)
            for alias in dict.fromkeys(entry.alias for entry in entries if entry.kind in ROLLBACK_KINDS):
                candidates = registry_history.list_rollback_candidates(entries, alias)
                if candidates and (target := by_number.get(candidates[-1])):
                    retained.append(_build_retained_digests(target, f"is the rollback target of {alias}"))
    for versions in by_model.values():
        newest = sorted(versions, key=lambda version: int(version.version))[-keep_versions:] if keep_versions else []
        reason = "is the newest version" if keep_versions == 1 else f"is one of the newest {keep_versions} versions"
        retained += [_build_retained_digests(version, reason) for version in newest]
    return retained


def _build_retained_digests(version: RegisteredVersion, reason: str) -> RetainedDigests:
    digests = (version.tags.get(f"{kind}_sha256", "") for kind in DIGEST_KINDS)
    return RetainedDigests(
        f"{version.name} version {version.version} {reason}", tuple(digest for digest in digests if digest)
    )


def list_ended_runs(older_than: float, owner: str | None, keep_newest: int = 0) -> list[TrackedItem]:
    """Return the runs that tuneline logged, except deleted runs without files.

    Args:
        older_than: minimum age in seconds of a run whose files are measured.
        owner: ID of the workdir whose runs are returned; None for all workdirs.
        keep_newest: number of the newest runs to retain.

    Raises:
        EngineMissingError, RegistryError: as `list_retained_digests`.
    """
    if is_registry_missing():
        return []
    with model_versions.registry_client() as client:
        logged = _list_logged_runs(client)
        runs = {run_id: run for run_id, run in logged.items() if _is_owned(_get_owner(run, logged), owner)}
        reasons = _find_newest_runs(runs, keep_newest) | {
            version.run_id: f"{version.name} version {version.version} was registered from this run"
            for version in _list_all_versions(client)
            if version.run_id
        }
        items = [(run, _build_item(run, reasons, older_than)) for run in runs.values()]
    return [item for run, item in items if item.bytes or not _is_deleted(run)]


def _build_item(run: Run, reasons: Mapping[str, str], older_than: float) -> TrackedItem:
    info, parent = run.info, _get_parent_id(run)
    is_open = not _is_deleted(run) and info.status in ("RUNNING", "SCHEDULED")
    reason = reasons.get(info.run_id) or reasons.get(parent) or ("the run is open in MLflow" if is_open else "")
    unused = time.time() - (info.end_time or info.start_time or 0) / 1000
    size = 0 if reason or unused < older_than else _measure_folder(info.artifact_uri)
    return TrackedItem(info.run_id, info.run_name or info.run_id, info.artifact_uri, size, unused, reason, parent)


def count_foreign_items(owner: str) -> int:
    """Return the number of runs and models that `owner`, the ID of a workdir, does not own.

    Raises:
        EngineMissingError, RegistryError: as `list_retained_digests`.
    """
    if is_registry_missing():
        return 0
    with model_versions.registry_client() as client:
        runs = _list_logged_runs(client)
        owners = [_get_owner(run, runs) for run in runs.values() if not _is_deleted(run)]
        owners += [_get_model_owner(model) for model in _list_logged_models(client)]
    return sum(not _is_owned(name, owner) for name in owners)


def _is_owned(name: str, owner: str | None) -> bool:
    """Return whether the owner `name` matches `owner`; None matches all names, "" matches no name."""
    return owner is None or name == owner != ""


def _list_logged_runs(client: MlflowClient) -> dict[str, Run]:
    """Return tuneline's runs by ID. Nested runs are included: older recipe runs of a sweep lack tuneline's tags."""
    runs = {
        run.info.run_id: run for tag in (f"{TAG_PREFIX}run", f"{TAG_PREFIX}stage") for run in _search_runs(client, tag)
    }
    nested = {run.info.run_id: run for run in _search_runs(client, PARENT_RUN_TAG)}
    while children := {
        run_id: run for run_id, run in nested.items() if run_id not in runs and _get_parent_id(run) in runs
    }:
        runs |= children
    return runs


def _get_parent_id(run: Run) -> str:
    return str(run.data.tags.get(PARENT_RUN_TAG, ""))


def _iterate_ancestors(run: Run, runs: Mapping[str, Run]) -> Iterator[Run]:
    """Yield the run and its ancestors, each once."""
    seen: set[str] = set()
    current: Run | None = run
    while current is not None and current.info.run_id not in seen:
        seen.add(current.info.run_id)
        yield current
        current = runs.get(_get_parent_id(current))


def _get_owner(run: Run, runs: Mapping[str, Run]) -> str:
    """Return the ID of the workdir that owns the run or its nearest owned ancestor; "" if there is no owner."""
    owners = (str(ancestor.data.tags.get(mlflow_tracking.OWNER_TAG, "")) for ancestor in _iterate_ancestors(run, runs))
    return next(filter(None, owners), "")


def _find_newest_runs(runs: Mapping[str, Run], count: int) -> dict[str, str]:
    """Return the newest runs with the reason to retain them. A KFP run with its steps and nested runs counts once."""
    began: dict[str, int] = {}
    roots: dict[str, str] = {}
    for run_id, run in runs.items():
        if not _is_deleted(run):
            *_, root = _iterate_ancestors(run, runs)
            root_id = str(root.data.tags.get(mlflow_tracking.KFP_RUN_TAG) or root.info.run_id)
            start = run.info.start_time or 0
            roots[run_id], began[root_id] = root_id, min(began.get(root_id, start), start)
    newest = set(sorted(began, key=lambda root_id: began[root_id], reverse=True)[:count])
    reason = "the newest run" if count == 1 else f"one of the newest {count} runs"
    return {run_id: reason for run_id, root_id in roots.items() if root_id in newest}


def _is_deleted(run: Run) -> bool:
    return str(run.info.lifecycle_stage) == "deleted"


def _search_runs(client: MlflowClient, tag: str) -> Iterator[Run]:
    from mlflow.entities import ViewType

    experiments = [experiment.experiment_id for experiment in client.search_experiments(view_type=ViewType.ALL)]
    yield from iterate_pages(
        client.search_runs, experiments, f"tags.`{tag}` != ''", run_view_type=ViewType.ALL, max_results=1000
    )


def _list_all_versions(client: MlflowClient) -> Iterator[ModelVersion]:
    for model in version_listing.list_registered_models(client):
        yield from model_versions.search_versions(client, model.name)


def remove_run(run_id: str) -> None:
    """Delete a run, then its files, so that a killed removal can be resumed.

    `mlflow gc` deletes the run's metrics and parameters.

    Raises:
        EngineMissingError, RegistryError: as `list_retained_digests`.
    """
    with model_versions.registry_client() as client:
        run = client.get_run(run_id)
        if not _is_deleted(run):
            client.delete_run(run_id)
        _remove_files(run.info.artifact_uri)


def list_unversioned_models(older_than: float, owner: str | None) -> list[TrackedItem]:
    """Return the logged models that no model version uses.

    Args:
        older_than: minimum age in seconds of a model whose files are measured.
        owner: ID of the workdir whose models are returned; None for all workdirs.

    Raises:
        EngineMissingError, RegistryError: as `list_retained_digests`.
    """
    if is_registry_missing():
        return []
    items = []
    with model_versions.registry_client() as client:
        used = _list_versioned_model_ids(client)
        for model in _list_logged_models(client):
            if model.model_id not in used and _is_owned(_get_model_owner(model), owner):
                unused = time.time() - (model.last_updated_timestamp or model.creation_timestamp) / 1000
                size = 0 if unused < older_than else _measure_folder(model.artifact_location)
                items.append(TrackedItem(model.model_id, model.name, model.artifact_location, size, unused, ""))
    return items


def _get_model_owner(model: LoggedModel) -> str:
    return str(model.tags.get(mlflow_tracking.OWNER_TAG, ""))


def _list_versioned_model_ids(client: MlflowClient) -> set[str]:
    sources = [str(version.source) for version in _list_all_versions(client)]
    return {source.removeprefix(LOGGED_MODEL_PREFIX) for source in sources if source.startswith(LOGGED_MODEL_PREFIX)}


def _list_logged_models(client: MlflowClient) -> Iterator[LoggedModel]:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for model in iterate_pages(client.search_logged_models, experiments, max_results=100):
        if MODEL_SHA256_TAG in model.tags or REMOVING_TAG in model.tags:
            yield model


def remove_model(model_id: str) -> bool:
    """Remove a logged model and its files; return False if a version has started to use the model.

    The tag with the digest is removed first, so that no registration finds the model. A killed removal can be resumed.

    Raises:
        EngineMissingError, RegistryError: as `list_retained_digests`.
    """
    with model_versions.registry_client() as client:
        model = next((each for each in _list_logged_models(client) if each.model_id == model_id), None)
        if model is None:  # another process has removed it
            return True
        if sha256 := model.tags.get(MODEL_SHA256_TAG):
            client.set_logged_model_tags(model_id, {REMOVING_TAG: sha256})
            client.delete_logged_model_tag(model_id, MODEL_SHA256_TAG)
        if model_id in _list_versioned_model_ids(client):
            removing = client.get_logged_model(model_id).tags[REMOVING_TAG]
            client.set_logged_model_tags(model_id, {MODEL_SHA256_TAG: removing})
            client.delete_logged_model_tag(model_id, REMOVING_TAG)
            return False
        _remove_files(model.artifact_location)
        client.delete_logged_model(model_id)
    return True


def _remove_files(uri: str) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    mlflow_retry.retry(lambda: get_artifact_repository(uri).delete_artifacts())


def _measure_folder(uri: str) -> int:
    """Return the total size of the files below a URI."""
    if uri.startswith(("file:", "/")):
        folder = Path(unquote(urlparse(uri).path))
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    def measure_folder(repository: ArtifactRepository, folder: str | None) -> int:
        files = repository.list_artifacts(folder)
        return sum(measure_folder(repository, each.path) if each.is_dir else int(each.file_size or 0) for each in files)

    return mlflow_retry.retry(lambda: measure_folder(get_artifact_repository(uri), None))
