"""Configuration of the evaluation: the tasks, the engine, and the rules of the promotion gate."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_validator,
)

from components.common import regression_suite
from components.common.gate_rules import SLICE_KINDS, SUITE_PREFIX, Rule
from components.common.models.quantizations import QuantizationName
from components.common.runtime.errors import ConfigurationError
from components.evaluation import suite
from components.evaluation.suite import SuiteName
from components.evaluation.task_interface import Metric
from components.evaluation.tasks.answer_checks import CHECKED_KINDS, AnswerChecks
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.held_out import HeldOut
from components.evaluation.tasks.judge import Judge
from components.evaluation.tasks.reward import Reward
from components.evaluation.tasks.task_registry import TASK_KINDS, TaskConfig, build_task

HELD_OUT_KEYS = ("max_items", "generations", "generation_tokens")
MAX_HARMED_SHARE = 0.1  # default; 29 items without harm show it, so small test splits can be decided


def _default_rules(metric: str | None = None, chance: float | None = None) -> list[Rule]:
    """Return rules that require a gain over base and incumbent, few harmed items, and no significant loss in any slice.

    With `chance`, the metric must exceed this value instead of the base's: the base of a reward model is a baseline only,
    because it may have learned to write the chosen answers.

    A limit on harmed items is a default of the held-out loss only: two models of equal accuracy may answer more than
    10% of the items differently.
    """
    fields = {"metric": metric} if metric else {}
    bounds: list[dict[str, object]] = [{"min_gain": 0.0}, {"max_loss": 0.0, "slices": list(SLICE_KINDS)}]
    if not metric:
        bounds.insert(1, {"max_harmed_share": MAX_HARMED_SHARE})
    by_chance: list[dict[str, object]] = [] if chance is None else [{"against": chance, "min_gain": 0.0}]
    roles = ("base", "incumbent") if chance is None else ("incumbent",)
    compared = [{"against": against, **bound} for bound in bounds for against in roles]
    return [Rule.model_validate({**rule, **fields}) for rule in (*by_chance, *compared)]


def check_quantized_engine(config: EvaluationConfig) -> None:
    """Check that the engine can measure quantized weights. Raises ConfigurationError for int8 with vLLM."""
    if config.quantization == "int8" and config.engine == "vllm":
        raise ConfigurationError(
            f"evaluation.engine is vllm, which does not support the {config.quantization} weights of "
            "triton_packaging.quantization",
            hint="Set evaluation.engine to transformers.",
        )


class EvaluationConfig(BaseModel):
    """Evaluation metrics and promotion rules."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    tasks: list[TaskConfig] = Field(
        default_factory=lambda: list[TaskConfig]([HeldOut(kind="held_out")]),
        min_length=1,
        description="Evaluation tasks. docs/reference/evaluation-tasks.md lists the kinds and their keys.",
    )
    suite: SuiteName = Field(
        "default",
        description="Regression suite. default: add the tasks suite_* to tasks, and their rules to gate. The rules "
        "compare instruction following, general capability, refusals, memorisation, leaks and degenerate answers with "
        "the base and the incumbent. none: no suite; requires model_registry.auto_promote: false. See "
        "docs/how-to/evaluation.md.",
    )
    engine: Literal["transformers", "vllm", "auto"] = Field(
        "transformers",
        description="Inference engine. transformers: any device; vllm: NVIDIA GPUs; "
        "auto: vllm if an NVIDIA GPU is available and vLLM is installed and supports the model, else transformers.",
    )
    quantization: QuantizationName = Field(
        "none",
        exclude_if=lambda value: value == "none",
        description="Weight format in which the candidate is evaluated. Default: triton_packaging.quantization. "
        "Base and incumbent are not quantized. int8 requires engine transformers or auto.",
    )
    max_items: int | None = Field(
        None, ge=2, description="Maximum number of test rows, in order of id. null: all rows."
    )
    min_items: int | None = Field(
        None,
        ge=2,
        description="Minimum number of items for a rule and for a slice. A rule with fewer items fails; a smaller slice "
        "is not judged. null: 10 for slices and min_gain; for max_harmed_share and max_loss, the number that the limit "
        "requires (29 for max_harmed_share 0.1, 299 for max_loss 0.05 nats per token). Does not apply to the suite.",
    )
    max_length: int | None = Field(
        None,
        ge=8,
        description="Maximum row length in tokens. Longer rows are truncated. null: max_length from the candidate's recipe, or "
        "2,048 tokens for a model that tuneline did not train.",
    )
    batch_tokens: int = Field(
        2048,
        ge=8,
        description="Batch size in tokens, including padding. Larger batches are faster on a GPU and need more memory. "
        "On a CPU, likelihoods are computed in batches of at most 512 tokens per thread.",
    )
    generations: int = Field(
        4,
        ge=0,
        description="Number of test rows that every model answers, with greedy decoding, for the side-by-side "
        "comparison.",
    )
    generation_tokens: int = Field(
        48, ge=1, description="Maximum answer length, in tokens, in the side-by-side comparison."
    )
    bootstrap_samples: int = Field(
        10_000,
        ge=1000,
        description="Number of bootstrap resamples per confidence interval. More resamples make the interval more "
        "precise.",
    )
    repetition: int = Field(
        0,
        ge=0,
        exclude_if=operator.not_,
        description="Repetition number of the evaluation. After a change of the number, the evaluation measures all "
        "models again, reuses no earlier scores, and has a new digest. Raise the number to renew an evaluation that "
        "is older than max_evaluation_age_days of the release policy.",
    )
    gate: list[Rule] = Field(
        default_factory=_default_rules,
        min_length=1,
        description="Rules that must all hold to accept the candidate. "
        "A rule against the incumbent holds if no incumbent exists. "
        "Without a held_out task, the default rules use the first metric of the first task.",
    )

    @property
    def requested_engine(self) -> Literal["transformers", "vllm", "auto"]:
        """The engine for all models, which must be one; only transformers computes with int8 weights."""
        return "transformers" if self.quantization == "int8" else self.engine

    @model_validator(mode="after")
    def _copy_held_out_keys(self) -> EvaluationConfig:
        """Copy keys to held-out tasks that do not set them; mark them as unset, so that later changes apply."""
        for task in self.tasks:
            for name in HELD_OUT_KEYS if isinstance(task, HeldOut) else ():
                if name not in task.model_fields_set:
                    setattr(task, name, getattr(self, name))
                    task.model_fields_set.discard(name)
        return self

    @model_validator(mode="after")
    def _check_task_and_metric_names(self) -> EvaluationConfig:
        own_metrics = self._list_metrics()
        if "gate" not in self.model_fields_set and any(rule.metric not in own_metrics for rule in self.gate):
            name, metric = next(iter(build_task(self.tasks[0]).metrics.items()))
            self.gate = _default_rules(f"{self.tasks[0].name}.{name}", metric.chance)
            self.model_fields_set.discard("gate")
        self._check_reserved_names()
        if self.suite == "default":
            self._append("tasks", [task for task in suite.build_tasks() if task not in self.tasks])
            self._append("gate", [rule for rule in regression_suite.build_rules() if rule not in self.gate])
        names = [task.name for task in self.tasks]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tasks: duplicate name {duplicates[0]}; expected a distinct name for each task")
        metrics = self._list_metrics()
        uncalibrated = {task.name for task in self.tasks if isinstance(task, Judge) and not task.calibration}
        for task in self.tasks:
            if isinstance(task, AnswerChecks):
                self._check_checked_tasks(task)
        for rule in self.gate:
            _check_rule_metrics(rule, metrics, uncalibrated)
            _check_rule_limits(rule, metrics[rule.metric])
        return self

    def _list_metrics(self) -> dict[str, Metric]:
        """Return the metrics of all tasks by their names in rules, such as held_out.loss."""
        return {
            f"{task.name}.{name}": metric for task in self.tasks for name, metric in build_task(task).metrics.items()
        }

    def _check_reserved_names(self) -> None:
        """Check that tasks with the names of the suite are the suite's, as in a stored configuration."""
        tasks = suite.build_tasks()
        for task in self.tasks:
            if task.name.startswith(SUITE_PREFIX) and task not in tasks:
                raise ValueError(
                    f"tasks: {task.name} is not one of the suite's own tasks, for which names that start with "
                    f"{SUITE_PREFIX} are reserved; expected another name"
                )

    @field_serializer("tasks", "gate", mode="wrap")
    def _omit_suite(
        self, values: list[Any], serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> list[Any]:
        """Omit the suite from a configuration of the set keys, to which validation adds it again."""
        if info.exclude_unset and self.suite == "default":
            added = [*suite.build_tasks(), *regression_suite.build_rules()]
            values = [value for value in values if value not in added]
        serialized: list[Any] = serialize(values)
        return serialized

    def _append(self, field: str, values: Sequence[TaskSettings | Rule]) -> None:
        """Append values to a field, which stays unset if it is, so that a stored configuration remains short."""
        is_set = field in self.model_fields_set
        setattr(self, field, [*getattr(self, field), *values])
        if not is_set:
            self.model_fields_set.discard(field)

    def _check_checked_tasks(self, settings: AnswerChecks) -> None:
        kinds = {task.name: task.kind for task in self.tasks}
        for name in settings.tasks:
            if kinds.get(name) not in CHECKED_KINDS:
                raise ValueError(
                    f"tasks: {settings.name} checks the answers of {name}, which is {kinds.get(name, 'not a task')}; "
                    f"expected a task of one of the kinds {', '.join(CHECKED_KINDS)}"
                )


def _check_rule_metrics(rule: Rule, metrics: Mapping[str, Metric], uncalibrated: Collection[str]) -> None:
    """Check that a task measures the metrics of a rule, and that the rule can use them."""
    for name in (rule.metric, *([rule.control] if rule.control else [])):
        if name not in metrics:
            raise ValueError(f"gate: no task measures {name}; available: {', '.join(sorted(metrics))}")
        if rule.control and not metrics[name].is_binary:
            raise ValueError(
                f"gate: {name} is not binary; a rule with control requires metrics that are 0 or 1 for each item"
            )
    if rule.metric.partition(".")[0] in uncalibrated:
        raise ValueError(
            f"gate: a rule uses {rule.metric}, but the judge's calibration is empty; expected a file of "
            "labelled pairs (docs/reference/evaluation-tasks.md#calibration), or no rule on this task"
        )


def _check_rule_limits(rule: Rule, metric: Metric) -> None:
    """Check that the limits of a rule apply to its metric, and that a candidate can exceed them."""
    if rule.max_harmed_share is not None and rule.harm is None and metric.get_harm() is None:
        raise ValueError(f"gate: harm of {rule.metric} is null; expected a loss per item, in the metric's unit")
    largest = rule.max_item_loss or metric.get_max_item_loss(rule.against)
    if rule.max_loss and largest and not metric.exponential and rule.max_loss >= largest:
        raise ValueError(
            f"gate: max_loss of {rule.metric} is {rule.max_loss:g}; expected less than {largest:g}, the largest "
            "possible loss of an item, because a larger max_loss accepts every candidate"
        )


def adapt_to_reward_model(config: EvaluationConfig) -> EvaluationConfig:
    """Return the configuration for a reward model: with the task `reward` and without the suite, unless it sets tasks.

    The keys tasks and suite stay unset, so that they follow a later change of the objective.
    """
    if {"tasks", "suite"} & config.model_fields_set:
        return config
    values = config.model_dump(exclude_unset=True)
    adapted = EvaluationConfig.model_validate({**values, "tasks": [Reward()], "suite": "none"})
    adapted.model_fields_set.difference_update({"tasks", "suite"})
    return adapted


def check_task_kinds(config: EvaluationConfig, *, is_reward_model: bool) -> None:
    """Check that the tasks can measure the kind of the candidate.

    Raises:
        ConfigurationError: A task needs likelihoods or answers of a reward model, or rewards of another model.
    """
    for settings in config.tasks:
        if TASK_KINDS[settings.kind].scores_rewards == is_reward_model:
            continue
        if is_reward_model:
            raise ConfigurationError(
                f"evaluation: the task {settings.name} of kind {settings.kind} cannot measure a reward model, which "
                "neither answers nor predicts tokens",
                hint="Set evaluation.tasks to [{kind: reward}] and evaluation.suite to none, or remove both keys.",
            )
        raise ConfigurationError(
            f"evaluation: the task {settings.name} of kind reward measures reward models only",
            hint="Remove the task, or train a reward model with fine_tuning.objective reward.",
        )
