"""A synthesis from sources to the output folder: passages, teacher, lock, journal, estimate and publication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, InterruptedRunError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation.config import DataCurationConfig
from pipelines.synthesis import journal as answer_journal
from pipelines.synthesis import output as output_folder
from pipelines.synthesis.diversity import measure_diversity
from pipelines.synthesis.estimate import Estimate, estimate_synthesis
from pipelines.synthesis.journal import Journal
from pipelines.synthesis.passages import Passages, read_passages
from pipelines.synthesis.row_kinds import Reads
from pipelines.synthesis.settings import SynthesisSettings
from pipelines.synthesis.synthesis import Synthesis, SynthesizedRows, Task, plan_tasks
from pipelines.synthesis.teacher_budget import TeacherBudget, TeacherBudgetReachedError
from pipelines.synthesis.teacher_loading import open_teacher
from pipelines.synthesis.teachers import Teacher, TeacherOptions
from pipelines.synthesis.templates import Template, load_templates


@dataclass(frozen=True)
class PreparedSynthesis:
    """A synthesis whose inputs are read and whose teacher answers.

    Attributes:
        settings: the settings.
        templates: the templates.
        passages: the passages.
        tasks: all tasks in their order.
        teacher: the teacher.
        judge: the judge; None without a judge.
        budget: the limits and prices.
        output: the output folder.
        curation: settings of the curation that determine the passages, for the manifest.
        reporter: receives the progress.
    """

    settings: SynthesisSettings
    templates: list[Template]
    passages: Passages
    tasks: list[Task]
    teacher: Teacher
    judge: Teacher | None
    budget: TeacherBudget
    output: Path
    curation: dict[str, Any]
    reporter: Reporter

    @property
    def reads(self) -> Reads:
        """What the rows are written from."""
        return self.templates[0].kind.reads

    def describe_inputs(self) -> dict[str, Any]:
        """Return the numbers of documents and of passages or prompts."""
        return {
            "documents": self.passages.documents,
            f"{self.reads}s": len(self.passages.passages),
            "unreadable": len(self.passages.unreadable),
        }

    def estimate(self, probe: int) -> Estimate:
        """Return the estimate of the synthesis.

        Args:
            probe: the number of tasks to ask, whose answers `run` uses; 0 to send no request.

        Raises:
            InterruptedRunError: a limit is reached, or an endpoint does not answer.
        """
        rows, answers = None, []
        if probe:
            output_folder.find_finished(self.output, "", overwrite=True)
            with self._open_journal() as journal:
                known = {answer.key for answer in journal}
                rows = self._synthesize(journal, probe)
                answers = [answer for answer in journal if answer.key not in known] or list(journal)
        return estimate_synthesis(
            self.tasks,
            self.settings,
            rows,
            answers,
            self.budget,
            self.teacher.concurrency,
            has_judge=self.judge is not None,
        )

    def run(self, *, overwrite: bool) -> dict[str, Any]:
        """Write the rows, and return the result as JSON values. A finished result with equal inputs is returned.

        Raises:
            OutputOccupiedError: the output folder contains other files.
            InterruptedRunError: a limit is reached, or an endpoint does not answer.
            InputError: no row passes the checks.
        """
        inputs, config = self._list_inputs(), {**self.settings.as_dict(), "curation": self.curation}
        key = output_folder.compute_key(inputs, config)
        if finished := output_folder.find_finished(self.output, key, overwrite=overwrite):
            return self._build_result(finished)
        with self._open_journal() as journal:
            result = self._synthesize(journal)
            if not result.rows:
                reasons = ", ".join(f"{count} {reason}" for reason, count in result.reasons.items())
                raise InputError(
                    f"no answer of {self.teacher.name} passes the checks: {reasons}",
                    hint=f"Check the answers in {self.output / answer_journal.FILENAME}, and use a larger teacher.",
                )
            summary = self._summarize(result)
            if summary["note"]:
                self.reporter.note(summary["note"])
            seed = self.settings.sampling.seed
            return self._build_result(output_folder.publish(self.output, key, result, inputs, config, seed, summary))

    @contextmanager
    def _open_journal(self) -> Iterator[Journal]:
        """Provide the journal of the output folder, and count its answers."""
        self.output.mkdir(parents=True, exist_ok=True)
        with Journal(self.output / answer_journal.FILENAME) as journal:
            if len(journal):
                self.reporter.note(f"{format_count(len(journal), 'stored answer is', 'stored answers are')} reused")
            for answer in journal:
                self.budget.add(answer)
            yield journal

    def _synthesize(self, journal: Journal, max_tasks: int | None = None) -> SynthesizedRows:
        work = Synthesis(self.tasks, self.settings, self.teacher, self.judge, journal, self.budget, self.reporter)
        self.reporter.step(f"requesting answers from {self.teacher.name}")
        try:
            return work.run(max_tasks)
        except TeacherBudgetReachedError as error:
            raise InterruptedRunError(
                f"{error}; {format_count(len(journal), 'answer is', 'answers are')} stored",
                hint="Raise the limit and run the same command again to resume, or reduce --rows to match the stored "
                "answers.",
            ) from None

    def _list_inputs(self) -> list[ArtifactInput]:
        templates = [ArtifactInput(kind="template", content_sha256=one.sha256, uri=one.name) for one in self.templates]
        judge = self.judge.inputs if self.judge else ()
        return [*self.passages.inputs, *templates, *self.teacher.inputs, *judge]

    def _summarize(self, result: SynthesizedRows) -> dict[str, Any]:
        accepted, requested = len(result.rows), self.settings.rows
        note = ""
        if accepted < requested and result.asked < result.total:
            note = (
                f"{accepted:,} of {format_count(requested, 'row')}: "
                f"{format_count(result.total - result.asked, 'request')} omitted, "
                "because the documents have the maximum number of rows. Add documents, or raise --max-document-share."
            )
        elif accepted < requested:
            duplicates = result.reasons.get("near_duplicate", 0)
            remedy = (
                "Add documents: most rejected rows resemble another row."
                if duplicates and duplicates == max(result.reasons.values())
                else "Add documents, raise --per-passage, or add a template."
                if self.reads == "passage"
                else "Add rows, or raise --per-passage."
            )
            note = f"{accepted:,} of {format_count(requested, 'row')}: all {self.reads}s were used. {remedy}"
        budget = self.budget
        return {
            "rows": {"requested": requested, "accepted": accepted, "rejected": result.reasons},
            "yield": round(accepted / max(1, result.asked), 4),
            "note": note,
            **self.describe_inputs(),
            "rejected_passages": dict(sorted(self.passages.rejected.items())),
            "requests": budget.requests,
            "tokens": {
                "input": budget.input_tokens,
                "output": budget.output_tokens,
                "estimated": budget.is_estimated,
            },
            "prices": {"input": budget.input_price, "output": budget.output_price},
            "cost": budget.cost,
            "diversity": measure_diversity(result.rows),
            "teacher": {"name": self.teacher.name, "sha256": self.teacher.sha256},
            "judge": {"name": self.judge.name, "sha256": self.judge.sha256} if self.judge else None,
            "templates": [{"name": one.name, "sha256": one.sha256} for one in self.templates],
        }

    def _build_result(self, artifact: Artifact) -> dict[str, Any]:
        return {"synthesis": str(self.output), "sha256": artifact.sha256, **artifact.manifest.summary}


@contextmanager
def prepare(
    curation: DataCurationConfig,
    settings: SynthesisSettings,
    teacher: TeacherOptions,
    judge: TeacherOptions | None,
    budget: TeacherBudget,
    output: Path,
    work: Workdir,
    reporter: Reporter,
) -> Iterator[PreparedSynthesis]:
    """Check templates, teacher and judge, then read the passages, and provide the synthesis.

    Raises:
        UsageError: a template or an option is invalid.
        ConfigurationError: a source does not exist, a model is not available, or an API key is not set.
        EngineMissingError: an endpoint does not answer, or rejects the key.
        InputError: the sources contain no passage.
    """
    templates = load_templates(settings.templates)
    kind = templates[0].kind
    settings = replace(
        settings,
        per_passage=settings.per_passage or kind.rows_per_source,
        max_document_share=settings.max_document_share or kind.max_document_share,
    )
    with ExitStack() as models:
        opened = models.enter_context(open_teacher(teacher, work, reporter))
        opened_judge = models.enter_context(open_teacher(judge, work, reporter)) if judge else None
        reporter.step("reading the sources")
        passages = read_passages(curation, work, reporter, kind.reads)
        stated = curation.model_dump(include={"text_unit", "documents", "personal_data", "format"}, mode="json")
        if kind.reads == "prompt":
            stated["decontamination"] = curation.decontamination.model_dump(exclude={"sets"}, mode="json")
        yield PreparedSynthesis(
            settings,
            templates,
            passages,
            plan_tasks(passages.passages, templates, settings.per_passage),
            opened,
            opened_judge,
            budget,
            output,
            stated,
            reporter,
        )
