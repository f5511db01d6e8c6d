"""Retention: deletion of expired days, the state of the stored traffic, and an estimate of its size."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from components.common.runtime import filesystem
from pipelines.capture import tombstones, traffic_files
from pipelines.capture.settings import CaptureSettings, ModelCapture
from pipelines.capture.traffic_files import DayFolder
from pipelines.capture.traffic_rows import is_shadow

REMOVED_PREFIX = ".expired."
ASSUMED_ROW_BYTES = 2000  # of a model without stored rows: a chat of about 300 words


def get_first_kept_day(capture: ModelCapture, today: date) -> date:
    """Return the first day of a model's traffic that is not deleted."""
    return today - timedelta(days=capture.retention_days)


def expire(settings: CaptureSettings, today: date) -> list[dict[str, str]]:
    """Delete the expired days of all models that are not under a legal hold. Call it under the lock.

    Traffic of a model that the capture file does not list has no retention, and is kept.

    Returns:
        A list of {"model", "day"}.
    """
    remove_expired(settings.folder)
    removed = []
    for day in traffic_files.list_days(settings.folder):
        capture = settings.models.get(day.model)
        if capture and not capture.legal_hold and day.day < get_first_kept_day(capture, today):
            # The rename first: an interrupted deletion leaves no part of a day that readers find.
            filesystem.rename(day.path, day.path.with_name(f"{REMOVED_PREFIX}{day.path.name}"))
            removed.append({"model": day.model, "day": str(day.day)})
    remove_expired(settings.folder)
    return removed


def remove_expired(folder: Path) -> None:
    """Remove the renamed day folders, also those of an interrupted call."""
    for path in folder.glob(f"*/{REMOVED_PREFIX}*"):
        filesystem.remove_tree(path)


def is_feedback_expired(line: Mapping[str, Any], settings: CaptureSettings, today: date) -> bool:
    """Return whether the retention of the model that a line of feedback names has ended.

    A line without a model (the gateway has restarted since the answer) has the longest retention of all models.
    """
    model = line.get("model")
    captures = [settings.models[model]] if model in settings.models else [] if model else [*settings.models.values()]
    if not captures or any(capture.legal_hold for capture in captures):
        return False
    first_kept = min(get_first_kept_day(capture, today) for capture in captures)
    # A line of a sample contains the request, which is older than the line.
    return datetime.fromisoformat(line.get("captured") or line["time"]).date() < first_kept


def describe(settings: CaptureSettings, requests_per_day: int, today: date) -> dict[str, Any]:
    """Return the state of the stored traffic, with an estimate of its size for a number of requests per day.

    Args:
        settings: the capture file.
        requests_per_day: number of requests per day to each model; 0: no estimate.
        today: the current day (UTC).
    """
    days = traffic_files.list_days(settings.folder)
    names = sorted({*settings.models, *(day.model for day in days)})
    unfinished = [one.subject for one in tombstones.read_tombstones(settings.folder).values() if one.finished is None]
    return {
        "folder": settings.location,
        "models": [
            _describe_model(name, settings, [day for day in days if day.model == name], requests_per_day, today)
            for name in names
        ],
        "unfinished_erasures": unfinished,
        "readable_by_others": [str(path) for path in _list_open_to_others(settings.folder, days)],
    }


def _describe_model(
    name: str, settings: CaptureSettings, days: list[DayFolder], requests_per_day: int, today: date
) -> dict[str, Any]:
    capture = settings.models.get(name)
    lines = size = 0
    for day in days:
        for path in [*day.list_sealed(), *day.list_open()]:
            size += path.stat().st_size
            # A shadow answer adds to the size of the row of its request.
            lines += sum(not _is_shadow_line(line) for line in traffic_files.read_lines(path))
    row_bytes = round(size / lines) if lines else ASSUMED_ROW_BYTES
    result: dict[str, Any] = {
        "model": name,
        "sampling_rate": capture.sampling_rate if capture else 0.0,
        "retention_days": capture.retention_days if capture else None,
        "legal_hold": bool(capture and capture.legal_hold),
        "days": len(days),
        "first_day": str(days[0].day) if days else None,
        "expired_days": sum(capture is not None and day.day < get_first_kept_day(capture, today) for day in days),
        "bytes": sum(path.stat().st_size for day in days for path in day.path.rglob("*") if path.is_file()),
        "open_files": sum(len(day.list_open()) for day in days),
        "row_bytes": row_bytes,
        "row_bytes_measured": lines > 0,
    }
    if requests_per_day and capture:
        daily = round(requests_per_day * capture.sampling_rate * row_bytes)
        result["estimate"] = {
            "requests_per_day": requests_per_day,
            "bytes_per_day": daily,
            "bytes": daily * capture.retention_days,
        }
    return result


def _is_shadow_line(line: bytes) -> bool:
    row = traffic_files.parse_line(line) if b'"shadow_of"' in line else None
    return row is not None and is_shadow(row)


def _list_open_to_others(folder: Path, days: Iterable[DayFolder]) -> list[Path]:
    """Return the folders that users outside the owner and the group may enter or list."""
    folders = [folder, *(day.path for day in days)]
    return [path for path in folders if path.exists() and path.stat().st_mode & stat.S_IRWXO]
