"""Inventory of a workdir, its store, data repository and MLflow server: all stored items, and the roots to keep."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from components.common.models import calibrated_weights
from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import TunelineError, UsageError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store, job_folders, liveness
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import unreferenced_objects as data
from components.data_versioning.config import DataVersioningConfig
from components.model_registry import registry_retention as registry
from components.triton_packaging.deployment import deployment_state, serving_folder
from pipelines.operations.garbage_collection.retention_plan import (
    DEFAULT_KINDS,
    Kind,
    RetentionPolicy,
    Root,
    StoredItem,
)
from pipelines.runs import run_folder

PINS_FOLDER = "pins"  # of the store's notes; each note has the name of a pinned artifact or run
SHA256 = re.compile("[0-9a-f]{64}")
TOKEN_CACHE_FOLDER = "tokens"
REPOSITORY_HINT = "set the repository of the runs with -c or --set data_versioning.repository=…"
# State folders without an entry per cache key. Their stages delete their own files, except for evaluation scores.
UNKEYED_STATE_FOLDERS = ("data_versioning", "data_repositories", "evaluation")


class RegistryMissingError(UsageError):
    """The model registry is empty, so the referenced artifacts are unknown."""


class RepositoryMissingError(UsageError):
    """The data repository of the store's datasets is missing, or differs from the configured repository."""


@dataclass(frozen=True)
class CollectionRequest:
    """The scope of a garbage collection.

    Attributes:
        workdir: the workdir with store, state and runs.
        versioning: the configuration of the data repository.
        reporter: the progress reporter.
        older_than: the minimum time since the last use, in seconds.
        keep_runs: the number of the newest runs to keep.
        keep_versions: the number of the newest versions per model to keep.
        kinds: the kinds to delete.
        own_remote: the user declares that the DVC remote serves this repository only.
        no_registry: the user declares that no registry references this store.
        no_repository: the user declares that no other data repository references this store.
        all_runs: include MLflow items of other and unknown workdirs.
    """

    workdir: Workdir
    versioning: DataVersioningConfig
    reporter: Reporter
    older_than: float
    keep_runs: int = 20
    keep_versions: int = 3
    kinds: Collection[Kind] = DEFAULT_KINDS
    own_remote: bool = False
    no_registry: bool = False
    no_repository: bool = False
    all_runs: bool = False

    @property
    def policy(self) -> RetentionPolicy:
        """The retention policy."""
        return RetentionPolicy(self.older_than, self.kinds)


@dataclass(frozen=True)
class Inventory:
    """All items and roots.

    Attributes:
        items: all stored items.
        roots: the items to keep.
        objects: the objects of the DVC remote, by item name.
        notes: remarks to the user.
    """

    items: list[StoredItem]
    roots: list[Root]
    objects: dict[str, data.RemoteObject] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def take_inventory(request: CollectionRequest) -> Inventory:
    """Remove the leftovers of killed jobs, then list all items and roots.

    Raises:
        UsageError: the workdir, the registry or the data repository does not exist.
        EngineMissingError, RegistryError, DataVersioningError: the store, registry or data repository is unavailable.
    """
    workdir, step = request.workdir, request.reporter.step
    store = workdir.store
    if not workdir.root.is_dir() and not store.is_dir():
        raise UsageError(
            f"the workdir {workdir.root} does not exist", hint="Choose an existing workdir with --workdir."
        )
    step("listing the artifact store")
    artifact_store.remove_abandoned_jobs(store)
    items = [*list_artifacts(store), *list_cached_copies(store)]
    step("listing the data repository")
    remote = data.find_unreferenced(request.versioning, workdir=workdir.root, own_remote=request.own_remote)
    objects = {f"object:{one.oid}": one for one in remote.objects}
    step("listing runs, checkpoints and deployments")
    items += [
        *list_states(workdir.state),
        *list_runs(workdir, request.keep_runs),
        *(
            package
            for folder in job_folders.list_folder(workdir.root / "serving")
            for package in list_deployment_packages(folder, held=job_folders.is_locked(folder))
        ),
        *(
            StoredItem("data_object", name, str(one.path), one.bytes, one.unused_seconds)
            for name, one in objects.items()
        ),
    ]
    step("listing MLflow")
    check_registry(request, items)  # before any MLflow query, because the registry may not exist
    owner = None if request.all_runs else artifact_store.get_workdir_id(workdir)
    items += list_mlflow(request, owner)
    notes = [f"objects of the DVC remote are kept: {remote.unknown_reason}"] if remote.unknown_reason else []
    if owner is not None and (others := registry.count_foreign_items(owner)):
        notes.append(
            f"gc keeps {format_count(others, 'MLflow run or model', 'MLflow runs and models')} of other or unknown "
            "workdirs, unless --all-runs is set"
        )
    return Inventory(items, find_roots(request, items), objects, notes)


def find_roots(request: CollectionRequest, items: Collection[StoredItem]) -> list[Root]:
    """Return the current roots. The roots of aliases come first, so that a plan reports them as the reason.

    Raises:
        RegistryMissingError, RepositoryMissingError: see `check_registry` and `check_repository`.
        EngineMissingError, RegistryError, DataVersioningError: the store, registry or data repository is unavailable.
    """
    check_repository(request, items)
    workdir = request.workdir
    revisions = data.list_revisions(request.versioning, workdir=workdir.root)
    retained = registry.list_retained_digests(request.keep_versions)
    if not retained:
        check_registry(request, items)
    roots = [Root(f"store:{digest}", one.reason) for one in retained for digest in one.digests]
    for folder in job_folders.list_folder(workdir.root / "serving"):
        for sha256, reason in _find_served_digests(folder).items():
            if sha256:
                roots.append(Root(f"store:{sha256}", reason))
            else:
                packages = _list_digest_folders(folder / serving_folder.PACKAGES_FOLDER)
                roots += [Root(f"store:{path.name}", f"served by {folder.name}") for path in packages]
    roots += [Root(f"store:{sha256}", f"content of the revision {tag}") for tag, sha256 in revisions]
    roots += find_running_roots(workdir, items)
    for name in artifact_store.list_notes(workdir.store, PINS_FOLDER):
        reason = (
            artifact_store.read_note(workdir.store, f"{PINS_FOLDER}/{name}") or ""
        ).strip() or "no reason recorded"
        roots += [Root(f"{kind}:{name}", f"pinned: {reason}") for kind in ("store", "run")]
    return roots


def check_registry(request: CollectionRequest, items: Collection[StoredItem]) -> None:
    """Check that the registry can be the registry of the store's artifacts.

    Raises:
        RegistryMissingError: the registry contains no model version, but the store contains artifacts.
    """
    count = sum(item.kind == "artifact" for item in items)
    if request.no_registry or not count or registry.list_retained_digests(1):
        return
    store = artifact_store.describe_store(request.workdir.store)
    raise RegistryMissingError(
        f"the registry contains no model version, but the store {store} holds {format_count(count, 'artifact')}",
        hint="Set the registry with --tracking-uri or MLFLOW_TRACKING_URI, or add --no-registry if no registry"
        " references this store.",
    )


def check_repository(request: CollectionRequest, items: Collection[StoredItem]) -> None:
    """Check that the configured data repository is the repository of the store's datasets.

    The registry does not record the repository: teams with separate data repositories may share one registry.

    Raises:
        RepositoryMissingError: the data repository is missing, or artifacts use another repository.
    """
    if request.no_repository:
        return
    root, store = request.workdir.root, artifact_store.describe_store(request.workdir.store)
    datasets = sum(item.artifact_kind == "dataset" for item in items)
    if datasets and data.is_missing(request.versioning, workdir=root):
        address = data.get_address(request.versioning, workdir=root)
        raise RepositoryMissingError(
            f"the data repository {address} does not exist, but the store {store} holds {format_count(datasets, 'dataset')}",
            hint=f"Mount the repository, or {REPOSITORY_HINT}; if no dataset was published, add --no-repository.",
        )
    uris = {uri for item in items for uri in item.revisions}
    if others := data.find_other_repositories(uris, request.versioning, workdir=root):
        raise RepositoryMissingError(
            f"artifacts in the store {store} were built from revisions of another data repository than the configured "
            f"one: {', '.join(others)}",
            hint=f"If the runs publish to that repository, {REPOSITORY_HINT}; if its revisions do not reference this"
            " store, add --no-repository.",
        )


def list_artifacts(store: Path) -> Iterator[StoredItem]:
    """List the artifacts of a store, including incomplete artifacts."""

    def describe(sha256: str, size: int, unused: float) -> StoredItem:
        path = str(store / sha256)
        if "://" in artifact_store.describe_store(store):
            path = artifact_store.build_artifact_uri(store, sha256)
        item = StoredItem("artifact", f"store:{sha256}", path, size, unused)
        try:
            manifest = artifact_store.read_manifest(store, sha256)
        except (TunelineError, OSError) as error:
            reason = f"its manifest cannot be read: {getattr(error, 'message', str(error))}"
            return replace(item, keep_reason=reason)
        if manifest is None:
            return item
        uris = [one.uri for one in manifest.inputs if one.kind == "dataset" and one.uri.startswith("dvc://")]
        return replace(
            item,
            kind="base_model" if manifest.kind == "base_model" else "artifact",
            references=tuple(f"store:{one.content_sha256}" for one in manifest.inputs),
            artifact_kind=manifest.kind,
            revisions=tuple(uris),
        )

    def describe_folder(folder: Path) -> StoredItem:
        return describe(folder.name, measure_disk_usage(folder), artifact_store.seconds_since_use(folder))

    in_bucket = artifact_store.measure_bucket_idle_times(store)
    if in_bucket is not None:
        yield from (describe(sha256, size, unused) for sha256, (size, unused) in in_bucket.items())
        return
    for folder in _list_digest_folders(store):
        yield from _describe_or_keep("artifact", f"store:{folder.name}", folder, describe_folder)


def _describe_or_keep(
    kind: Kind, name: str, path: Path, describe: Callable[[Path], StoredItem]
) -> Iterator[StoredItem]:
    """Yield an item, to be kept if it cannot be described; yield nothing if another job just removed it."""
    try:
        item = describe(path)
    except (TunelineError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
            return
        reason = f"cannot be assessed: {getattr(error, 'message', str(error))}"
        item = StoredItem(kind, name, str(path), 0, 0.0, keep_reason=reason)
    yield item


def _list_digest_folders(folder: Path) -> list[Path]:
    return [path for path in job_folders.list_folder(folder) if SHA256.fullmatch(path.name) and path.is_dir()]


def list_cached_copies(store: Path) -> Iterator[StoredItem]:
    """List the local copies of the artifacts of a store in a bucket."""
    if artifact_store.describe_store(store) == str(store):
        return
    for folder in _list_digest_folders(store):
        yield from _describe_leaf("copy", f"copy:{folder.name}", folder)


def _describe_leaf(kind: Kind, name: str, path: Path, keep_reason: str = "") -> Iterator[StoredItem]:
    """Yield one item that references no other items."""

    def describe(path: Path) -> StoredItem:
        unused = artifact_store.seconds_since_use(path)
        return StoredItem(kind, name, str(path), measure_disk_usage(path), unused, keep_reason=keep_reason)

    return _describe_or_keep(kind, name, path, describe)


def list_states(folder: Path) -> Iterator[StoredItem]:
    """List the saved states of stages: one folder per cache key, and one score file per cache key.

    The time of the last write counts as the last use.
    """

    def describe(path: Path) -> StoredItem:
        unused = seconds_since_write(path, touched=is_touched_on_use(path))
        size, references = measure_disk_usage(path), _list_job_references(folder, path)
        names = (job_folders.LOCK_FILENAME, job_folders.WRITER_LOCK_FILENAME)
        locks = (lock for lock in _walk(path) if lock.name in names)
        keep_reason = "locked by a job" if any(job_folders.is_locked(lock.parent) for lock in locks) else ""
        return StoredItem("state", _build_state_name(folder, path), str(path), size, unused, references, keep_reason)

    states: dict[str, StoredItem] = {}
    for path in _list_state_paths(folder):
        states |= {
            item.name: item for item in _describe_or_keep("state", _build_state_name(folder, path), path, describe)
        }
    # Linked states, such as the recipes of a sweep, share the most recent use and the lock of any of them.
    for name, whole in list(states.items()):
        members = [one for one in _list_linked_states(folder, Path(whole.path)) if one in states and one != name]
        group = [states[one] for one in (name, *members)]
        unused, keep_reason = (
            min(one.unused for one in group),
            next((one.keep_reason for one in group if one.keep_reason), ""),
        )
        states |= {one.name: replace(one, unused=unused, keep_reason=keep_reason) for one in group}
        states[name] = replace(states[name], references=(*whole.references, *members))
    yield from states.values()


def _list_state_paths(folder: Path) -> Iterator[Path]:
    stages = (
        path
        for path in job_folders.list_folder(folder)
        if path.is_dir() and not path.name.startswith(".") and path.name not in UNKEYED_STATE_FOLDERS
    )
    for stage in (*stages, folder / "evaluation" / "scores"):
        try:
            yield from (path for path in job_folders.list_folder(stage) if not path.name.startswith("."))
        except PermissionError:
            yield stage  # a folder of another user; its description fails and reports the error


def _list_linked_states(folder: Path, path: Path) -> list[str]:
    """Return the names of the states that are linked to a state."""
    try:
        links = json.loads(filesystem.read_text(path / artifact_store.LINKED_STATE_FILENAME))
    except (OSError, ValueError):
        return []
    if not isinstance(links, list):
        return []
    return [_build_state_name(folder, folder / link) for link in links if isinstance(link, str)]


def _build_state_name(folder: Path, path: Path) -> str:
    return f"state:{path.relative_to(folder).as_posix()}"


def seconds_since_write(path: Path, *, touched: bool = True) -> float:
    """Return the seconds since the last write to a file or in a folder, by the file server's clock.

    Args:
        path: the file or folder. Its lock files are ignored.
        touched: include the folder's own modification time. Locking changes it too, so this is only for folders whose
            modification time is set on use.

    Raises:
        FileNotFoundError: the path does not exist.
        PermissionError: a folder is unreadable.
    """
    names = (job_folders.LOCK_FILENAME, job_folders.WRITER_LOCK_FILENAME)
    locks = (*names, *(f".{name}." for name in names))
    contents = [one for one in _walk(path) if not one.name.startswith(locks)]
    own, now = path.lstat().st_mtime, liveness.get_file_server_time(path.parent)
    times = [_get_modification_time(one, now) for one in contents]
    return now - max([own, *times] if touched or not times else times)


def _get_modification_time(path: Path, now: float) -> float:
    """Return the modification time of a path, or `now` if another job just removed it."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return now


def _walk(path: Path) -> Iterator[Path]:
    """Yield all paths below a folder; ignore concurrent removals. Raises PermissionError for an unreadable folder."""

    def raise_unless_removed(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for folder, folders, files in os.walk(path, onerror=raise_unless_removed):
        yield from (Path(folder) / name for name in (*folders, *files))


def is_touched_on_use(path: Path) -> bool:
    """Return whether jobs set the modification time of this state on use; other state folders are locked instead."""
    return path.is_file() or path.parent.name in (TOKEN_CACHE_FOLDER, calibrated_weights.STATE_FOLDER)


def _list_job_references(folder: Path, path: Path) -> tuple[str, ...]:
    """Return the names of the items that submitted jobs will read, including jobs that still wait in a queue."""
    names = []
    for job in (one for one in _walk(path) if one.name == "job.json"):
        try:
            arguments = json.loads(filesystem.read_text(job))
        except (OSError, ValueError):
            continue
        for argument_path in _find_absolute_paths(arguments):
            digests = [part for part in argument_path.parts if SHA256.fullmatch(part)]
            names += [f"{kind}:{digest}" for digest in digests for kind in ("store", "copy")]
            names += [
                _build_state_name(folder, one)
                for one in (argument_path, *argument_path.parents)
                if folder in one.parents
            ]
    return tuple(names)


def _find_absolute_paths(value: object) -> Iterator[Path]:
    """Yield the absolute paths in a JSON value."""
    if isinstance(value, str) and Path(value).is_absolute():
        yield Path(value)
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _find_absolute_paths(one)


def list_runs(work: Workdir, keep: int) -> Iterator[StoredItem]:
    """List the run folders, each with references to its results.

    Args:
        work: the workdir.
        keep: the number of the newest runs to keep.
    """
    runs = {run.folder: run for run in run_folder.list_runs(work)}
    newest = [*runs][:keep]

    def describe(folder: Path) -> StoredItem:
        try:
            record = json.loads(filesystem.read_text(folder / "run.json"))
        except FileNotFoundError:  # never written
            record = {}
        if not isinstance(record, dict):
            raise ValueError(f"run.json contains {type(record).__name__}; expected a JSON object")
        artifacts = (record.get("result") or {}).get("artifacts") or {}
        references = [f"store:{Path(path).name}" for path in artifacts.values() if path]
        if record.get("mlflow_run_id"):
            references.append(f"mlflow_run:{record['mlflow_run_id']}")
        keep_reason = ("the newest run" if keep == 1 else f"one of the newest {keep} runs") if folder in newest else ""
        if runs[folder].state == "running":
            keep_reason = "the run is active"
        elif record.get("tracking_open") or record.get("status", "running") == "running":
            keep_reason = "the run is still open in MLflow; the next run closes it"
        size, unused = measure_disk_usage(folder), seconds_since_write(folder)
        return StoredItem("run", f"run:{runs[folder].name}", str(folder), size, unused, tuple(references), keep_reason)

    for folder, run in runs.items():
        yield from _describe_or_keep("run", f"run:{run.name}", folder, describe)


def find_running_roots(work: Workdir, items: Collection[StoredItem]) -> Iterator[Root]:
    """Yield a root for each item that the workdir's active run has used since it started."""
    for run in run_folder.list_runs(work):
        if run.state == "running":
            # By the file server's clock, like the ages of the items; the clock of the run's machine may differ.
            now = liveness.get_file_server_time(run.folder.parent)
            elapsed = now - min(_get_modification_time(path, now) for path in job_folders.list_folder(run.folder))
            for item in items:
                if item.kind in ("artifact", "base_model", "state") and item.unused <= elapsed:
                    yield Root(item.name, f"used by the active run {run.name}")


def list_deployment_packages(folder: Path, *, held: bool) -> Iterator[StoredItem]:
    """List the packages of one deployment; `held`: the deployment is active and deletes its unused packages itself."""
    used = _find_served_digests(folder)
    for name in (serving_folder.PACKAGES_FOLDER, serving_folder.ROOTED_FOLDER):
        for path in _list_digest_folders(folder / name):
            keep_reason = "its deployment is active" if held else used.get(path.name, used.get("", ""))
            yield from _describe_leaf(
                "package", f"package:{path.relative_to(folder.parent).as_posix()}", path, keep_reason
            )


def _find_served_digests(folder: Path) -> dict[str, str]:
    """Return the reason to keep each package, by digest; the key "" applies to all packages."""
    try:
        state = deployment_state.read_state(folder)
    except TunelineError as error:
        return {"": f"the deployment's state is unreadable: {error.message}"}
    repository = folder / serving_folder.REPOSITORY_FOLDER
    links = [link.readlink().parts for link in repository.glob("*/*") if link.is_symlink()]
    if any(len(parts) < 3 for parts in links):
        return {"": f"the deployment's state is unknown: a link in {repository} does not point to a package"}
    digests = {parts[-3]: f"in the model repository of {folder.name}" for parts in links}
    for served, role in [(state.before, "rollback target of"), (state.serving, "served by")] if state else []:
        if served:
            digests |= dict.fromkeys((served.repository_sha256, served.model_sha256), f"{role} {folder.name}")
    return digests


def list_mlflow(request: CollectionRequest, owner: str | None) -> Iterator[StoredItem]:
    """List the MLflow runs and logged models of one workdir or of all workdirs. A run references its nested runs.

    Args:
        request: the scope of the garbage collection.
        owner: the ID of the workdir; None for all workdirs.
    """
    runs = registry.list_ended_runs(request.older_than, owner, request.keep_runs)
    for run in runs:
        nested = tuple(f"mlflow_run:{other.id}" for other in runs if other.parent_run_id == run.id)
        name, path = f"mlflow_run:{run.id}", f"{run.uri} ({run.name})"
        yield StoredItem("mlflow_run", name, path, run.bytes, run.unused_seconds, nested, run.retention_reason)
    for model in registry.list_unversioned_models(request.older_than, owner):
        name, path = f"mlflow_model:{model.id}", f"{model.uri} ({model.name})"
        yield StoredItem("mlflow_model", name, path, model.bytes, model.unused_seconds)


def measure_disk_usage(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; each hard link counts.

    Raises:
        PermissionError: a folder is unreadable.
    """
    total = 0
    for one in _walk(path) if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # another job just removed it
            total += one.lstat().st_size if one.is_file() else 0
    return total


def pin(work: Workdir, target: str, reason: str) -> str:
    """Pin an artifact with all its inputs, or a run, and return the name of the pin.

    Garbage collection keeps a pinned item regardless of age.

    Args:
        work: the workdir.
        target: the full digest of an artifact, the full name of a run, or the path of either.
        reason: recorded with the pin.

    Raises:
        UsageError: the target is neither an artifact in the store nor a run.
    """
    name = Path(target).name
    is_artifact = SHA256.fullmatch(name) and artifact_store.has_artifact(work.store, name)
    if not is_artifact and name not in [run.name for run in run_folder.list_runs(work)]:
        raise UsageError(
            f"{target} is neither an artifact in the store nor a run",
            hint="Specify the full digest of an artifact or the full name of a run.",
        )
    artifact_store.write_note(work.store, f"{PINS_FOLDER}/{name}", reason + "\n")
    return name


def unpin(work: Workdir, target: str) -> str:
    """Remove a pin and return its name.

    Args:
        work: the workdir.
        target: the full digest of an artifact, the full name of a run, or the path of either.

    Raises:
        UsageError: the target is not pinned.
    """
    name, names = Path(target).name, artifact_store.list_notes(work.store, PINS_FOLDER)
    if name not in names:
        hint = f"Choose one of: {', '.join(names)}." if names else "Omit --unpin; no artifact or run is pinned."
        raise UsageError(f"{target} is not pinned", hint=hint)
    artifact_store.remove_note(work.store, f"{PINS_FOLDER}/{name}")
    return name
