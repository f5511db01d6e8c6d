"""Erasure of a subject: its rows are removed from captured and exported files, and its feedback is overwritten."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.artifacts import hashing
from pipelines.capture import compaction, exported_rows, retention, tombstones, traffic_bucket, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.tombstones import Tombstone
from pipelines.capture.traffic_files import DayFolder

SEAL_SECONDS = 5.0  # time for running gateways to seal their files; they poll the tombstones each second

EraseFeedback = Callable[[Callable[[dict[str, Any]], bool]], int]


@dataclass
class Erasure:
    """Result of an erasure.

    Attributes:
        subject: keyed hash of the subject.
        rows: number of erased rows.
        files: number of files that contained them.
        feedback: number of erased lines of feedback.
        exported: number of rows erased from exported files.
        held: models under a legal hold, whose rows remain.
        not_searched: open files of running gateways, and exported folders that cannot be reached.
    """

    subject: str
    rows: int = 0
    files: int = 0
    feedback: int = 0
    exported: int = 0
    held: list[str] = field(default_factory=list)
    not_searched: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether no row of the subject remains."""
        return not self.not_searched and not self.held


def erase(
    settings: CaptureSettings,
    subject: str,
    requested_by: str,
    feedback: Collection[EraseFeedback] = (),
    seal_seconds: float = SEAL_SECONDS,
) -> Erasure:
    """Erase the rows of a subject. Call it under the lock; an interrupted call is repeated.

    Args:
        settings: the capture file.
        subject: the subject as the gateway receives it.
        requested_by: who runs the command.
        feedback: functions that erase lines of a feedback file.
        seal_seconds: time for running gateways to seal their files.
    """
    digest = settings.hash_subject(subject)
    result = Erasure(digest)
    earlier = tombstones.read_tombstones(settings.folder).get(digest)
    tombstone = Tombstone(subject=digest, requested=int(time.time()), requested_by=requested_by)
    if earlier:
        tombstone = tombstone.model_copy(
            update=earlier.model_dump(include={"rows", "files", "feedback", "exported", "corrected"})
        )
    traffic_files.make_folder(settings.folder / traffic_files.TOMBSTONES, settings.folder, settings.group_id)
    _publish(settings, tombstone)
    if settings.bucket:
        result.not_searched = traffic_bucket.collect_pending(settings)
    days = traffic_files.list_days(settings.folder)
    result.held = sorted({day.model for day in days if tombstones.is_held(settings, day.model)})
    days = [day for day in days if day.model not in result.held]
    unsealed = [] if settings.bucket else traffic_files.wait_for_sealed_files(days, seal_seconds)
    result.not_searched += [
        f"{path} is open; run the command again after the gateway has sealed this file" for path in unsealed
    ]
    ids = {row_id for day in days for row_id in _list_ids(day, digest)}
    retention.remove_expired(settings.folder)
    authors = {subject, digest}
    is_key = settings.subject.source == "key"

    def is_author(line: Mapping[str, Any]) -> bool:
        return line.get("author") in authors or (is_key and line.get("key") == subject)

    corrected = set(tombstone.corrected)

    def note_correction(line: Mapping[str, Any]) -> bool:
        if is_author(line):
            corrected.add(line["id"])
        return False

    for erase_lines in feedback:
        result.feedback += erase_lines(note_correction)  # erases damaged lines only
    # Before the feedback is erased: a repeated call would not find the ids again.
    tombstone.corrected = sorted(corrected)
    _publish(settings, tombstone)
    _erase_exported_rows(settings, digest, corrected, result)
    for erase_lines in feedback:
        result.feedback += erase_lines(
            lambda line: line.get("id") in ids or line.get("subject") == digest or is_author(line)
        )
    for day in days:
        _erase_from_day(day, digest, result)
    tombstone.rows += result.rows
    tombstone.files += result.files
    tombstone.feedback += result.feedback
    tombstone.exported += result.exported
    if result.is_complete:
        tombstone.finished, tombstone.corrected = int(time.time()), []
    tombstones.write_tombstone(settings.folder, tombstone)
    return result


def _publish(settings: CaptureSettings, tombstone: Tombstone) -> None:
    """Write a tombstone, and upload it now: the files of the bucket are changed at the end of the command."""
    path = tombstones.write_tombstone(settings.folder, tombstone)
    if settings.bucket:
        traffic_bucket.upload_file(settings, path)


def _erase_exported_rows(settings: CaptureSettings, digest: str, corrected: Collection[str], result: Erasure) -> None:
    """Erase the subject's rows from exported folders, and the rows of answers that the subject has corrected."""

    def should_erase(line: bytes) -> bool:
        row = _parse(line)
        is_found = digest.encode() in line or (row is not None and row.get("id") in corrected)
        meta = row.get("meta") if row else None
        version = meta.get("model_version") if isinstance(meta, dict) else None
        return is_found and str(version).rpartition(":")[0] not in result.held

    erased = exported_rows.erase_rows(settings, should_erase, hashing.digest([digest, *sorted(corrected)]))
    result.exported = erased.rows
    result.not_searched += erased.not_searched


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _list_ids(day: DayFolder, digest: str) -> Iterator[str]:
    """Yield the ids of the subject's answers."""
    for row in traffic_files.read_day(day):
        if row["tuneline"]["subject"] == digest:
            yield row["response"]["id"]


def _erase_from_day(day: DayFolder, digest: str, result: Erasure) -> None:
    compaction.remove_compacted(day)
    for path in day.list_sealed():
        # The hash as bytes, so that a damaged line does not keep the subject's text.
        lines = [line for line in traffic_files.read_lines(path) if digest.encode() in line]
        if lines:
            _rewrite_lines(path, digest.encode())
            result.rows += len(lines)
            result.files += 1
    if day.parquet.exists():
        count = sum(digest in json.dumps(row) for row in traffic_files.read_parquet(day.parquet))
        if count:
            kept = (row for row in traffic_files.read_parquet(day.parquet) if digest not in json.dumps(row))
            compaction.write_parquet(day.parquet, kept, ())
            result.rows += count
            result.files += 1


def _rewrite_lines(path: Path, digest: bytes) -> None:
    """Replace a file by its lines without the subject's; remove a file without other lines."""
    traffic_files.replace_lines(path, (line for line in traffic_files.read_lines(path) if digest not in line))
    if not path.stat().st_size:
        with suppress(FileNotFoundError):
            path.unlink()
