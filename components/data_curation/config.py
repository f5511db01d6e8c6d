"""The configuration of the data curation stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from components.common.personal_data.names_config import Action, NamesConfig
from components.data_curation.reading.record_formats import FORMATS
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.score_settings import QualityScoreSettings

if TYPE_CHECKING:
    Format = str
else:  # the registry decides the allowed values
    Format = Literal[("auto", *sorted(FORMATS))]


# A fraction from 0 to 1.
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Fractions(_Section):
    """Shares of the splits. A row's split depends on its content and the seed, so the actual shares vary by chance."""

    train: float = Field(0.92, gt=0, lt=1, description="Share of rows for training.")
    validation: float = Field(0.03, ge=0, lt=1, description="Share of rows for the validation loss during training.")
    test: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of rows for evaluation. At least 200 rows give useful confidence intervals.",
    )

    @model_validator(mode="after")
    def _check_sum(self) -> Fractions:
        if abs(self.train + self.validation + self.test - 1) > 1e-6:
            total = self.train + self.validation + self.test
            raise ValueError(f"the sum of train, validation and test is {total:.9g}; expected 1")
        return self


class DecontaminationConfig(_Section):
    """Rejection of rows that share text with an evaluation set; a model trained on them would score too high."""

    sets: list[str] = Field(
        [],
        description="Files, globs and folders of evaluation items, relative to the configuration file. "
        "Empty: no decontamination.",
    )
    ngram: int = Field(
        13,
        ge=5,
        description="Length in words of the n-grams that are compared. A row that shares n-grams with an item is rejected. "
        "Lower values reject more rows, including chance matches.",
    )
    shortest: int = Field(
        8,
        ge=4,
        description="Minimum length in words of an item text. Shorter texts are skipped, except for questions. Texts "
        "with fewer than `ngram` words match only as a whole.",
    )
    shortest_question: int = Field(
        4,
        ge=2,
        description="Minimum length in words of a question. Questions with fewer than `shortest` words match only a whole "
        "sentence, line or labelled part of a row.",
    )
    min_overlap: Share = Field(
        0.0,
        description="Minimum share of the n-grams of one item text, such as its question, that a row must contain to be "
        "rejected. 0: one n-gram is enough.",
    )
    ignore_common: int = Field(
        0,
        ge=0,
        description="Maximum number of items that contain an n-gram, or a question with fewer than `shortest` words. "
        "Phrases of more items are ignored as common. 0: ignore only questions with fewer than `ngram` words that occur "
        "in 3 or more items of a set.",
    )

    @model_validator(mode="after")
    def _check_shortest(self) -> DecontaminationConfig:
        if self.shortest > self.ngram:
            raise ValueError(f"shortest is {self.shortest}; expected at most ngram ({self.ngram})")
        return self


class TokensConfig(_Section):
    """Token counts for the report. They do not affect the rows of the dataset."""

    base_model: str = Field(
        "",
        description="Model whose tokenizer counts the tokens. Default: fine_tuning.base_model. Tokens are not counted if "
        "the tokenizer is not on this machine.",
    )
    max_length: int | None = Field(
        None,
        ge=8,
        description="Maximum row length in tokens, from which the report computes truncation and packing. "
        "null: fine_tuning.max_length, or else the 95th percentile of the row lengths.",
    )
    sample: int = Field(
        5_000,
        ge=100,
        description="Maximum number of rows to tokenize, chosen by the hash of their ids. Totals are extrapolated.",
    )


# Languages of fastText's model lid.176 (Joulin et al. 2016, arXiv 1612.03651): ISO 639-1 codes; 639-3 codes for
# languages without a 639-1 code.
LANGUAGE_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de diq dsb dty "
    "dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka "
    "kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne "
    "new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg "
    "th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh "
)
LANGUAGES = frozenset(LANGUAGE_CODES.split())


class LanguageConfig(_Section):
    """Languages to keep. The report counts the languages of the kept rows, in a sample of large datasets."""

    keep: list[str] = Field(
        [],
        description="Languages to keep, as ISO 639 codes (en, de, zh). Rows in other languages are dropped. "
        "Empty: all languages.",
    )
    min_confidence: Share = Field(
        0.5,
        description="Minimum confidence (0 to 1) of an identified language. At a lower confidence, the language is "
        "undetermined.",
    )
    drop_undetermined: bool = Field(
        False,
        description="Also drop rows whose language is undetermined (short text, code, mixed languages). "
        "Applies only if `keep` is set.",
    )

    @field_validator("keep")
    @classmethod
    def _check_codes(cls, keep: list[str]) -> list[str]:
        if unknown := [code for code in keep if code not in LANGUAGES]:
            raise ValueError(
                f"unknown language codes {', '.join(map(repr, unknown))}; expected ISO 639 codes such as en, de, zh"
            )
        return keep


class QualityConfig(_Section):
    """Published heuristics for web text; docs/reference/filters.md cites each threshold.

    A text with a value equal to a limit is kept, except for the limits of FineWeb.
    """

    apply_to: Literal["none", "web", "text", "all"] = Field(
        "web",
        description="Rows to filter. web: web pages (HTML, WARC, WET); text: all rows of kind text; all: also "
        "conversations, as one text; none: no rows.",
    )
    gopher: bool = Field(True, description="Apply Gopher's quality rules (Rae et al. 2021, A.1.1).")
    gopher_repetition: bool = Field(True, description="Apply Gopher's repetition rules (Rae et al. 2021, table A1).")
    c4: bool = Field(True, description="Apply C4's rules (Raffel et al. 2020, section 2.2).")
    fineweb: bool = Field(True, description="Apply FineWeb's three rules for lines (Penedo et al. 2024).")
    min_words: int = Field(50, ge=0, description="Gopher: minimum number of words in a text.")
    max_words: int = Field(100_000, ge=1, description="Gopher: maximum number of words in a text.")
    min_mean_word_length: float = Field(3, ge=0, description="Gopher: minimum mean word length in characters.")
    max_mean_word_length: float = Field(10, gt=0, description="Gopher: maximum mean word length in characters.")
    max_symbols_per_word: float = Field(
        0.1, ge=0, description="Gopher: maximum number of hash signs, or of ellipses, per word."
    )
    max_bullet_lines: Share = Field(0.9, description="Gopher: maximum share of lines that begin with a bullet.")
    max_ellipsis_lines: Share = Field(0.3, description="Gopher: maximum share of lines that end with an ellipsis.")
    min_alphabetic_words: Share = Field(0.8, description="Gopher: minimum share of words with a letter.")
    min_stop_words: int = Field(
        2,
        ge=0,
        le=8,
        description="Gopher: minimum number of different stop words (the, be, to, of, and, that, have, with) in an "
        "English text.",
    )
    max_duplicate_lines: Share = Field(
        0.3,
        description="Gopher: maximum share of repeated lines, or of repeated paragraphs.",
    )
    max_duplicate_line_characters: Share = Field(
        0.2,
        description="Gopher: maximum share of characters in repeated lines, or in repeated paragraphs.",
    )
    max_top_ngram_characters: list[float] = Field(
        [0.2, 0.18, 0.16],
        min_length=3,
        max_length=3,
        description="Gopher: maximum shares of characters in the most common 2-, 3- and 4-gram of words.",
    )
    max_duplicate_ngram_characters: list[float] = Field(
        [0.15, 0.14, 0.13, 0.12, 0.11, 0.1],
        min_length=6,
        max_length=6,
        description="Gopher: maximum shares of characters in repeated 5- to 10-grams of words.",
    )
    min_line_words: int = Field(
        5, ge=0, description="C4: minimum number of words in a line. Sentences in shorter lines are not counted."
    )
    min_sentences: int = Field(3, ge=0, description="C4: minimum number of sentences in the lines that C4 keeps.")
    terminal_punctuation: bool = Field(
        False,
        description="C4: count sentences only in lines that end with punctuation. Strict: FineWeb omits this rule.",
    )
    curly_bracket: bool = Field(
        False,
        description="C4: drop texts with a curly bracket. Strict: this also drops pages with such brackets in code or formulas.",
    )
    min_punctuated_lines: Share = Field(
        0.12,
        description="FineWeb: share of lines that end with punctuation, at or below which a text is dropped.",
    )
    max_repeated_line_characters: Share = Field(
        0.1,
        description="FineWeb: share of characters in repeated lines, at or above which a text is dropped.",
    )
    max_short_lines: Share = Field(
        0.67,
        description="FineWeb: share of lines shorter than short_line_characters, at or above which a text is dropped.",
    )
    short_line_characters: int = Field(
        30, ge=1, description="FineWeb: length in characters below which a line is short."
    )


class InstructionConfig(_Section):
    """Filters for conversations with answers that a model should not learn."""

    broken_roles: bool = Field(
        True,
        description="Drop conversations with turns out of order: an answer before any question, two questions in a "
        "row, a system turn after the first, or a last turn that is not the assistant's.",
    )
    placeholders: bool = Field(
        True,
        description="Drop rows with placeholder answers (nooutput, nan, only dots). Reject reason: `empty_answer`.",
    )
    echoes: bool = Field(
        True, description="Drop rows with an answer of at least 20 characters that only repeats the question."
    )
    refusals: bool = Field(
        True,
        description="Drop supervised rows whose answers are mostly boilerplate refusals ('As an AI language model, I "
        "cannot …'). Preference rows, labelled rows and rows with tools are kept.",
    )
    max_refusal_characters: int = Field(
        400,
        ge=1,
        description="Maximum length in characters of a boilerplate refusal. Longer answers do not count as refusals.",
    )
    cut_answers: bool = Field(
        False,
        description="Drop rows whose last answer breaks off within a sentence, a bracket or a code block, for example at "
        "a token limit.",
    )
    min_cut_characters: int = Field(
        200, ge=1, description="Minimum length in characters of an answer that is checked for truncation."
    )


class PersonalDataConfig(_Section):
    """Actions on personal data and secrets: redact (insert a placeholder), drop (reject the row) or keep (count)."""

    email: Action = Field("redact", description="Action on e-mail addresses. Placeholder: <EMAIL>.")
    phone: Action = Field(
        "redact", description="Action on international and national phone numbers. Placeholder: <PHONE>."
    )
    credit_card: Action = Field(
        "redact", description="Action on payment card numbers with a valid check digit. Placeholder: <CREDIT_CARD>."
    )
    iban: Action = Field(
        "redact", description="Action on bank account numbers (IBAN) with valid check digits. Placeholder: <IBAN>."
    )
    us_ssn: Action = Field("redact", description="Action on US social security numbers. Placeholder: <US_SSN>.")
    ip_address: Action = Field(
        "redact",
        description="Action on public IPv4 and IPv6 addresses. Private and local addresses are not personal data. "
        "Placeholder: <IP_ADDRESS>.",
    )
    url_credentials: Action = Field(
        "redact",
        description="Action on a user name and password in a URL. The rest of the URL is kept. Placeholder: "
        "<URL_CREDENTIALS>.",
    )
    api_key: Action = Field(
        "redact", description="Action on API keys, tokens, and secrets assigned to a variable. Placeholder: <API_KEY>."
    )
    private_key: Action = Field(
        "redact", description="Action on PEM private keys, including truncated keys. Placeholder: <PRIVATE_KEY>."
    )
    jwt: Action = Field("redact", description="Action on JSON Web Tokens. Placeholder: <JWT>.")
    names: NamesConfig = Field(default_factory=NamesConfig, description="Actions on names of people and places.")


class SemanticDuplicatesConfig(_Section):
    """Rejection of rows that say the same as an earlier row in other words. Off by default."""

    threshold: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Minimum cosine similarity of both the prompts and the answers of two duplicates. The later row is "
        "dropped. With input embeddings, 0.8 finds reworded rows. null: off. "
        "Reject reason: `semantic_duplicate`.",
    )
    model: str = Field("", description="Model that computes the embeddings. Empty: data_curation.tokens.base_model.")
    embeddings: Literal["input", "hidden_states"] = Field(
        "input",
        description="input: weighted mean of the model's input embeddings, without a forward pass; word order has no "
        "effect. hidden_states: mean of the last hidden states of an encoder, which requires torch.",
    )


class DocumentsConfig(_Section):
    """Chunks and limits of documents: PDF, Word, PowerPoint, EPUB, Markdown, and text files that are read as documents."""

    max_tokens: int | None = Field(
        None,
        ge=32,
        description="Maximum length of a chunk in tokens of the base model. null: one token less than "
        "data_curation.tokens.max_length, for the end-of-sequence token, or 512 if no maximum length is set.",
    )
    overlap_sentences: int = Field(
        0,
        ge=0,
        le=20,
        description="Number of sentences that a chunk repeats from the previous chunk of the same section.",
    )
    max_pages: int = Field(2_000, ge=1, description="Maximum number of pages or slides. Larger files are quarantined.")
    max_expanded_bytes: int = Field(
        500_000_000,
        ge=1_000_000,
        description="Maximum size in bytes of a document, and of all files in a ZIP-based document after decompression. "
        "Larger files are quarantined.",
    )
    timeout_seconds: int = Field(
        300,
        ge=1,
        le=86_400,
        description="Maximum time in seconds for the text extraction of a file. Slower files are quarantined.",
    )
    ocr: Literal["none", "tesseract"] = Field(
        "none",
        description="Text recognition of scanned PDF pages. none: quarantine them; tesseract: use the program tesseract.",
    )
    ocr_languages: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]] = Field(
        ["eng"],
        min_length=1,
        description="Languages of scanned pages, as tesseract names them (eng, deu, chi_sim).",
    )


class DataCurationConfig(_Section):
    """Curation of raw text into train, validation and test rows."""

    sources: list[SourceEntry] = Field(
        default_factory=lambda: [SourceEntry(path="demo:python-docs")],
        min_length=1,
        description="Files, globs and folders to read, relative to the configuration file. demo:python-docs builds the "
        "demo dataset. A mapping with the key path also sets the encoding and layout of its files, the rows to select, and "
        "the columns of prompts and answers.",
    )
    format: Format = Field(
        "auto",
        description="Record format. auto: recognize the format of each record by its keys. Records that do not match "
        "a configured format are quarantined.",
    )
    text_unit: Literal["auto", "section", "line", "paragraph", "file"] = Field(
        "auto",
        description="Unit of a plain text or Markdown file that becomes a row. section: the text below a heading, also "
        "in HTML files, in chunks of at most data_curation.documents.max_tokens; paragraph: a block between blank "
        "lines. auto: section for Markdown and for plain text with wrapped or indented paragraphs, line for other plain "
        "text.",
    )
    documents: DocumentsConfig = Field(default_factory=DocumentsConfig, description="Chunking and limits of documents.")
    max_other_kind_share: Share = Field(
        0.05,
        description="Maximum share of rows whose kind (conversations, preference pairs, labelled rows, text) is not the "
        "most frequent kind. These rows are quarantined. A larger share is an error, unless only one row differs.",
    )
    max_line_bytes: int = Field(
        10_000_000,
        ge=1_000,
        description="Maximum size in bytes of a line, JSON array element or web page. Larger records are quarantined.",
    )
    min_prompt_characters: int = Field(1, ge=1, description="Minimum length of a prompt in characters.")
    min_answer_characters: int = Field(1, ge=1, description="Minimum length of an answer, or of a text, in characters.")
    max_row_characters: int = Field(
        200_000, ge=1, description="Maximum total length of a row's messages in characters."
    )
    near_duplicate_threshold: float = Field(
        0.7,
        ge=0.5,
        le=1,
        description="Minimum Jaccard similarity of the word 5-grams of two near-duplicates. Context that recurs "
        "across rows is not compared. The later row is dropped. Lower values drop more rows.",
    )
    semantic_duplicates: SemanticDuplicatesConfig = Field(
        default_factory=SemanticDuplicatesConfig,
        exclude_if=lambda one: one.threshold is None,  # a dataset that does not use it keeps its key
        description="Duplicates with different wording.",
    )
    answer_min_words: int = Field(
        8,
        ge=1,
        description="Minimum length in words of the answers that are compared. Rows with equal or similar answers are "
        "assigned to the same split. Lower values keep more rows together.",
    )
    decontamination: DecontaminationConfig = Field(
        default_factory=DecontaminationConfig, description="Evaluation sets to keep out of the dataset."
    )
    tokens: TokensConfig = Field(default_factory=TokensConfig, description="Token counts for the report.")
    language: LanguageConfig = Field(default_factory=LanguageConfig, description="Languages to keep.")
    quality: QualityConfig = Field(default_factory=QualityConfig, description="Published heuristics for web text.")
    instructions: InstructionConfig = Field(default_factory=InstructionConfig, description="Filters for conversations.")
    # Excluded if unused, so that a dataset without scores keeps its digest from before scores existed.
    quality_scores: QualityScoreSettings = Field(
        default_factory=QualityScoreSettings,
        exclude_if=lambda scores: not scores.is_enabled,
        description="Quality scores of the rows that all other steps keep.",
    )
    group_by: str = Field(
        "",
        description="Field of the records by which rows are grouped, such as customer. Rows with the same value are "
        "assigned to the same split. source: group by the row's source. Empty: no groups.",
    )
    published: Literal["place", "drop", "ignore"] = Field(
        "place",
        description="Treatment of the rows of earlier revisions. place: keep these rows, and new rows similar to them, in "
        "their splits. drop: also reject new rows that repeat them. ignore: reassign all rows.",
    )
    engine: Literal["native", "ray"] = Field(
        "native",
        description="Execution engine for preparing and comparing rows. native: this machine; ray: a Ray cluster.",
    )
    ray_address: str = Field(
        "",
        description="Address of the Ray cluster, such as 10.0.0.5:6379. Empty: the value of RAY_ADDRESS, or else a cluster "
        "on this machine.",
    )
    workers: int = Field(
        0,
        ge=0,
        description="Number of local processes that prepare rows. 0: the value of TUNELINE_THREADS, or else the number of "
        "available CPU cores.",
    )
    fractions: Fractions = Field(default_factory=Fractions, description="Shares of the splits. The sum must be 1.")
    personal_data: PersonalDataConfig = Field(
        default_factory=PersonalDataConfig,
        description="Actions on personal data and secrets: redact (replace with a placeholder), drop (reject "
        "the row) or keep (count only).",
    )

    @field_validator("sources")
    @classmethod
    def _check_formats(cls, sources: list[SourceEntry]) -> list[SourceEntry]:
        allowed = ("auto", *sorted(FORMATS))
        if unknown := [entry.format for entry in sources if entry.format and entry.format not in allowed]:
            raise ValueError(f"a source has the unknown format {unknown[0]!r}; expected {', '.join(allowed)}")
        return sources
