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


class QualityScoreSettings(_Section):
    """Scores of the rows that all other steps keep. They are stored in `meta` under the key quality_scores."""

    classifier: ClassifierSettings = Field(
        default_factory=ClassifierSettings, description="Linear classifier, trained from examples of good and bad rows."
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any scorer is configured."""
        return self.classifier.is_enabled
