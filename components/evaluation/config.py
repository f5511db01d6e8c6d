"""Configuration of the evaluation: what is measured, and the rules of the gate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.evaluation.tasks.config import HeldOut, TaskConfig
from components.evaluation.tasks.table import metrics_of

HELD_OUT = ("max_items", "generations", "generation_tokens")
SLICES = ("source", "category", "length")
Slice = Literal["source", "category", "length"]


class Rule(BaseModel):
    """One rule of the gate. A gain is an improvement in the metric's own direction: a lower loss, a higher score."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    metric: str = Field("held_out.loss", pattern=r"^[a-z][a-z0-9_]*\.[A-Za-z0-9_,@.-]+$", description="What is compared: task.metric.")
    against: Literal["base", "incumbent"] | float = Field(
        "base", description="The base model, the model in service, or a number that the metric itself must reach."
    )
    min_gain: float | None = Field(None, ge=0, description="The gain must exceed this, with the confidence.")
    max_loss: float | None = Field(None, ge=0, description="The gain may fall short of zero by this much, with the confidence.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="One-sided confidence that the true gain is what the rule asks for.")
    slices: list[Slice] | None = Field(
        None,
        min_length=1,
        description="Instead of all items together, every slice of them by source, category or length: none may be worse by more than "
        "max_loss, as far as its items can show (Holm's correction over the slices).",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> Rule:
        if (self.min_gain is None) == (self.max_loss is None):
            raise ValueError("give either min_gain or max_loss")
        if self.slices and self.max_loss is None:
            raise ValueError("a rule over slices takes max_loss: a gain in every slice is more than a sample can show")
        if self.slices and isinstance(self.against, float):
            raise ValueError("a rule over slices compares with base or incumbent")
        return self


def _tasks() -> list[TaskConfig]:
    return [HeldOut(kind="held_out")]


def _rules(metric: str = "") -> list[Rule]:
    """Better than both, and clearly worse in no slice."""
    named: dict[str, Any] = {"metric": metric} if metric else {}
    return [
        Rule(against="base", min_gain=0.0, **named),
        Rule(against="incumbent", min_gain=0.0, **named),
        Rule(against="base", max_loss=0.0, slices=list(SLICES), **named),
        Rule(against="incumbent", max_loss=0.0, slices=list(SLICES), **named),
    ]


class EvaluationConfig(BaseModel):
    """What is measured on the test split, and when a candidate is accepted."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    tasks: list[TaskConfig] = Field(
        default_factory=_tasks,
        min_length=1,
        description="What is measured. docs/evaluation-tasks.md has the kinds and their keys.",
    )
    engine: Literal["transformers", "vllm", "auto"] = Field(
        "transformers",
        description="What computes: transformers, on every device; vllm, on NVIDIA GPUs; auto: vllm where it is installed and can.",
    )
    max_items: int | None = Field(None, ge=2, description="Test rows measured, the first ones by id. null: all of them.")
    min_items: int = Field(10, ge=2, description="Fewest items from which a rule is decided; with fewer it refuses.")
    max_length: int = Field(256, ge=8, description="Tokens a row; longer rows are cut alike for every model.")
    batch_tokens: int = Field(2048, ge=8, description="Tokens computed at once, padding included. More is faster and needs more memory.")
    generations: int = Field(4, ge=0, description="Test rows answered by every model (greedily), to be read side by side.")
    generation_tokens: int = Field(48, ge=1, description="Longest such answer, in tokens.")
    bootstrap_samples: int = Field(10_000, ge=1000, description="Resamples behind every interval. More narrows the interval's own error.")
    gate: list[Rule] = Field(
        default_factory=_rules,
        min_length=1,
        description="Rules that must all hold for the candidate to be accepted. A rule against the incumbent holds where there is none. "
        "Without a task held_out, the default ones are about the first metric of the first task.",
    )

    @model_validator(mode="after")
    def _pass_on(self) -> EvaluationConfig:
        """A held-out task takes from here what it does not say itself."""
        for task in self.tasks:
            for name in HELD_OUT if isinstance(task, HeldOut) else ():
                if name not in task.model_fields_set:
                    setattr(task, name, getattr(self, name))
                    task.model_fields_set.discard(name)  # nobody said so, and what was not said follows other values
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> EvaluationConfig:
        names = [task.name for task in self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tasks: two are named {twice[0]}; give one of them another name")
        measured = {f"{task.name}.{metric}": None for task in self.tasks for metric in metrics_of(task)}  # in their order
        if "gate" not in self.model_fields_set and any(rule.metric not in measured for rule in self.gate):
            self.gate = _rules(next(iter(measured)))
            self.model_fields_set.discard("gate")
        for rule in self.gate:
            if rule.metric not in measured:
                raise ValueError(f"gate: {rule.metric} is measured by no task; there are {', '.join(sorted(measured))}")
        return self
