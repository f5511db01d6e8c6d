"""What is looked for beyond patterns, and what can be done with what was found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Action = Literal["redact", "drop", "keep"]


class NamesConfig(BaseModel):
    """Names of people and places, by presidio with a spaCy model. Off as long as no model is named."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(
        "",
        description="Folder of a spaCy model on this machine (nothing is downloaded), an absolute path. Finds names at some 20 rows a"
        " CPU-second instead of thousands. Empty looks for no names.",
    )
    language: str = Field("en", min_length=2, description="The model's language, as its two-letter code.")
    person: Action = Field(
        "keep",
        description="What is done with names of people. keep only counts them: most are of public figures, and models err.",
    )
    location: Action = Field("keep", description="What is done with names of places. keep only counts them.")

    @model_validator(mode="after")
    def _has_model(self) -> NamesConfig:
        if not self.model and (self.person, self.location) != ("keep", "keep"):
            raise ValueError("person and location need a model to find them: name its folder in model")
        return self
