"""What the data curation stage can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from components.common.personal_data.config import Action, NamesConfig

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


# What fastText's language model lid.176 (Joulin et al. 2016, arXiv 1612.03651) can tell apart: ISO 639-1, or 639-3 where there is none.
CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de diq dsb dty "
    "dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka "
    "kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne "
    "new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg "
    "th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh "
)
LANGUAGES = frozenset(CODES.split())


class LanguageConfig(BaseModel):
    """Which languages the rows may have. The language is always counted in the report."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    keep: list[str] = Field(
        [], description="Languages to keep, as ISO 639 codes (en, de, zh); rows in another are dropped. Empty keeps every language."
    )
    min_confidence: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Confidence (0 to 1) from which a language counts as identified; below it a row is undetermined, not foreign.",
    )
    drop_undetermined: bool = Field(
        False, description="With languages to keep: true also drops rows whose language is undetermined (short, code, mixed)."
    )

    @field_validator("keep")
    @classmethod
    def _known(cls, keep: list[str]) -> list[str]:
        if unknown := [code for code in keep if code not in LANGUAGES]:
            raise ValueError(
                f"{', '.join(map(repr, unknown))}: not among the {len(LANGUAGES)} codes that can be identified, such as en, de, zh"
            )
        return keep


class QualityConfig(BaseModel):
    """The published heuristics for web text; docs/filters.md cites each threshold. A measure equal to a bound is kept, save FineWeb's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    apply_to: Literal["none", "web", "text", "all"] = Field(
        "web",
        description="Rows that are judged: web pages (HTML, WARC, WET), all rows of kind text, or all (conversations as one text); none.",
    )
    gopher: bool = Field(True, description="Gopher's quality rules (Rae et al. 2021, A.1.1): false leaves them out.")
    gopher_repetition: bool = Field(True, description="Gopher's repetition rules (Rae et al. 2021, table A1): false leaves them out.")
    c4: bool = Field(True, description="C4's rules (Raffel et al. 2020, section 2.2): false leaves them out.")
    fineweb: bool = Field(True, description="FineWeb's three line rules (Penedo et al. 2024): false leaves them out.")
    min_words: int = Field(50, ge=0, description="Gopher: words below which a text is dropped.")
    max_words: int = Field(100_000, ge=1, description="Gopher: words above which a text is dropped.")
    min_mean_word_length: float = Field(3, ge=0, description="Gopher: mean characters of a word below which a text is dropped.")
    max_mean_word_length: float = Field(10, gt=0, description="Gopher: mean characters of a word above which a text is dropped.")
    max_symbols_per_word: float = Field(
        0.1, ge=0, description="Gopher: hash signs, or ellipses, for each word above which a text is dropped."
    )
    max_bullet_lines: float = Field(
        0.9, ge=0, le=1, description="Gopher: share of lines that begin with a bullet above which a text is dropped."
    )
    max_ellipsis_lines: float = Field(
        0.3, ge=0, le=1, description="Gopher: share of lines that end with an ellipsis above which a text is dropped."
    )
    min_alphabetic_words: float = Field(0.8, ge=0, le=1, description="Gopher: share of words with a letter below which a text is dropped.")
    min_stop_words: int = Field(
        2, ge=0, le=8, description="Gopher: how many of the, be, to, of, and, that, have, with an English text must have."
    )
    max_duplicate_lines: float = Field(
        0.3, ge=0, le=1, description="Gopher: share of lines, or paragraphs, that repeat an earlier one above which a text is dropped."
    )
    max_duplicate_line_characters: float = Field(
        0.2, ge=0, le=1, description="Gopher: share of characters in repeated lines, or paragraphs, above which a text is dropped."
    )
    max_top_ngram_characters: list[float] = Field(
        [0.2, 0.18, 0.16],
        min_length=3,
        max_length=3,
        description="Gopher: shares of characters in the most common 2-, 3- and 4-gram of words above which a text is dropped.",
    )
    max_duplicate_ngram_characters: list[float] = Field(
        [0.15, 0.14, 0.13, 0.12, 0.11, 0.1],
        min_length=6,
        max_length=6,
        description="Gopher: shares of characters in repeated 5- to 10-grams of words above which a text is dropped.",
    )
    min_line_words: int = Field(5, ge=0, description="C4: words of a line below which its sentences are not counted.")
    min_sentences: int = Field(3, ge=0, description="C4: sentences, in the lines that C4 keeps, below which a text is dropped.")
    terminal_punctuation: bool = Field(
        False, description="C4: true counts sentences only in lines that end with punctuation. Strict: FineWeb left this one out."
    )
    curly_bracket: bool = Field(
        False, description="C4: true drops a text with a curly bracket. Strict: it drops every page that shows code or a formula."
    )
    min_punctuated_lines: float = Field(
        0.12, ge=0, le=1, description="FineWeb: share of lines that end with punctuation; a text with this share or less is dropped."
    )
    max_repeated_line_characters: float = Field(
        0.1, ge=0, le=1, description="FineWeb: share of characters in repeated lines; a text with this share or more is dropped."
    )
    max_short_lines: float = Field(
        0.67,
        ge=0,
        le=1,
        description="FineWeb: share of lines shorter than short_line_characters; a text with this share or more is dropped.",
    )
    short_line_characters: int = Field(30, ge=1, description="FineWeb: characters below which a line is short.")


class InstructionConfig(BaseModel):
    """Filters for conversations: what no model should learn to answer."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    broken_roles: bool = Field(
        True,
        description="Drop conversations out of order: an answer before any question, two questions in a row, a system turn that is not "
        "first, an end that is not the assistant's.",
    )
    placeholders: bool = Field(True, description="Drop answers that say nothing: nooutput, nan, only dots. They count as empty_answer.")
    echoes: bool = Field(True, description="Drop answers of 20 characters and more that only repeat the question.")
    refusals: bool = Field(
        True,
        description="Drop supervised rows whose answers are mostly boilerplate refusals ('As an AI language model, I cannot …'). "
        "Preference and labelled rows are kept, as a rejected answer may be one; so are rows with tools.",
    )
    max_refusal_characters: int = Field(
        400, ge=1, description="Characters above which an answer that begins like a refusal is taken to say something after all."
    )
    cut_answers: bool = Field(
        False, description="Drop rows whose last answer breaks off within a sentence, a bracket or a code block: a limit of tokens cut it."
    )
    min_cut_characters: int = Field(200, ge=1, description="Characters below which an answer is never taken to be cut.")


class PersonalDataConfig(BaseModel):
    """What is done with personal data and secrets: redact puts a placeholder such as <EMAIL>, drop rejects the row, keep only counts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    email: Action = Field("redact", description="E-mail addresses, as <EMAIL>.")
    phone: Action = Field("redact", description="Phone numbers, international and national, as <PHONE>.")
    credit_card: Action = Field("redact", description="Numbers of payment cards whose check digit is right, as <CREDIT_CARD>.")
    iban: Action = Field("redact", description="Bank accounts whose check digits are right, as <IBAN>.")
    us_ssn: Action = Field("redact", description="US social security numbers, as <US_SSN>.")
    ip_address: Action = Field(
        "redact",
        description="IPv4 and IPv6 addresses routed on the internet, as <IP_ADDRESS>. Private and local ones are no personal data.",
    )
    url_credentials: Action = Field("redact", description="User and password in a URL, as <URL_CREDENTIALS>; the URL stays.")
    api_key: Action = Field("redact", description="Keys and tokens of services, and secrets assigned to a name, as <API_KEY>.")
    private_key: Action = Field("redact", description="Private keys in PEM form, also cut ones, as <PRIVATE_KEY>.")
    jwt: Action = Field("redact", description="JSON Web Tokens, as <JWT>.")
    names: NamesConfig = Field(default_factory=NamesConfig, description="Names of people and places.")


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
    language: LanguageConfig = Field(default_factory=LanguageConfig, description="Which languages the rows may have.")
    quality: QualityConfig = Field(default_factory=QualityConfig, description="The published heuristics for web text.")
    instructions: InstructionConfig = Field(default_factory=InstructionConfig, description="Filters for conversations.")
    group_by: str = Field(
        "",
        description="Name of a field of the records, such as customer: rows with one value go into one split. "
        "source groups by source; empty: no groups.",
    )
    published: Literal["place", "drop", "ignore"] = Field(
        "place",
        description="Rows of earlier revisions: place keeps each in its split, and what is like it with it; drop also leaves out rows that "
        "repeat one of them; ignore does not look at them.",
    )
    engine: Literal["native", "ray"] = Field("native", description="Where rows are prepared and compared: here, or on a Ray cluster.")
    ray_address: str = Field("", description="Address of the Ray cluster, such as 10.0.0.5:6379. Empty: RAY_ADDRESS, else this machine's.")
    workers: int = Field(0, ge=0, description="Processes that prepare rows here. 0: TUNELINE_THREADS, or the cores that are free to use.")
    fractions: Fractions = Field(default_factory=Fractions, description="How the kept rows are divided; the three add up to 1.")
    personal_data: PersonalDataConfig = Field(
        default_factory=PersonalDataConfig,
        description="Personal data and secrets by kind: redact to a placeholder, drop the row, or keep (and count).",
    )
