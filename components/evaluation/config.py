"""Configuration of the evaluation: what is measured, and the rules of the gate."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Rule(BaseModel):
    """One rule of the gate. A gain is an improvement in the metric's own direction: a lower loss, a higher score."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    metric: Literal["held_out.loss", "held_out.perplexity"] = Field("held_out.loss", description="What is compared: task.metric.")
    against: Literal["base", "incumbent"] | float = Field(
        "base", description="The base model, the model in service, or a number that the metric itself must reach."
    )
    min_gain: float | None = Field(None, ge=0, description="The gain must exceed this, the whole interval of it.")
    max_loss: float | None = Field(None, ge=0, description="The gain may fall short of zero by this much, the whole interval of it.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Confidence of the interval that must satisfy the rule.")

    @model_validator(mode="after")
    def _one_bound(self) -> Rule:
        if (self.min_gain is None) == (self.max_loss is None):
            raise ValueError("give either min_gain or max_loss")
        return self


class EvaluationConfig(BaseModel):
    """What is measured on the test split, and when a candidate is accepted."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_items: int | None = Field(None, ge=2, description="Test rows measured, the first ones by id. null: all of them.")
    max_length: int = Field(256, ge=8, description="Tokens a row; longer rows are cut alike for every model.")
    batch_tokens: int = Field(2048, ge=8, description="Tokens computed at once, padding included. More is faster and needs more memory.")
    generations: int = Field(4, ge=0, description="Test rows answered by every model (greedily), to be read side by side.")
    generation_tokens: int = Field(48, ge=1, description="Longest such answer, in tokens.")
    bootstrap_samples: int = Field(10_000, ge=1000, description="Resamples behind every interval. More narrows the interval's own error.")
    gate: list[Rule] = Field(
        [Rule(against="base", min_gain=0.0), Rule(against="incumbent", min_gain=0.0)],
        min_length=1,
        description="Rules that must all hold for the candidate to be accepted. A rule against the incumbent holds where there is none.",
    )
