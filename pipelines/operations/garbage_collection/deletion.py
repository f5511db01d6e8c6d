"""Deletion of unreferenced items. Each item is moved to a private folder before any part of it is deleted.

After an interruption, an item is unchanged, deleted, or in a private folder that the next job or collection recovers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.runtime import filesystem
from components.common.runtime.errors import BusyError, TunelineError
from components.common.workspace import artifact_store, job_folders, liveness
from components.data_versioning import unreferenced_objects as data
from components.model_registry import registry_retention as registry
from pipelines.operations.garbage_collection import inventory
from pipelines.operations.garbage_collection.inventory import CollectionRequest, Inventory
from pipelines.operations.garbage_collection.retention_plan import Decision, RetentionPlan, StoredItem, build_plan

TRASH_PREFIX = ".removing"  # a private folder is .removing.<host>.<process>.<digits>
ORIGIN_FILENAME = "origin"  # in the private folder: the item's path
QUARANTINED_NAME = "aside"  # in the private folder: the item while it can still be restored
DELETING_NAME = "gone"  # in the private folder: the item while it is deleted
ROOTS_REFRESH_SECONDS = 2.0
IN_USE_REASON = "used or referenced since the listing"


@dataclass(frozen=True)
class DeletionResult:
    """Result of the deletion of one item.

    Attributes:
        decision: the decision to delete the item.
        kept_because: the reason why the item still exists; "" if it was deleted.
        failed: whether the deletion failed with an error.
    """

    decision: Decision
    kept_because: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tuneline gc --delete`."""
        return {**self.decision.as_dict(), "deleted": not self.kept_because, "kept": self.kept_because}


def delete_unreferenced(plan: RetentionPlan, found: Inventory, request: CollectionRequest) -> Iterator[DeletionResult]:
    """Delete the items of a plan and yield the result of each.

    The roots are read again every two seconds, because aliases move and jobs start.

    Raises:
        TunelineError: the roots became unreadable (see `inventory.find_roots`). Deleted items are not restored.
    """
    deletable, refreshed_at = plan.names, time.monotonic()
    required: set[str] = set()  # names that items in use reference
    for decision in plan.to_delete:
        item, reason, failed = decision.item, IN_USE_REASON, False
        if item.name not in required and time.monotonic() - refreshed_at > ROOTS_REFRESH_SECONDS:
            deletable = build_plan(found.items, inventory.find_roots(request, found.items), request.policy).names
            refreshed_at = time.monotonic()
        if item.name not in required and item.name in deletable:
            try:
                reason = "" if _delete_item(item, found, request) else IN_USE_REASON
            except (TunelineError, OSError) as error:
                reason, failed = getattr(error, "message", str(error)), True
        if reason:
            required |= {*item.references}
        yield DeletionResult(decision, reason, failed)


def _delete_item(item: StoredItem, found: Inventory, request: CollectionRequest) -> bool:
    """Delete an item unless it is in use; return whether it was deleted."""
    workdir, older_than, path = request.workdir, request.older_than, Path(item.path)
    store, identifier = workdir.store, item.name.partition(":")[2]
    match item.kind:
        case "artifact" | "base_model":
            is_deleted = artifact_store.remove_artifact(store, identifier, older_than)
            if is_deleted:
                artifact_store.remove_note(store, f"costs/{identifier}.json")
            return is_deleted
        case "copy":
            return artifact_store.remove_local_copy(store, identifier, older_than)
        case "run":
            return _quarantine_and_delete(
                path, workdir.root, lambda moved: inventory.seconds_since_write(moved) >= older_than
            )
        case "state":  # under its lock, so that a starting job gets an error; tokens and scores have no locks
            touched = inventory.is_touched_on_use(path)
            lock = nullcontext() if touched else job_folders.folder_lock(path)
            with suppress(BusyError, FileNotFoundError), lock:
                return _quarantine_and_delete(
                    path,
                    workdir.state,
                    lambda moved: inventory.seconds_since_write(moved, touched=touched) >= older_than,
                )
            return False
        case "package":  # under its deployment's lock, if it is still unused
            folder = path.parent.parent
            with suppress(BusyError), job_folders.folder_lock(folder):
                packages = inventory.list_deployment_packages(folder, held=False)
                is_unused = any(package.name == item.name and not package.keep_reason for package in packages)
                return is_unused and _quarantine_and_delete(path, path.parent, lambda _: True)
            return False
        case "data_object":
            remote_object = found.objects[item.name]
            return data.remove_object(
                remote_object, request.versioning, workdir=workdir.root, min_unused_seconds=older_than
            )
        case "mlflow_run":
            registry.remove_run(identifier)
            return True
        case "mlflow_model":
            return registry.remove_model(identifier)


def _quarantine_and_delete(path: Path, parent: Path, may_delete: Callable[[Path], bool]) -> bool:
    """Move a path to a private folder in `parent` and delete it, if `may_delete` holds before and after the move."""
    try:
        if not may_delete(path):
            return False
    except FileNotFoundError:  # another job removed it
        return False
    with job_folders.private_folder(parent, TRASH_PREFIX, rescue=_restore) as trash:
        (trash / ORIGIN_FILENAME).write_text(str(path.absolute()), encoding="utf-8")
        quarantined, deleting = trash / QUARANTINED_NAME, trash / DELETING_NAME
        try:
            filesystem.rename(path, quarantined)
        except FileNotFoundError:  # another job removed it
            return False
        if not may_delete(quarantined):  # final: no job finds the path in the private folder
            return False
        filesystem.rename(quarantined, deleting)
        if deleting.is_dir() and not deleting.is_symlink():
            filesystem.remove_tree(deleting)
        else:
            deleting.unlink(missing_ok=True)
    return True


def _restore(trash: Path) -> None:
    """Move a quarantined item back to its path, or to a new name next to the path if the path is occupied."""
    quarantined = trash / QUARANTINED_NAME
    if not os.path.lexists(quarantined):
        return  # not moved yet, or being deleted
    origin = Path((trash / ORIGIN_FILENAME).read_text(encoding="utf-8"))
    origin.parent.mkdir(parents=True, exist_ok=True)
    if quarantined.is_dir() or not os.path.lexists(origin):  # a rename would replace an existing file
        try:
            filesystem.rename(quarantined, origin)
            return
        except OSError as error:
            if error.errno not in job_folders.OCCUPIED_ERRNOS:
                raise
    filesystem.rename(quarantined, origin.with_name(f"{origin.name}.{secrets.token_hex(4)}"))


def recover(request: CollectionRequest) -> None:
    """Restore or delete the items that an interrupted deletion left in private folders."""
    for parent in _list_trash_parents(request):
        job_folders.remove_abandoned_folders(parent, TRASH_PREFIX, _restore)


def _list_trash_parents(request: CollectionRequest) -> list[Path]:
    serving = request.workdir.root / "serving"
    return [request.workdir.root, request.workdir.state, *serving.glob("*/packages"), *serving.glob("*/rooted")]


def list_leftovers(request: CollectionRequest) -> list[Path]:
    """List the private folders whose items could be neither deleted nor restored, for example files of another user.

    The next collection of that user deletes them.
    """
    parents = [(parent, TRASH_PREFIX) for parent in _list_trash_parents(request)]
    parents.append((request.workdir.store / "unfinished", artifact_store.JOB_FOLDER_PREFIX))
    return sorted(
        folder
        for parent, prefix in parents
        for folder in parent.glob(f"{prefix}.*.*.*")
        if f".{liveness.identify_process()}." in folder.name or job_folders.is_abandoned(folder, prefix)
    )
