"""Configuration of the evaluation: the tasks, the engine, and the rules of the promotion gate."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.evaluation.tasks.held_out import HeldOut
from components.evaluation.tasks.task_registry import TaskConfig, build_task

HELD_OUT_KEYS = ("max_items", "generations", "generation_tokens")
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
        "null: the rule uses max_loss.",
    )
    max_loss: float | None = Field(
        None,
        ge=0,
        description="Maximum loss (inclusive) in the metric's unit, at the rule's confidence. "
        "null: the rule uses min_gain.",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="One-sided confidence of the bound on the gain.")
    slices: list[SliceKind] | None = Field(
        None,
        min_length=1,
        description="Apply the rule to every slice by source, category or length. null: apply it to all items. "
        "The rule fails if a slice is significantly worse by more than max_loss (Holm's correction over the slices).",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Rule:
        if (self.min_gain is None) == (self.max_loss is None):
            found = "null" if self.min_gain is None else "set"
            raise ValueError(f"min_gain and max_loss are both {found}; expected exactly one of min_gain and max_loss")
        if self.slices and self.max_loss is None:
            raise ValueError(
                f"slices: min_gain is {self.min_gain}; expected max_loss, because a slice is too small to prove a gain"
            )
        if self.slices and isinstance(self.against, float):
            raise ValueError(f"slices: against is {self.against}; expected base or incumbent")
        return self


def _default_rules(metric: str | None = None) -> list[Rule]:
    """Return rules that require a gain over base and incumbent on all items, and no significant loss in any slice."""
    fields = {"metric": metric} if metric else {}
    bounds = ({"min_gain": 0.0}, {"max_loss": 0.0, "slices": list(SLICE_KINDS)})
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
    min_items: int = Field(10, ge=2, description="Minimum number of items for a rule. A rule with fewer items fails.")
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
        metrics = [f"{task.name}.{metric}" for task in self.tasks for metric in build_task(task).metrics]
        if "gate" not in self.model_fields_set and any(rule.metric not in metrics for rule in self.gate):
            self.gate = _default_rules(metrics[0])
            self.model_fields_set.discard("gate")
        for rule in self.gate:
            if rule.metric not in metrics:
                raise ValueError(f"gate: no task measures {rule.metric}; available: {', '.join(sorted(metrics))}")
        return self
