"""Configuration of the search for names: model, language, and actions on findings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Action = Literal["redact", "drop", "keep"]


class NamesConfig(BaseModel):
    """Search for names of people and places by presidio with a spaCy model. Disabled if no model is set."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(
        "",
        description="Local folder of a spaCy model. With the search for names, curation "
        "processes about 20 rows per CPU-second instead of thousands. Empty: no search for names.",
    )
    language: str = Field("en", min_length=2, description="Two-letter code of the model's language.")
    person: Action = Field(
        "keep",
        description="Action on names of people. keep: only count the names, because the model misses names "
        "and reports false ones.",
    )
    location: Action = Field("keep", description="Action on names of places. keep: only count the names.")

    @model_validator(mode="after")
    def _check_model(self) -> NamesConfig:
        if not self.model and (self.person, self.location) != ("keep", "keep"):
            raise ValueError(
                f"model is empty, but person is {self.person} and location is {self.location}; "
                "the actions redact and drop require a model folder"
            )
        return self
