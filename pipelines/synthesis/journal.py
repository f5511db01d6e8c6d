"""Journal of the teacher's answers: a file of JSON lines to which each answer is flushed before it is used.

A synthesis that was killed therefore does not ask for an answer that it has received. One process at a time has the
journal open, so two processes in one folder do not pay for the same answers.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from components.common.runtime.errors import BusyError

FILENAME = "answers.jsonl"


@dataclass(frozen=True)
class Answer:
    """An answer of a teacher or judge.

    Attributes:
        key: the digest of all that determines the answer.
        text: the text; "" if the endpoint rejected the request.
        is_truncated: whether the answer reached the maximum length.
        input_tokens: tokens of the prompt.
        output_tokens: tokens of the answer.
        is_estimated: whether the numbers of tokens are estimated, because the endpoint does not report them.
        seconds: time until the answer; of a local model, the time of its batch.
        model: the model that answered, as the endpoint reports it; "" if it does not.
        refusal: why the endpoint rejected the request; "" for an answer.
    """

    key: str
    text: str
    is_truncated: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    is_estimated: bool = False
    seconds: float = 0.0
    model: str = ""
    refusal: str = ""


class Journal:
    """The answers in a journal by key. Methods may be called by several threads.

    Args:
        path: the file. A line that an interruption truncated is ignored. Requests that the endpoint rejected are
            ignored too: they were not paid for, and the endpoint may accept them now.

    Raises:
        BusyError: another process has the journal open.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BusyError(
                f"another process is writing {path}", hint="Rerun the command after that process has ended."
            ) from None
        content = path.read_bytes()
        for line in content.split(b"\n"):
            with suppress(ValueError, TypeError, RecursionError):
                answer = Answer(**json.loads(line))
                if not answer.refusal:
                    self._answers[answer.key] = answer
        self._ends_open = bool(content) and not content.endswith(b"\n")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Answer]:
        return iter(list(self._answers.values()))

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """Return the answer with this key; None if it was not received."""
        return self._answers.get(key)

    def add(self, answer: Answer) -> None:
        """Store an answer, and return when it is on the disk.

        Raises:
            OSError: the answer cannot be written.
        """
        line = json.dumps(asdict(answer), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            self._file.write(b"\n" + line if self._ends_open else line)
            self._ends_open = True  # until the line is complete
            self._file.flush()
            os.fsync(self._file.fileno())
            self._ends_open = False
            self._answers[answer.key] = Answer(**json.loads(line))  # as a resumed synthesis reads it
