"""Selection of captured rows: by model, version, days, state and rating, without the rows of erased subjects."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from components.common.runtime.errors import InputError, UsageError
from pipelines.capture import tombstones, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import Row
from pipelines.capture.traffic_rows import is_shadow

Feedback = Mapping[str, Mapping[str, Any]]  # by the answer's id
UNRATED = "none"


@dataclass(frozen=True)
class DayRange:
    """Captured days (UTC), both included; None is open."""

    first: date | None = None
    last: date | None = None

    def __contains__(self, day: date) -> bool:
        return (self.first is None or day >= self.first) and (self.last is None or day <= self.last)

    def __str__(self) -> str:
        return f"{self.first or ''}..{self.last or ''}"


def parse_days(text: str, option: str) -> DayRange:
    """Return the range of "FROM..TO", where either side may be empty, or of one day.

    Raises:
        UsageError: a date is invalid, or the range is empty.
    """
    first, dots, last = text.partition("..")
    try:
        days = DayRange(*(date.fromisoformat(side) if side else None for side in (first, last if dots else first)))
    except ValueError:
        raise UsageError(
            f"{option} is {text!r}; expected FROM..TO", hint=f"Example: {option} 2026-11-01..2026-11-14"
        ) from None
    if days.first and days.last and days.first > days.last:
        raise UsageError(f"{option} {text} contains no day", hint="Write the earlier day first.")
    return days


@dataclass(frozen=True)
class RowFilter:
    """Conditions on captured rows; None or "" is no condition.

    Attributes:
        model: name of the model that answered.
        version: its version.
        days: days (UTC) in which the rows were written.
        state: `complete`, `aborted` or `failed`.
        rating: `up`, `down`, or UNRATED.
        with_shadows: include the answers of shadow models, which no client has received.
    """

    model: str = ""
    version: str = ""
    days: DayRange = DayRange()
    state: str = ""
    rating: str = ""
    with_shadows: bool = False

    def matches(self, row: Row, feedback: Feedback) -> bool:
        """Return whether the row's version, state, rating and kind meet the conditions."""
        facts = row["tuneline"]
        if is_shadow(row) and not self.with_shadows:
            return False
        if (self.version and facts["version"] != self.version) or (self.state and facts["state"] != self.state):
            return False
        rating = feedback.get(row["response"]["id"], {}).get("rating") or UNRATED
        return not self.rating or rating == self.rating


def read_rows(settings: CaptureSettings, selection: RowFilter, feedback: Feedback) -> Iterator[Row]:
    """Yield the selected rows by model and day, without those of erased subjects. Call it under the lock."""
    erased = tombstones.read_tombstones(settings.folder)
    for day in traffic_files.list_days(settings.folder, selection.model or None):
        if day.day in selection.days:
            for row in traffic_files.read_day(day):
                if not tombstones.is_erased(row, erased) and selection.matches(row, feedback):
                    yield row


def list_newest(
    settings: CaptureSettings, selection: RowFilter, feedback: Feedback, limit: int
) -> list[dict[str, Any]]:
    """Return summaries of the newest selected rows, newest first. Call it under the lock."""
    rows = read_rows(settings, selection, feedback)
    newest = heapq.nlargest(limit, rows, key=lambda row: (row["timestamp"], row["response"]["id"]))
    return [_summarize(row, feedback) for row in newest]


def _summarize(row: Row, feedback: Feedback) -> dict[str, Any]:
    facts, answer_id = row["tuneline"], row["response"]["id"]
    return {
        "id": answer_id,
        "time": datetime.fromtimestamp(row["timestamp"], UTC).isoformat(),
        "model": facts["model"],
        "version": facts["version"],
        "state": facts["state"],
        "finish_reasons": [choice["finish_reason"] for choice in row["response"]["choices"]],
        "seconds": facts.get("seconds"),
        "rating": feedback.get(answer_id, {}).get("rating"),
        "prompt": get_prompt(row),
    }


def find_row(settings: CaptureSettings, answer_id: str, feedback: Feedback) -> dict[str, Any]:
    """Return a captured row with its feedback. Call it under the lock.

    Raises:
        InputError: no row has the id, or its subject was erased.
    """
    for row in read_rows(settings, RowFilter(), {}):
        if row["response"]["id"] == answer_id:
            return {**_summarize(row, feedback), **row, "feedback": feedback.get(answer_id)}
    raise InputError(
        f"no captured answer has the ID {answer_id}",
        hint="List the IDs with `tuneline traffic list`. Expired and erased answers are not stored; rows of the "
        "current hour are listed only after the gateway has sealed its file.",
    )


def get_prompt(row: Row) -> str:
    """Return the last message of the user, or the prompt of a completion; "" for a row without text."""
    request = row["request"]
    messages = [message for message in request.get("messages") or [] if message.get("role") == "user"]
    return join_parts(messages[-1].get("content")) if messages else join_parts(request.get("prompt"))


def get_answer(row: Row) -> str:
    """Return the text of the first answer; "" for tool calls."""
    choices = row["response"]["choices"]
    choice = choices[0] if choices else {}
    return join_parts(choice.get("text") or choice.get("message", {}).get("content"))


def join_parts(content: object) -> str:
    """Return a message's content as text: a text, or text parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return content if isinstance(content, str) else ""
