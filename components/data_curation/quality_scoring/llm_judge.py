"""Scores of rows by a language model at an OpenAI-compatible endpoint.

Answers are stored by the digest of model, prompt and row, so an interrupted curation resumes and a repeated one sends
no request. A row without a usable answer is kept without a score.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from components.common import personal_data
from components.common.answer_metrics.judge_scores import MAX_SCORE, MIN_SCORE
from components.common.artifacts import hashing
from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import Reporter
from components.data_curation.quality_scoring.judge_client import (
    KEY,
    JudgeClient,
    NoScoreError,
    read_api_key,
)
from components.data_curation.quality_scoring.scorer_interface import KeptRows, ScorerResult
from components.data_curation.score_settings import JudgeSettings

ROLE_COLUMNS = ("messages", "prompt", "chosen", "rejected", "completion")
MAX_UNSCORED_SHARE = 0.5  # above, the judge is unusable
PENDING_PER_WORKER = 4  # bounds the rows in memory
CACHE_FOLDER = "judge"  # in the stage's state folder


class AnswerCache:
    """Scores by digest of model, prompt and row, in a file of JSON lines. Without a folder, scores are in memory only.

    A line that an interruption truncated is ignored.
    """

    def __init__(self, folder: Path | None, prompt_digest: str) -> None:
        self._prompt_digest, self._lock = prompt_digest, threading.Lock()
        self._scores: dict[str, int] = {}
        self._file: TextIOWrapper | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{prompt_digest}.jsonl"
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    self._scores[str(entry["row"])] = int(entry["score"])
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n")  # ends a truncated line

    def __enter__(self) -> AnswerCache:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, text: str) -> int | None:
        """Return the stored score of a row; None if there is none."""
        return self._scores.get(hashing.digest(text))

    def add(self, text: str, score: int) -> None:
        """Store the score of a row."""
        digest = hashing.digest(text)
        with self._lock:
            self._scores[digest] = score
            if self._file:
                self._file.write(json.dumps({"row": digest, "score": score}) + "\n")
                self._file.flush()


@dataclass
class LanguageModelJudge:
    """A scorer of rows by a judge.

    Attributes:
        client: the client of the endpoint.
        state: the folder of stored answers; None to store none.
        minimum: the lowest score of a kept row; None for no limit.
        is_probed: whether the endpoint has answered a request.
    """

    client: JudgeClient
    state: Path | None
    minimum: float | None
    maximum: float | None = None
    is_probed: bool = False
    name: str = "judge"
    bin_edges: Sequence[float] = tuple(range(MIN_SCORE, MAX_SCORE + 2))

    @property
    def description(self) -> str:
        """The meaning of the score."""
        return f"score from {MIN_SCORE} (worst) to {MAX_SCORE} (best) by {self.client.settings.model}"

    @staticmethod
    def open(settings: JudgeSettings, state: Path | None) -> LanguageModelJudge:
        """Return the judge, without stored answers after one request that shows that the endpoint answers.

        Args:
            settings: the settings of the judge.
            state: the folder of stored answers; None to store none.

        Raises:
            ConfigurationError: the API key is not set.
            EngineMissingError: the judge does not answer, or rejects the request.
        """
        client = JudgeClient(settings, read_api_key(settings.credentials))
        judge = LanguageModelJudge(client, state and state / CACHE_FOLDER, settings.min_score)
        with AnswerCache(judge.state, client.prompt_digest) as cache:
            if not len(cache):  # otherwise, all rows may have a stored answer
                judge.probe()
        return judge

    def probe(self) -> None:
        """Send the first request if none was sent."""
        if not self.is_probed:
            self.client.probe()
            self.is_probed = True

    def score(self, rows: KeptRows, reporter: Reporter) -> ScorerResult:
        """Return the score of each row that is judged.

        Raises:
            EngineMissingError: the judge rejects the requests, or gives no score to most of the rows.
        """
        import numpy as np

        settings = self.client.settings
        scores: np.ndarray = np.full(len(rows.is_kept), np.nan)
        chosen = choose_rows(rows, settings.max_rows)
        total = len(chosen) if chosen is not None else rows.count
        reporter.note(f"judge: sending the texts of up to {format_count(total, 'row')} to {settings.url}")
        judged, reasons = 0, Counter[str]()
        with AnswerCache(self.state, self.client.prompt_digest) as cache:
            for row, score, reason in self._judge(_iterate_texts(rows, chosen), cache):
                judged += 1
                if score is None:
                    reasons[personal_data.mask(reason)] += 1
                else:
                    scores[row] = score
                reporter.progress(judged, total, "rows")
        failed = reasons.total()
        if failed > judged * MAX_UNSCORED_SHARE:
            raise EngineMissingError(
                f"the judge at {settings.url} returned no score for {failed:,} of {format_count(judged, 'row')}; first reason: "
                f"{next(iter(reasons))}",
                hint=f"Use a model that answers in JSON, check {KEY}.criteria, or raise {KEY}.timeout_seconds.",
            )
        notes = []
        if failed:
            kept = format_count(failed, "row, which is kept", "rows, which are kept")
            notes.append(f"the judge returned no score for {kept}; first reason: {next(iter(reasons))}")
            reporter.note(notes[0])
        return ScorerResult(scores, {"judged_rows": judged, "failed_rows": failed}, notes)

    def _judge(self, texts: Iterable[tuple[int, str]], cache: AnswerCache) -> Iterator[tuple[int, int | None, str]]:
        """Yield row, score and reason as they arrive: no score with a reason, or a score with "" if it was stored."""

        def rate(text: str) -> tuple[int | None, str]:
            try:
                score = self.client.rate(text)
            except NoScoreError as error:
                return None, str(error)
            cache.add(text, score)
            return score, "new"

        pending: dict[Future[tuple[int | None, str]], int] = {}
        pool = ThreadPoolExecutor(self.client.settings.concurrency)
        try:
            for row, text in texts:
                if (known := cache.get(text)) is not None:
                    yield row, known, ""
                    continue
                self.probe()
                pending[pool.submit(rate, text)] = row
                while len(pending) >= PENDING_PER_WORKER * self.client.settings.concurrency:
                    yield from _collect(pending)
            while pending:
                yield from _collect(pending)
        finally:  # requests that have started end by their timeout
            self.client.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(pending: dict[Future[tuple[int | None, str]], int]) -> Iterator[tuple[int, int | None, str]]:
    """Wait for at least one answer; yield the finished ones and remove them."""
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        row = pending.pop(future)
        yield row, *future.result()


def choose_rows(rows: KeptRows, limit: int | None) -> set[int] | None:
    """Return the rows to judge: those with the smallest digests of their content. None for all rows."""
    if limit is None or rows.count <= limit:
        return None
    digests = (
        (digest, begin + number)
        for begin, table in rows.prepared.iterate_tables(["digest"])
        for number, digest in enumerate(table["digest"].to_pylist())
        if rows.is_kept[begin + number]
    )
    return {row for _, row in nsmallest(limit, digests)}


def _iterate_texts(rows: KeptRows, chosen: set[int] | None) -> Iterator[tuple[int, str]]:
    for indices, contents in rows.iterate_contents():
        for row, content in zip(indices, contents, strict=True):
            if chosen is None or row in chosen:
                yield row, render_row(content)


def render_row(content: dict[str, Any]) -> str:
    """Return a row's content as text for the judge: each turn after its role; of pairs, the parts by name."""
    if "text" in content:
        return str(content["text"])
    parts = []
    for column in ROLE_COLUMNS:
        turns = content.get(column) or ()
        if turns and column in ("chosen", "rejected", "completion"):
            parts.append(f"[{column}]")
        parts += [f"{turn['role']}: {turn['content']}" for turn in turns]
    if content.get("label") is not None:
        parts.append(f"[label] {'good' if content['label'] else 'bad'}")
    return "\n\n".join(parts)
