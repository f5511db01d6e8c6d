"""Exported folders: recorded with the captured traffic, so that an erasure reaches their rows."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder, hashing
from components.common.runtime import filesystem
from components.common.workspace import job_folders
from pipelines.capture import traffic_bucket, traffic_files
from pipelines.capture.settings import CaptureSettings

RECORDS = ".exports"
CONVERSATIONS_FILENAME, PREFERENCES_FILENAME = "conversations.jsonl", "preferences.jsonl"
HELD_BACK_FILENAME = "held_back.jsonl"
EXPORT_FILENAME = "export.json"
FILENAMES = {
    "conversations": CONVERSATIONS_FILENAME,
    "preferences": PREFERENCES_FILENAME,
    "held_back": HELD_BACK_FILENAME,
}


@contextmanager
def recorded(settings: CaptureSettings, folder: Path) -> Iterator[None]:
    """Record a folder before rows are written to it or to a draft beside it. Call it under the lock of the traffic.

    The record is removed at the end unless the folder was created, and remains if the process is killed.
    """
    path = folder.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    content: dict[str, Any] = {"folder": str(path), "parent": _identify(path.parent)}
    if settings.bucket:  # which has the records of several machines
        content["host"] = socket.gethostname()
    name = hashing.digest(f"{content.get('host', '')}{path}")[:32]
    record = settings.folder / RECORDS / f"{name}.json"
    traffic_files.make_folder(record.parent, settings.folder, settings.group_id)
    was_recorded = record.exists()
    artifact_folder.write_atomically(record, json.dumps(content) + "\n")
    if settings.bucket:
        traffic_bucket.upload_file(settings, record)
    try:
        yield
    finally:
        if not path.exists() or (existed and not was_recorded):
            record.unlink(missing_ok=True)
            if settings.bucket:
                traffic_bucket.delete_file(settings, record)


def _identify(folder: Path) -> list[int]:
    """Return device and inode, by which an empty mount point differs from the folder that was mounted there."""
    status = folder.stat()
    return [status.st_dev, status.st_ino]


@dataclass
class ExportErasure:
    """The number of erased rows, and the folders that could not be searched."""

    rows: int = 0
    not_searched: list[str] = field(default_factory=list)


def erase_rows(settings: CaptureSettings, should_erase: Callable[[bytes], bool], criterion: str = "") -> ExportErasure:
    """Remove rows from all recorded folders. Call it under the lock; an interrupted call is repeated.

    With a bucket, a folder on another machine is searched if the command has been run there.

    Args:
        settings: the capture file.
        should_erase: decides on a line of an exported file.
        criterion: what `should_erase` searches, noted in the records of a bucket.
    """
    result = ExportErasure()
    for record in sorted((settings.folder / RECORDS).glob("*.json")):
        try:
            _erase_from_recorded(settings, record, should_erase, criterion, result)
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"the export recorded in {settings.location}/{RECORDS}/{record.name} cannot be searched: {type(error).__name__}: {error}"
            result.not_searched.append(f"{text}; grant access, or delete the export and the record")
    return result


def _erase_from_recorded(
    settings: CaptureSettings,
    record: Path,
    should_erase: Callable[[bytes], bool],
    criterion: str,
    result: ExportErasure,
) -> None:
    content = json.loads(filesystem.read_text(record))
    folder, searched = Path(content["folder"]), content.get("searched", [])
    shown = f"{settings.location}/{RECORDS}/{record.name}"
    if content.get("host", socket.gethostname()) != socket.gethostname():
        if criterion not in searched:
            result.not_searched.append(
                f"the export {folder} is on {content['host']}; run the command there too, or delete {shown}"
            )
        return
    is_parent_known = folder.parent.exists() and _identify(folder.parent) == content.get("parent")
    if not folder.exists() and not is_parent_known:  # moved, or on a disk that is not mounted here
        result.not_searched.append(
            f"the export {folder} does not exist on this machine; mount its disk, or delete {shown}"
        )
        return
    prefix = f".{folder.name}"
    job_folders.remove_abandoned_folders(folder.parent, prefix)
    drafts = sorted(folder.parent.glob(f"{prefix}.*.*.*"))  # of a process killed on another machine
    result.not_searched += [
        f"{draft} may belong to a running export; run the command again in an hour" for draft in drafts
    ]
    if folder.exists():
        _erase_from_folder(folder, should_erase, result)
    elif not drafts:
        record.unlink(missing_ok=True)
    if folder.exists() and not drafts and "host" in content:
        content["searched"] = sorted({*searched, criterion})
        artifact_folder.write_atomically(record, json.dumps(content) + "\n")


def _erase_from_folder(folder: Path, should_erase: Callable[[bytes], bool], result: ExportErasure) -> None:
    for temporary in folder.glob(".*.json*.*"):  # of an interrupted call
        temporary.unlink(missing_ok=True)
    kept: dict[Path, list[bytes]] = {}
    for path in (folder / name for name in FILENAMES.values() if (folder / name).exists()):
        lines = path.read_bytes().splitlines(keepends=True)
        rest = [line for line in lines if not should_erase(line)]
        if len(rest) < len(lines):
            kept[path] = rest
            result.rows += len(lines) - len(rest)
    if not kept:
        return
    # The description first: until all files are replaced, their digests differ from it, and no run accepts the folder.
    export = folder / EXPORT_FILENAME
    if export.exists():
        content = json.loads(filesystem.read_text(export))
        _replace(export, [json.dumps(_describe(content, kept), indent=2).encode() + b"\n"])
    for path, rest in kept.items():
        if rest:
            _replace(path, rest)
        else:
            path.unlink(missing_ok=True)
            artifact_folder.fsync(folder)


def _describe(content: Mapping[str, Any], kept: Mapping[Path, list[bytes]]) -> dict[str, Any]:
    """Return the description of a folder after the erasure."""
    rows = {path.name: rest for path, rest in kept.items()}
    files = {name: digest for name, digest in content["files"].items() if name not in rows}
    files |= {name: hashlib.sha256(b"".join(rest)).hexdigest() for name, rest in rows.items() if rest}
    counts = {kind: len(rows[name]) for kind, name in FILENAMES.items() if name in rows}
    return {**content, **counts, "files": dict(sorted(files.items())), "erased": True}


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    def write(temporary: Path) -> None:
        status = path.stat()
        temporary.chmod(status.st_mode & 0o777)
        with suppress(PermissionError):
            os.chown(temporary, status.st_uid, status.st_gid)  # the exporting user's, also if root erases
        with temporary.open("wb") as file:
            file.writelines(lines)

    traffic_files.replace_file(path, write)
