"""Settings of the quality scores. Each scorer is off by default."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.common.runtime import chat_endpoint

DEFAULT_CRITERIA = (
    "Correctness: the statements are true and the answer fits the question. Completeness: the question is answered in "
    "full. Clarity: the text is well written and easy to follow. Usefulness: a language model learns something from it. "
    "Low scores are for spam, boilerplate, garbled or truncated text, and wrong or empty answers."
)
Probability = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ClassifierSettings(_Section):
    """A linear classifier, trained from examples. The score is the probability of a good row, from 0 to 1."""

    good: list[str] = Field(
        [],
        description="Files, globs and folders of at least 20 good rows, relative to the configuration file, in the formats "
        "of the sources. If `good` and `bad` are empty, no classifier is used.",
    )
    bad: list[str] = Field([], description="Files, globs and folders of bad rows, in the same form as `good`.")
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
    """Perplexity of the row's text under a language model. The score is 1 or more; lower scores mean more fluent text."""

    enabled: bool = Field(False, description="Score rows by perplexity. Requires the extra `models` (PyTorch).")
    model: str = Field("", description="Model that scores the rows. Default: fine_tuning.base_model.")
    max_score: float | None = Field(
        None,
        ge=1,
        description="Maximum perplexity of a kept row. null: no row is dropped. Reject reason: `low_quality_score`.",
    )
    max_tokens: int = Field(
        512, ge=2, description="Maximum number of scored tokens per row, from the start of the row."
    )
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


class JudgeSettings(_Section):
    """A language model at an OpenAI-compatible endpoint that rates rows from 1 to 10. The text leaves this machine."""

    url: str = Field(
        "",
        description="URL of the endpoint without /chat/completions, such as https://judge.example/v1. Empty: no judge.",
    )
    model: str = Field("", description="Name of the model at the endpoint.")
    credentials: str = Field(
        "",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$",
        description="Name of the environment variable with the API key. Empty: no key.",
    )
    criteria: str = Field(
        DEFAULT_CRITERIA, min_length=1, max_length=20_000, description="Criteria for the score, as text for the judge."
    )
    min_score: int | None = Field(
        None,
        ge=1,
        le=10,
        description="Minimum score of a kept row. null: no row is dropped. Reject reason: `low_quality_score`.",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Maximum number of rows to judge, chosen by the hash of their content. Other rows are kept without "
        "a score. null: all rows.",
    )
    concurrency: int = Field(4, ge=1, le=64, description="Maximum number of concurrent requests.")
    timeout_seconds: float = Field(60, gt=0, description="Timeout of a request in seconds.")
    retries: int = Field(3, ge=0, le=10, description="Maximum number of retries per row.")

    @property
    def is_enabled(self) -> bool:
        """Whether rows are scored by the judge."""
        return bool(self.url)

    @model_validator(mode="after")
    def _check_endpoint(self) -> JudgeSettings:
        if not self.url:
            if self.model or self.min_score is not None:
                raise ValueError("url is empty; expected the URL of an OpenAI-compatible endpoint")
            return self
        if not self.model:
            raise ValueError("model is empty; expected the name of the model at the endpoint")
        chat_endpoint.check_url(self.url, "url", "credentials", self.credentials)
        return self


class QualityScoreSettings(_Section):
    """Scores of the rows that all other steps keep. They are stored in `meta` under the key quality_scores."""

    classifier: ClassifierSettings = Field(
        default_factory=ClassifierSettings, description="Linear classifier, trained from examples of good and bad rows."
    )

    perplexity: PerplexitySettings = Field(
        default_factory=PerplexitySettings, description="Perplexity under a language model."
    )
    judge: JudgeSettings = Field(default_factory=JudgeSettings, description="Language model that rates rows.")

    @property
    def is_enabled(self) -> bool:
        """Whether any scorer is configured."""
        return self.classifier.is_enabled or self.perplexity.is_enabled or self.judge.is_enabled
