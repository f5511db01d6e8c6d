"""Triggers of a retraining: an alarm of the drift check, feedback since the last retraining, and an interval."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError


@dataclass(frozen=True)
class TriggerOptions:
    """When a retraining starts; any one suffices.

    Attributes:
        drift: JSON result of `tuneline traffic drift`, or None.
        min_feedback: number of rated or corrected answers since the last retraining; 0: no trigger.
        every_days: days since the last retraining; 0: no trigger.
    """

    drift: Path | None = None
    min_feedback: int = 0
    every_days: float = 0.0


@dataclass(frozen=True)
class TriggerCheck:
    """The result of a check.

    Attributes:
        reasons: why a retraining starts, as sentences; empty: it does not start.
        feedback: number of rated or corrected answers since the last retraining.
        alarm: reference and first window of the alarm; None without one. The same alarm starts one retraining only.
    """

    reasons: list[str]
    feedback: int
    alarm: list[Any] | None


def check_triggers(
    options: TriggerOptions, feedback: Iterable[Mapping[str, Any]], last: Mapping[str, Any] | None, now: datetime
) -> TriggerCheck:
    """Return why a retraining should start.

    Args:
        options: the triggers.
        feedback: lines of feedback that count.
        last: the last retraining, with the keys `time` and `alarm`; None before the first.
        now: the current time (UTC).

    Raises:
        InputError: the result of the drift check cannot be read, or a line of feedback has no time.
    """
    since = datetime.fromisoformat(last["time"]) if last else None
    count = sum(since is None or time > since for time in map(read_time, feedback))
    alarm = _read_alarm(options.drift) if options.drift else None
    reasons = []
    if alarm and (last is None or alarm != last["alarm"]):
        reasons.append(f"drift alarm in window {alarm[1]}, compared with {alarm[0]}")
    if 0 < options.min_feedback <= count:
        reasons.append(f"{format_count(count, 'answer')} with feedback; the threshold is {options.min_feedback}")
    if options.every_days and (since is None or now - since >= timedelta(days=options.every_days)):
        reasons.append(f"no retraining since {since:%Y-%m-%d %H:%M}" if since else "no earlier retraining")
    return TriggerCheck(reasons, count, alarm)


def read_time(line: Mapping[str, Any]) -> datetime:
    """Return the time of a line of feedback.

    Raises:
        InputError: the line has no valid time.
    """
    try:
        return datetime.fromisoformat(line["time"]).astimezone()
    except (KeyError, ValueError, TypeError):
        raise InputError(
            f"the feedback on {line['id']} has the time {line.get('time')!r}; expected a time such as 2026-11-27T06:00:00Z",
            hint="Add the time of the feedback to its line.",
        ) from None


def _read_alarm(path: Path) -> list[Any] | None:
    """Return the reference, and number and beginning of the first window of the alarm; None without an alarm."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not result["alarm"]:
            return None
        number = result["alarm_window"]
        return [result["reference"]["name"], number, result["windows"][number - 1]["from"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise InputError(
            f"--drift: {path} is not the result of a drift check",
            hint="Create the file with `tuneline traffic drift --json > drift.json`.",
        ) from None
