"""Configuration of the evaluation: the tasks, the engine, and the rules of the promotion gate."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.evaluation.tasks.held_out import HeldOut
from components.evaluation.tasks.task_registry import TaskConfig, build_task

LIMIT_KEYS = ("min_gain", "max_loss", "max_harmed_share")
HELD_OUT_KEYS = ("max_items", "generations", "generation_tokens")
MAX_HARMED_SHARE = 0.1  # default; 29 items without harm show it, so small test splits can be decided
SliceKind = Literal["source", "category", "length"]
SLICE_KINDS: tuple[SliceKind, ...] = ("source", "category", "length")


class Rule(BaseModel):
    """One rule of the promotion gate. A gain is an improvement of the metric: a lower loss or a higher score."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    metric: str = Field(
        "held_out.loss",
        pattern=r"^[a-z][a-z0-9_]*\.[A-Za-z0-9_,@.-]+$",
        description="Metric to compare, as task.metric.",
    )
    against: Literal["base", "incumbent"] | float = Field(
        "base", description="Comparison target: the base model, the incumbent, or a number that the metric must reach."
    )
    min_gain: float | None = Field(
        None,
        ge=0,
        description="Minimum gain (exclusive) in the metric's unit, at the rule's confidence. "
        "null: the rule uses max_loss or max_harmed_share.",
    )
    max_loss: float | None = Field(
        None,
        ge=0,
        description="Maximum loss (inclusive) in the metric's unit, at the rule's confidence. "
        "null: the rule uses min_gain or max_harmed_share.",
    )
    max_harmed_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        exclude_if=lambda share: share is None,
        description="Maximum share of items that are worse by more than harm, at the rule's confidence (exact bound). "
        "null: the rule uses min_gain or max_loss.",
    )
    harm: float | None = Field(
        None,
        gt=0,
        exclude_if=lambda harm: harm is None,
        description="Loss above which an item counts as harmed, for max_harmed_share. "
        "null: the metric's default, such as 1 nat per token for held_out.loss.",
    )
    max_item_loss: float | None = Field(
        None,
        gt=0,
        exclude_if=lambda loss: loss is None,
        description="Largest loss of an unseen item that the bound of min_gain or max_loss allows for. "
        "A smaller value needs fewer items and protects less against rare large losses. "
        "null: the metric's default, such as 5 nats per token for held_out.loss.",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="One-sided confidence of the rule's bound.")
    slices: list[SliceKind] | None = Field(
        None,
        min_length=1,
        description="Apply the rule to every slice by source, category or length. null: apply it to all items. "
        "The rule fails if a slice is significantly worse by more than max_loss (Holm's correction over the slices).",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Rule:
        limits = {name: getattr(self, name) for name in LIMIT_KEYS if getattr(self, name) is not None}
        if len(limits) != 1:
            raise ValueError(
                f"limits set: {', '.join(limits) or 'none'}; expected exactly one of {', '.join(LIMIT_KEYS)}"
            )
        if self.harm is not None and self.max_harmed_share is None:
            raise ValueError(f"harm is {self.harm}; expected null in a rule without max_harmed_share")
        if self.max_item_loss is not None and (self.slices or self.max_harmed_share is not None):
            raise ValueError(
                f"max_item_loss is {self.max_item_loss}; expected null in a rule with slices or max_harmed_share"
            )
        if self.max_harmed_share is not None and isinstance(self.against, float):
            raise ValueError(f"max_harmed_share: against is {self.against}; expected base or incumbent")
        if self.slices and self.max_loss is None:
            raise ValueError(
                f"slices: {next(iter(limits))} is set; expected max_loss, because a slice is too small to prove a gain"
            )
        if self.slices and isinstance(self.against, float):
            raise ValueError(f"slices: against is {self.against}; expected base or incumbent")
        return self


def _default_rules(metric: str | None = None) -> list[Rule]:
    """Return rules that require a gain over base and incumbent, few harmed items, and no significant loss in any slice.

    A limit on harmed items is a default of the held-out loss only: two models of equal accuracy may answer more than
    10% of the items differently.
    """
    fields = {"metric": metric} if metric else {}
    bounds: list[dict[str, object]] = [{"min_gain": 0.0}, {"max_loss": 0.0, "slices": list(SLICE_KINDS)}]
    if not metric:
        bounds.insert(1, {"max_harmed_share": MAX_HARMED_SHARE})
    return [
        Rule.model_validate({"against": against, **bound, **fields})
        for bound in bounds
        for against in ("base", "incumbent")
    ]


class EvaluationConfig(BaseModel):
    """Evaluation metrics and promotion rules."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    tasks: list[TaskConfig] = Field(
        default_factory=lambda: list[TaskConfig]([HeldOut(kind="held_out")]),
        min_length=1,
        description="Evaluation tasks. docs/evaluation-tasks.md lists the kinds and their keys.",
    )
    engine: Literal["transformers", "vllm", "auto"] = Field(
        "transformers",
        description="Inference engine. transformers: any device; vllm: NVIDIA GPUs; "
        "auto: vllm if an NVIDIA GPU is available and vLLM is installed and supports the model, else transformers.",
    )
    max_items: int | None = Field(
        None, ge=2, description="Maximum number of test rows, in order of id. null: all rows."
    )
    min_items: int | None = Field(
        None,
        ge=2,
        description="Minimum number of items for a rule and for a slice. A rule with fewer items fails; a smaller slice "
        "is not judged. null: 10 for a slice and for min_gain; as many as the limit needs for max_harmed_share (29 for "
        "0.1) and max_loss (299 for 0.05 nats per token).",
    )
    max_length: int | None = Field(
        None,
        ge=8,
        description="Maximum row length in tokens. Longer rows are truncated. null: max_length of the candidate's training, or "
        "2,048 tokens for a model that tuneline did not train.",
    )
    batch_tokens: int = Field(
        2048,
        ge=8,
        description="Batch size in tokens, including padding. Larger batches are faster and need more memory.",
    )
    generations: int = Field(
        4, ge=0, description="Number of test rows that every model answers (greedily) for the side-by-side comparison."
    )
    generation_tokens: int = Field(
        48, ge=1, description="Maximum length in tokens of the answers for the side-by-side comparison."
    )
    bootstrap_samples: int = Field(
        10_000,
        ge=1000,
        description="Number of bootstrap resamples per interval. More resamples give more precise intervals.",
    )
    gate: list[Rule] = Field(
        default_factory=_default_rules,
        min_length=1,
        description="Rules that must all hold to accept the candidate. "
        "A rule against the incumbent holds if no incumbent exists. "
        "Without a held_out task, the default rules use the first metric of the first task.",
    )

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
        names = [task.name for task in self.tasks]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tasks: duplicate name {duplicates[0]}; expected a distinct name for each task")
        metrics = {
            f"{task.name}.{name}": metric for task in self.tasks for name, metric in build_task(task).metrics.items()
        }
        if "gate" not in self.model_fields_set and any(rule.metric not in metrics for rule in self.gate):
            self.gate = _default_rules(next(iter(metrics)))
            self.model_fields_set.discard("gate")
        for rule in self.gate:
            if rule.metric not in metrics:
                raise ValueError(f"gate: no task measures {rule.metric}; available: {', '.join(sorted(metrics))}")
            metric = metrics[rule.metric]
            if rule.max_harmed_share is not None and rule.harm is None and metric.get_harm() is None:
                raise ValueError(f"gate: harm of {rule.metric} is null; expected a loss per item, in the metric's unit")
        return self
