"""Base classes of the task settings, which are the entries of evaluation.tasks.

Each task module defines the settings of its `kind`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

SUITE_SCHEME = "suite:"  # before the name of a file in components/common/regression_suite
TASK_FILE_SUFFIXES = (".yaml", ".yml")  # suffixes that distinguish an lm-eval task file from a task name


class TaskSettings(BaseModel):
    """Settings of every task."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    FILE_FIELDS: ClassVar[tuple[str, ...]] = ("data",)  # fields with the path of a local file

    kind: str
    name: str = Field(
        "",
        pattern=r"^([a-z][a-z0-9_]*)?$",
        description="Prefix of the task's metrics: name.metric. Empty: the task's kind.",
    )
    max_items: int | None = Field(None, ge=2, description="Maximum number of items, in order of id. null: all items.")

    @model_validator(mode="after")
    def _set_default_name(self) -> TaskSettings:
        if not self.name:
            self.name = self.kind
            self.model_fields_set.discard("name")
        return self

    @classmethod
    def is_file_path(cls, field: str, value: object) -> bool:
        """Return whether this value of a field is the path of a file on this machine."""
        return field in cls.FILE_FIELDS and bool(value)

    def list_file_paths(self) -> dict[str, str]:
        """Return the paths of the local files that the task reads, by field."""
        return {field: str(value) for field, value in self if self.is_file_path(field, value)}

    def estimate_tokens(self, rows: int, mean_length: float) -> tuple[float, float]:
        """Estimate the tokens that a model reads and those that it generates at most.

        Args:
            rows: Number of rows of the dataset.
            mean_length: Mean row length in tokens.
        """
        answers = rows * getattr(self, "samples", 1)
        return answers * mean_length, answers * getattr(self, "max_new_tokens", 0)

    def list_referenced_files(self, field: str) -> list[Path]:
        """Return the files to which the file in `field` refers."""
        return []


class PromptSettings(TaskSettings):
    """Settings of tasks whose items are the prompts of a file or of the dataset's test split."""

    data: str = Field("", description="File of rows with prompt or messages. Empty: the dataset's test split.")
    prompt_field: str = Field(
        "prompt", min_length=1, description="Field that contains the prompt of a row without messages."
    )


class AnswerSettings(PromptSettings):
    """Settings of tasks that check the answer to each prompt."""

    chat: bool = Field(
        True, description="Apply the model's chat template. false: send the raw prompt for text completion."
    )
    max_new_tokens: int = Field(128, ge=1, description="Maximum answer length in tokens.")


class FewShotSettings(TaskSettings):
    """Settings of tasks with few-shot examples before every prompt."""

    FILE_FIELDS: ClassVar[tuple[str, ...]] = ("data", "examples")

    examples: str = Field("", description="File of few-shot examples, in the format of data. Empty: no examples.")
    shots: int = Field(0, ge=0, description="Number of few-shot examples, from the start of the file.")

    @model_validator(mode="after")
    def _check_examples(self) -> FewShotSettings:
        if bool(self.shots) != bool(self.examples):
            raise ValueError(
                f"shots is {self.shots}, and examples is {self.examples or 'empty'}; expected both or neither to be set"
            )
        return self


def check_distinct(metrics: list[str]) -> None:
    """Raise ValueError if a metric is listed twice."""
    if len(set(metrics)) < len(metrics):
        raise ValueError(
            f"metrics contains {max(metrics, key=metrics.count)} more than once; expected distinct metrics"
        )
