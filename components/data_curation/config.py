"""What the data curation stage can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Format = Literal["auto", "alpaca", "dolly", "hh", "kto", "openai", "preference", "prompt_completion", "scored_pair", "sharegpt", "text"]


class Fractions(BaseModel):
    """How the kept rows are divided. A row's place follows from its content and the seed, so the parts are met within chance."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    train: float = Field(0.92, gt=0, lt=1, description="Share of the rows that the model learns from.")
    validation: float = Field(0.03, ge=0, lt=1, description="Share watched during training, for the curves.")
    test: float = Field(0.05, gt=0, lt=1, description="Share that only the evaluation sees. 200 rows and more give useful intervals.")

    @model_validator(mode="after")
    def _add_up(self) -> Fractions:
        if abs(self.train + self.validation + self.test - 1) > 1e-6:
            raise ValueError(f"train, validation and test add up to {self.train + self.validation + self.test:g}, not to 1")
        return self


class DecontaminationConfig(BaseModel):
    """Rows that hold text of an evaluation set go: a model tuned on them would be measured on what it has seen."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    sets: list[str] = Field(
        [], description="Files, globs and folders of evaluation items, relative to the configuration file. None: nothing is looked for."
    )
    ngram: int = Field(
        13, ge=5, description="Words in a row that a row must share with an item to go. Fewer find more, and more by chance."
    )
    shortest: int = Field(
        8, ge=4, description="Words from which an item with fewer than `ngram` is looked for as a whole; below, it is not looked for."
    )
    min_overlap: float = Field(
        0.0, ge=0, le=1, description="Share of an item's n-grams that a row must hold to go. 0: any single one is enough."
    )
    ignore_common: int = Field(
        0, ge=0, description="N-grams found in more than this many items are the sets' own phrasing and not looked for. 0 looks for all."
    )

    @model_validator(mode="after")
    def _short_is_shorter(self) -> DecontaminationConfig:
        if self.shortest > self.ngram:
            raise ValueError(f"shortest {self.shortest} is more than ngram {self.ngram}")
        return self


class TokensConfig(BaseModel):
    """Token counts for the report. Nothing of the dataset depends on them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    base_model: str = Field(
        "",
        description="Model whose tokenizer counts; fine_tuning.base_model where nothing is said. Left out where it is not on this machine.",
    )
    max_length: int = Field(
        256, ge=8, description="Training length in tokens that the report measures against; follows fine_tuning.max_length."
    )
    sample: int = Field(20_000, ge=100, description="Rows counted at most, chosen by the hash of their id; totals are scaled from them.")


class DataCurationConfig(BaseModel):
    """Raw text in, clean train, validation and test rows out."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    sources: list[str] = Field(
        ["demo:python-docs"],
        min_length=1,
        description="Files, globs and folders to read, relative to the configuration file. demo:python-docs builds the demo dataset.",
    )
    format: Format = Field(
        "auto", description="auto recognises each record by its keys; a name reads every record that way or quarantines it."
    )
    text_unit: Literal["line", "paragraph", "file"] = Field(
        "line", description="What is one row of a plain text file: a line, a block between blank lines, or the whole file."
    )
    max_line_bytes: int = Field(
        10_000_000, ge=1_000, description="Bytes of a line (or a JSON array's element) above which it is quarantined."
    )
    min_prompt_characters: int = Field(1, ge=1, description="Characters below which what the user says is too short.")
    min_answer_characters: int = Field(1, ge=1, description="Characters below which an answer, or a text, is too short.")
    max_row_characters: int = Field(200_000, ge=1, description="Characters of all messages together above which a row is too long.")
    near_duplicate_threshold: float = Field(
        0.7,
        ge=0.5,
        le=1,
        description="Jaccard similarity of two rows' word 5-grams from which the later one is dropped. Lower drops more.",
    )
    answer_min_words: int = Field(
        8,
        ge=1,
        description="Words from which equal or similar answers keep their rows in one split. Lower is stricter.",
    )
    decontamination: DecontaminationConfig = Field(default_factory=DecontaminationConfig, description="Evaluation sets kept out.")
    tokens: TokensConfig = Field(default_factory=TokensConfig, description="Token counts for the report.")
    fractions: Fractions = Field(default_factory=Fractions, description="How the kept rows are divided; the three add up to 1.")
