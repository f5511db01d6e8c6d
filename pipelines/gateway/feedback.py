"""Feedback on answers: ratings, labels and corrected texts, one JSON line each, in a file that only grows to a limit."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.personal_data import mask
from components.common.runtime.errors import InputError
from pipelines.gateway.errors import RequestError, invalid

MAX_CORRECTION_CHARACTERS = 65_536
MAX_REMEMBERED_ANSWERS = 10_000
LINE_START = b'{"id": "'


def _is_none(value: object) -> bool:
    return value is None


class Feedback(BaseModel):
    """The body of a request to /v1/feedback. Null in all fields withdraws earlier feedback."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(pattern=r"^(chatcmpl|cmpl)-[0-9A-Za-z]{1,64}$")
    rating: Literal["up", "down"] | None = None
    correction: str | None = Field(None, min_length=1, max_length=MAX_CORRECTION_CHARACTERS)
    labels: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        None, max_length=16, exclude_if=_is_none
    )
    author: str | None = Field(None, min_length=1, max_length=128, exclude_if=_is_none)


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
            raise RequestError(404, f"no answer of this key has the ID {answer_id}", code="not_found", param="id")
        return origin

    def append(self, feedback: Feedback, origin: AnswerOrigin | None, key: str) -> None:
        """Append a line, with personal data in the correction and the labels replaced by placeholders.

        Raises:
            RequestError: the file has reached its limit, or cannot be written.
        """
        feedback = feedback.model_copy(
            update={
                "correction": feedback.correction and mask(feedback.correction),
                "labels": feedback.labels and [mask(label) for label in feedback.labels],
            }
        )
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
                507, "the feedback cannot be stored; check the gateway's disk", code="not_stored"
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


def read_feedback(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a feedback file; a line that a full disk has cut is skipped."""
    with path.open("rb") as file:
        for line in file:
            if (record := _parse_line(line)) is not None:
                yield record


def erase_feedback(path: Path, should_erase: Callable[[dict[str, Any]], bool]) -> int:
    """Overwrite lines with spaces, and return their number.

    A gateway may append meanwhile: the file is neither replaced nor shortened. Damaged lines are overwritten too: those
    that an interrupted call has overwritten in part, and those that a full disk has cut.

    Raises:
        InputError: the file has other lines than feedback.
    """
    erased, start = 0, 0
    with path.open("rb") as lines, path.open("r+b", buffering=0) as file:
        if not all(line.startswith((LINE_START, b" ", b"\n")) for line in lines):
            raise InputError(f"{path} is not a feedback file", hint="Correct the path after --feedback.")
        lines.seek(0)
        for line in lines:
            text = line.rstrip(b"\n")
            record = _parse_line(line)
            is_damaged = record is None and line.endswith(b"\n") and bool(text.strip())
            if is_damaged or (record is not None and should_erase(record)):
                os.pwrite(file.fileno(), b" " * len(text), start)
                erased += 1
            start += len(line)
        os.fsync(file.fileno())
    return erased


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and not line.startswith(b" ") else None


def parse_feedback(body: Mapping[str, Any]) -> Feedback:
    """Validate the body of a request to /v1/feedback.

    Raises:
        RequestError: a field is invalid, or rating, correction and labels are missing.
    """
    if not body.keys() & {"rating", "correction", "labels"}:
        raise invalid("rating, correction and labels are missing; send at least one", "rating")
    try:
        return Feedback.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise invalid(f"{param}: {first['msg']}", param) from None
