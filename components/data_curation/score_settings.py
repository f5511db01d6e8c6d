"""Settings of the quality scores. Each scorer is off by default."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ClassifierSettings(_Section):
    """A linear classifier, trained from examples. The score is the probability of a good row, from 0 to 1."""

    good: list[str] = Field(
        [],
        description="Files, globs and folders of good rows, relative to the configuration file, in the formats of the "
        "sources. At least 20 rows. Empty, as is `bad`: no classifier.",
    )
    bad: list[str] = Field([], description="Files, globs and folders of bad rows, as `good`.")
    min_score: Probability | None = Field(
        None, description="Minimum score of a kept row. null: no row is dropped. Reject reason: `low_quality_score`."
    )

    @property
    def is_enabled(self) -> bool:
        """Whether rows are scored by the classifier."""
        return bool(self.good or self.bad)

    @model_validator(mode="after")
    def _check_classes(self) -> ClassifierSettings:
        if bool(self.good) != bool(self.bad):
            missing = "bad" if self.good else "good"
            raise ValueError(f"{missing} is empty; expected files with examples of good rows and of bad rows")
        if self.min_score is not None and not self.is_enabled:
            raise ValueError("min_score is set, but good and bad are empty; expected files with examples")
        return self


class PerplexitySettings(_Section):
    """Perplexity of the row's text under a language model. The score is 1 or more; lower is more fluent."""

    enabled: bool = Field(False, description="Score rows by perplexity. Requires the extra `models` (PyTorch).")
    model: str = Field("", description="Model that scores the rows. Default: fine_tuning.base_model.")
    max_score: float | None = Field(
        None,
        ge=1,
        description="Maximum perplexity of a kept row. null: no row is dropped. Reject reason: `low_quality_score`.",
    )
    max_tokens: int = Field(512, ge=2, description="Maximum number of tokens of a row that are scored, from its start.")
    batch_tokens: int = Field(
        2048,
        ge=1,
        description="Maximum number of tokens per forward pass, with padding. Lower values need less memory.",
    )

    @property
    def is_enabled(self) -> bool:
        """Whether rows are scored by perplexity."""
        return self.enabled

    @model_validator(mode="after")
    def _check_enabled(self) -> PerplexitySettings:
        if self.max_score is not None and not self.enabled:
            raise ValueError("max_score is set, but enabled is false; expected enabled: true")
        return self


class QualityScoreSettings(_Section):
    """Scores of the rows that all other steps keep. They are stored in `meta` under the key quality_scores."""

    classifier: ClassifierSettings = Field(
        default_factory=ClassifierSettings, description="Linear classifier, trained from examples of good and bad rows."
    )

    perplexity: PerplexitySettings = Field(
        default_factory=PerplexitySettings, description="Perplexity under a language model."
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any scorer is configured."""
        return self.classifier.is_enabled or self.perplexity.is_enabled
