"""The synthesis: requests in a fixed order, checks, and the accepted rows.

Requests are sent in waves. A wave has as many requests as rows are missing, so no accepted row is paid for in vain, and
the result depends neither on the speed nor on the order of the answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from components.common.answer_metrics import judge_scores
from components.common.artifacts import hashing
from components.common.row_comparison import shingles
from components.common.row_comparison.training_overlap import measure_similarity
from components.common.row_comparison.words import find_words
from components.common.runtime.reporters import Reporter
from components.data_curation.quality_scoring import judge_client
from components.data_curation.quality_scoring.llm_judge import render_row
from pipelines.synthesis import row_checks
from pipelines.synthesis.journal import Answer, Journal
from pipelines.synthesis.passages import Passage
from pipelines.synthesis.row_kinds import Candidate, InvalidAnswerError
from pipelines.synthesis.settings import SynthesisSettings
from pipelines.synthesis.teacher_budget import TeacherBudget
from pipelines.synthesis.teachers import Sampling, Teacher, TeacherRequest, build_request
from pipelines.synthesis.templates import DELIMITER_TAG, Template

if TYPE_CHECKING:
    import numpy as np

REPAIR = "This is not valid: {problem}. Answer again with only the JSON object."
JUDGE_MAX_TOKENS = 512


@dataclass(frozen=True)
class Task:
    """A row to write: the passage or prompt, the template, and the number of the request about this passage."""

    passage: Passage
    template: Template
    number: int


@dataclass(frozen=True)
class RejectedRow:
    """A rejected answer with the reason and a detail."""

    task: Task
    reason: str
    detail: str
    text: str


@dataclass
class SynthesizedRows:
    """The result of a synthesis.

    Attributes:
        rows: the accepted rows, as curation reads them.
        rejected: the rejected answers.
        documents: the number of accepted rows by the digest of the document.
        asked: the number of tasks with an answer.
        total: the number of tasks.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[RejectedRow] = field(default_factory=list)
    documents: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    total: int = 0

    @property
    def reasons(self) -> dict[str, int]:
        """The number of rejected answers by reason."""
        return dict(sorted(Counter(row.reason for row in self.rejected).items()))


def plan_tasks(passages: Sequence[Passage], templates: Sequence[Template], per_passage: int) -> list[Task]:
    """Return all tasks in their order: a passage of each document in turn, then again with the next template or style."""
    by_document: dict[str, list[Passage]] = {}
    for passage in passages:
        by_document.setdefault(passage.document_sha256, []).append(passage)
    turns = [one for group in zip_longest(*by_document.values()) for one in group if one is not None]
    return [
        Task(passage, template, number) for number in range(per_passage) for template in templates for passage in turns
    ]


class Synthesis:
    """Asks a teacher about the tasks, and checks its answers.

    Args:
        tasks: the tasks in their order.
        settings: the settings.
        teacher: the teacher.
        judge: the judge of rows that pass the checks; None without a judge.
        journal: the journal of all answers.
        budget: the limits.
        reporter: receives the progress.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: SynthesisSettings,
        teacher: Teacher,
        judge: Teacher | None,
        journal: Journal,
        budget: TeacherBudget,
        reporter: Reporter,
    ) -> None:
        self._settings, self._teacher, self._judge = settings, teacher, judge
        self._journal, self._budget, self._reporter = journal, budget, reporter
        self._waiting = list(tasks)
        documents = len({task.passage.document_sha256 for task in tasks})
        share = math.ceil(settings.rows * settings.max_document_share)
        self._max_document_rows = max(share, math.ceil(settings.rows / max(1, documents)))
        self._shingles: list[np.ndarray] = []
        self._word_hashes: dict[str, int] = {}
        self.result = SynthesizedRows(total=len(tasks))

    def run(self, max_tasks: int | None = None) -> SynthesizedRows:
        """Write rows until their number is reached, or no task is left.

        Args:
            max_tasks: the maximum number of tasks, for a probe; None for all.

        Raises:
            TeacherBudgetReachedError: the next request could exceed a limit.
            InterruptedRunError: an endpoint does not answer.
            EngineMissingError: an endpoint rejects the key, the model or the path.
        """
        while wave := self._choose_wave(max_tasks):
            answers = self._ask_teacher(wave)
            self.result.asked += len(wave)
            passed = [
                (task, candidate, answer)
                for task, (candidate, answer) in zip(wave, answers, strict=True)
                if candidate is not None and self._check(task, candidate, answer)
            ]
            scores = self._ask_judge(passed)
            for (task, candidate, answer), (score, problem) in zip(passed, scores, strict=True):
                if problem:
                    self._reject(task, "low_judge_score", problem, answer)
                else:
                    self.result.rows.append(self._build_row(task, candidate, answer, score))
                    self.result.documents[task.passage.document_sha256] += 1
            self._reporter.progress(len(self.result.rows), self._settings.rows, "rows")
        return self.result

    def _choose_wave(self, max_tasks: int | None) -> list[Task]:
        """Remove the next tasks from those that wait: as many as rows are missing, in total and of each document."""
        size = self._settings.rows - len(self.result.rows)
        if max_tasks is not None:
            size = min(size, max_tasks - self.result.asked)
        chosen: list[Task] = []
        waiting: list[Task] = []
        counts = self.result.documents.copy()
        for task in self._waiting:
            document = task.passage.document_sha256
            if len(chosen) < size and counts[document] < self._max_document_rows:
                chosen.append(task)
                counts[document] += 1
            else:
                waiting.append(task)
        self._waiting = waiting
        return chosen

    def _ask_teacher(self, wave: Sequence[Task]) -> list[tuple[Candidate | None, Answer]]:
        """Return the candidate, or None, and the last answer of each task; answers without candidate are rejected."""
        results: list[tuple[Candidate | None, Answer]] = []
        messages = [task.template.build_messages(task.passage, task.number) for task in wave]
        problems = [""] * len(wave)
        open_tasks = list(range(len(wave)))
        latest: dict[int, tuple[Candidate | None, Answer]] = {}
        for attempt in range(self._settings.repairs + 1):
            requests = [
                build_request(
                    self._teacher,
                    messages[index],
                    wave[index].template.kind.schema,
                    self._settings.sampling,
                    wave[index].number,
                )
                for index in open_tasks
            ]
            failed = []
            for index, answer in zip(open_tasks, self._ask(self._teacher, requests), strict=True):
                candidate, problems[index] = _read_candidate(wave[index], answer)
                latest[index] = (candidate, answer)
                if candidate is None and not answer.refusal and wave[index].template.kind.schema is not None:
                    failed.append(index)
                    repair = {"role": "user", "content": REPAIR.format(problem=problems[index])}
                    messages[index] = [*messages[index], {"role": "assistant", "content": answer.text or " "}, repair]
            open_tasks = failed
            if not open_tasks or attempt == self._settings.repairs:
                break
        for index, task in enumerate(wave):
            candidate, answer = latest[index]
            if candidate is None:
                reason = "request_rejected" if answer.refusal else "truncated" if answer.is_truncated else "structure"
                self._reject(task, reason, problems[index], answer)
            results.append((candidate, answer))
        return results

    def _check(self, task: Task, candidate: Candidate, answer: Answer) -> bool:
        """Return whether the candidate passes the checks and is not a near-duplicate of an earlier row.

        An answer to a prompt has no passage to compare with, and curation removes near-duplicates.
        """
        if task.template.kind.reads == "prompt":
            return True
        reason, detail = row_checks.find_problem(candidate, task.passage, self._settings.min_support)
        if not reason:
            words = " ".join(find_words("\n".join(row_checks.list_texts(candidate))))
            own = shingles.hash_shingles(words, self._word_hashes)
            similarity = max((measure_similarity(own, other) for other in self._shingles), default=0.0)
            if similarity >= self._settings.duplicate_threshold:
                reason, detail = "near_duplicate", f"similarity {similarity:.2f} to an earlier row"
            else:
                self._shingles.append(own)
        if reason:
            self._reject(task, reason, detail, answer)
        return not reason

    def _ask_judge(self, passed: Sequence[tuple[Task, Candidate, Answer]]) -> list[tuple[int | None, str]]:
        """Return the score of each row, and the problem if the score is too low or missing."""
        if self._judge is None:
            return [(None, "")] * len(passed)
        sampling = Sampling(0.0, 1.0, JUDGE_MAX_TOKENS, self._settings.sampling.seed)
        requests = []
        for task, candidate, _ in passed:
            kind, text = task.template.kind, render_row(candidate.build_content())
            if kind.reads == "passage":
                text = DELIMITER_TAG.sub(r"< \1passage>", f"[passage]\n{task.passage.text}\n\n[row]\n{text}")
            quoted = judge_client.DELIMITER_TAG.sub(r"< \1row>", text)
            messages = [
                {"role": "system", "content": judge_client.INSTRUCTION.format(criteria=kind.judge_criteria)},
                {"role": "user", "content": f"<row>\n{quoted}\n</row>"},
            ]
            requests.append(build_request(self._judge, messages, judge_scores.ANSWER_SCHEMA, sampling, 0))
        results: list[tuple[int | None, str]] = []
        for answer in self._ask(self._judge, requests):
            try:
                score = judge_scores.parse_score(answer.text, answer.is_truncated)
            except ValueError as error:
                results.append((None, answer.refusal or str(error)))
                continue
            minimum = self._settings.min_score
            results.append((score, f"score {score}, minimum {minimum}" if score < minimum else ""))
        return results

    def _ask(self, teacher: Teacher, requests: Sequence[TeacherRequest]) -> Iterator[Answer]:
        """Yield the answers in the order of the requests, after all of them are in the journal."""

        def count() -> None:
            self._reporter.progress(self._budget.requests, None, "answers")

        teacher.answer(requests, self._journal, self._budget, count)
        for request in requests:
            answer = self._journal.get(request.key)
            assert answer is not None  # added by `answer`
            yield answer

    def _reject(self, task: Task, reason: str, detail: str, answer: Answer) -> None:
        self.result.rejected.append(RejectedRow(task, reason, detail, answer.text))

    def _build_row(self, task: Task, candidate: Candidate, answer: Answer, score: int | None) -> dict[str, Any]:
        content, passage, sampling = candidate.build_content(), task.passage, self._settings.sampling
        evidence = [turn.evidence for turn in candidate.turns]
        meta: dict[str, Any] = {
            "document_sha256": passage.document_sha256,
            task.template.kind.reads: passage.line,
            f"{task.template.kind.reads}_sha256": passage.sha256,
            **passage.location,
            **({"evidence": evidence} if any(evidence) else {}),
            "template": task.template.name,
            "template_sha256": task.template.sha256,
            "teacher": self._teacher.name,
            "teacher_sha256": self._teacher.sha256,
            "teacher_reported": answer.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "request": answer.key,
        }
        if self._judge is not None:
            meta |= {"judge": self._judge.name, "judge_sha256": self._judge.sha256, "judge_score": score}
        row_id = f"syn-{hashing.digest([answer.key, content])[:16]}"
        return {"id": row_id, **content, "source": passage.source or passage.document, "meta": meta}


def _read_candidate(task: Task, answer: Answer) -> tuple[Candidate | None, str]:
    """Return the candidate in an answer, or None and the problem."""
    if answer.refusal:
        return None, answer.refusal
    if answer.is_truncated:
        return None, "the answer is longer than the limit; write a shorter one"
    try:
        return task.template.kind.parse(answer.text, task.passage.messages), ""
    except InvalidAnswerError as error:
        return None, str(error)
