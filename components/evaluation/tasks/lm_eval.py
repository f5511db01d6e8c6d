"""Task kind `lm_eval`: a task of lm-eval (Gao et al., the Language Model Evaluation Harness).

Metrics that lm-eval computes over all documents at once, such as corpus BLEU or Matthews correlation, are rejected:
models can only be compared by a value per document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from components.common.runtime.reporters import Reporter
from components.evaluation.task_interface import (
    Continuation,
    Decoding,
    Engine,
    Item,
    Likelihood,
    Metric,
    Scores,
    TaskContext,
)
from components.evaluation.tasks import (
    item_encoding,
    lm_eval_metrics,
    lm_eval_runner,
    lm_eval_task_files,
    record_files,
)
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings, check_distinct
from components.evaluation.tasks.lm_eval_runner import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# lm-eval tasks that execute generated code. The key unsafe_code in their files is also checked, before they run.
CODE_EXECUTING_TASKS = re.compile(
    r"humaneval|mbpp|code_?eval|bigcodebench|livecodebench|apps_|ds1000|swe_?bench|multipl_?e|jsonschema_bench", re.I
)


class LMEval(TaskSettings):
    """Settings of an lm_eval task."""

    kind: Literal["lm_eval"] = "lm_eval"
    task: str = Field(min_length=1, description="Name of a task in lm-eval, or path of a local task file (.yaml).")
    data: str = Field("", description="Local file of the documents to evaluate. Empty: the dataset of the task.")
    metrics: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]] = Field(
        ["acc"], min_length=1, description="Metrics of the task to report, as named in lm-eval, such as acc_norm."
    )
    lower_is_better: list[str] = Field(
        [], description="Metrics for which lower is better, in addition to perplexities and error rates."
    )
    filter: str = Field(
        "", description="lm-eval filter to score, such as strict-match. Empty: the task's first filter."
    )
    shots: int | None = Field(None, ge=0, description="Number of few-shot examples. null: the task's default.")
    chat: bool = Field(
        False,
        description="Apply the model's chat template, as lm-eval does with --apply_chat_template. "
        "false: send the raw prompt.",
    )

    @model_validator(mode="after")
    def _check(self) -> LMEval:
        if CODE_EXECUTING_TASKS.search(Path(self.task).stem):
            raise ValueError(f"task {self.task} executes generated code, which is not supported")
        if unknown := sorted(set(self.lower_is_better) - set(self.metrics)):
            raise ValueError(
                f"lower_is_better: unknown metrics {', '.join(unknown)}; expected names from `metrics`: "
                f"{', '.join(self.metrics)}"
            )
        check_distinct(self.metrics)
        return self

    @classmethod
    def is_file_path(cls, field: str, value: object) -> bool:
        """Return whether this value of a field is the path of a file; `task` may be a name in lm-eval."""
        return super().is_file_path(field, value) or (field == "task" and lm_eval_task_files.is_task_file(str(value)))

    def list_referenced_files(self, field: str) -> list[Path]:
        """Return the files that the task file reads."""
        return lm_eval_task_files.list_referenced_files(Path(self.task).expanduser()) if field == "task" else []


class LMEvalTask(Task[LMEval]):
    """A task of lm-eval, by name or file. Its metrics are validated when lm-eval runs the task."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The configured metrics."""
        lower = self.settings.lower_is_better
        return {metric: lm_eval_metrics.resolve_metric(metric, lower) for metric in self.settings.metrics}

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the documents; `request` holds all lm-eval requests for a document.

        Raises:
            ConfigurationError: The task or a metric is unknown or not supported, or a local file does not exist.
            InputError: The documents are invalid or not on this machine.
        """
        if lm_eval_task_files.is_task_file(self.settings.task):
            record_files.require_file(self.settings.task, "task")
        if self.settings.data:
            record_files.read_records(self.settings.data)
        recorder = RequestRecorder(context.tokenizer)
        _, samples = lm_eval_runner.run_task(self.settings, recorder, context.reporter, requests_only=True)
        items = []
        for sample in samples:
            requests = json.loads(json.dumps(sample["arguments"], default=str))
            texts = [
                str(request[0]) + (request[1] if isinstance(request[-1], str) and len(request) > 1 else "")
                for request in requests
            ]
            items.append(
                Item(
                    id=f"{int(sample['doc_id']):06d}",
                    prompt=str(requests[0][0]) if requests and requests[0] else "",
                    reference=str(sample.get("target", "")),
                    length=item_encoding.count_tokens(context.tokenizer, max(texts, key=len)),
                    request={"requests": requests, "filter": sample["filter"]},
                )
            )
        return items

    def check_requests(self, items: Sequence[Item], context: TaskContext, max_input_tokens: int | None) -> None:
        """Raise InputError if the maximum answer length leaves no room for a prompt."""
        parts = [part for item in items for request in item.request["requests"] for part in request]
        limits = [lm_eval_runner.parse_decoding(part).max_new_tokens for part in parts if isinstance(part, dict)]
        setting = "max_gen_toks in the task's generation_kwargs"
        item_encoding.check_prompt_room(max_input_tokens, max(limits, default=0), setting)

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return lm-eval's values by document.

        Raises:
            ConfigurationError: lm-eval computes a metric only over all documents at once.
        """
        scores, samples = lm_eval_runner.run_task(self.settings, engine, context.reporter)
        responses = [_read_responses(sample) for sample in samples]
        broken = [is_broken for _, is_broken in responses]
        answers = [answer for answer, _ in responses if answer is not None]
        values: dict[str, list[float]] = {}
        weights: dict[str, list[float]] = {}
        for metric in self.settings.metrics:
            raw = [sample[metric] for sample in samples]
            own, own_weights = lm_eval_metrics.extract_document_values(metric, raw)
            lm_eval_metrics.check_aggregate(metric, own, own_weights, scores[metric])
            values[metric] = [math.nan if bad else value for value, bad in zip(own, broken, strict=True)]
            if own_weights:
                weights[metric] = own_weights
        figures = {f"lm_eval_{name}": math.nan if any(broken) else score for name, score in scores.items()}
        return Scores(values, weights, answers if len(answers) == len(responses) else [], figures)


def _read_responses(sample: Sample) -> tuple[str | None, bool]:
    """Return a document's generated answer, None for log-likelihoods, and whether a log-likelihood is NaN."""
    # If a log-likelihood is NaN, lm-eval selects the first option.
    responses = [response for request in sample["resps"] for response in request]
    values = [r[0] if isinstance(r, (list, tuple)) else r for r in responses]
    answer = responses[0] if responses and isinstance(responses[0], str) else None
    return answer, any(isinstance(value, float) and math.isnan(value) for value in values)


@dataclass(frozen=True)
class RequestRecorder:
    """Engine without a model that returns placeholder results. It serves to build lm-eval's requests."""

    tokenizer: PreTrainedTokenizerBase
    max_input_tokens: int | None = None

    def compute_likelihoods(self, continuations: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """Return placeholders."""
        return [Likelihood(-1.0, 1, False)] * len(continuations)

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """Return placeholders."""
        return [""] * len(prompts)
