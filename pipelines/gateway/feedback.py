"""Feedback on answers: ratings and corrected texts, one JSON line each, in a file that only grows to a limit."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.gateway.errors import RequestError, invalid

MAX_CORRECTION_CHARACTERS = 65_536
MAX_REMEMBERED_ANSWERS = 10_000


class Feedback(BaseModel):
    """The body of a request to /v1/feedback. Null in both fields withdraws earlier feedback."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(pattern=r"^(chatcmpl|cmpl)-[0-9A-Za-z]{1,64}$")
    rating: Literal["up", "down"] | None = None
    correction: str | None = Field(None, min_length=1, max_length=MAX_CORRECTION_CHARACTERS)


@dataclass(frozen=True)
class AnswerOrigin:
    """The model and version that gave an answer, and the name of the key that requested it."""

    model: str
    version: str
    key: str


class FeedbackFile:
    """Appends feedback to a file, and remembers which model gave the latest answers.

    Args:
        path: the file; created for its owner and group.
        max_bytes: size above which feedback is refused.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._answers: OrderedDict[str, AnswerOrigin] = OrderedDict()
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(self._open())  # a file that cannot be written fails the start, not the first feedback

    def remember(self, answer_id: str, origin: AnswerOrigin) -> None:
        """Remember the origin of an answer; the oldest of many answers is forgotten."""
        self._answers[answer_id] = origin
        if len(self._answers) > MAX_REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)

    def find_origin(self, answer_id: str, key: str) -> AnswerOrigin | None:
        """Return the origin of an answer; None if it was given before a restart or by another gateway.

        Raises:
            RequestError: another key requested the answer.
        """
        origin = self._answers.get(answer_id)
        if origin is not None and origin.key != key:
            raise RequestError(404, f"no answer of this key has the id {answer_id}", code="not_found", param="id")
        return origin

    def append(self, feedback: Feedback, origin: AnswerOrigin | None, key: str) -> None:
        """Append a line.

        Raises:
            RequestError: the file has reached its limit, or cannot be written.
        """
        known = asdict(origin) if origin else {"model": None, "version": None}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"id": feedback.id, **known, "key": key, **feedback.model_dump(exclude={"id"}), "time": time}
        line = json.dumps(record).encode() + b"\n"  # ASCII: no other character ends a line for any reader
        try:
            with self._lock:
                file = self._open()
                try:
                    self._write(file, line)
                finally:
                    os.close(file)
        except OSError:
            raise RequestError(
                507, "the feedback cannot be stored; see the gateway's disk", code="not_stored"
            ) from None

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)

    def _write(self, file: int, line: bytes) -> None:
        size = os.fstat(file).st_size
        if size + len(line) > self._max_bytes:
            raise RequestError(507, f"the feedback file has reached {self._max_bytes} bytes", code="feedback_full")
        # A full disk may have cut the last line.
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(file, line) != len(line):
            raise OSError("short write")
        os.fsync(file)


def parse_feedback(body: Mapping[str, Any]) -> Feedback:
    """Validate the body of a request to /v1/feedback.

    Raises:
        RequestError: a field is invalid, or rating and correction are both missing.
    """
    if not body.keys() & {"rating", "correction"}:
        raise invalid("rating and correction are missing; send at least one", "rating")
    try:
        return Feedback.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise invalid(f"{param}: {first['msg']}", param) from None
