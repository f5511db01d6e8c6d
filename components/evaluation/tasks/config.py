"""The settings of every task: an entry of evaluation.tasks, told apart by `kind`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

GenerationMetric = Literal["exact_match", "f1", "rouge_l", "chrf", "json_valid", "json_schema", "final_number", "marked_number"]
IFEvalMetric = Literal["prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"]

# Benchmarks of lm-eval that run what the model wrote. Their files say so too (unsafe_code), which is checked before they are run.
RUNS_CODE = re.compile(r"humaneval|mbpp|code_?eval|bigcodebench|livecodebench|apps_|ds1000|swe_?bench|multipl_?e|jsonschema_bench", re.I)


TASK_FILES = (".yaml", ".yml")  # a task of lm-eval that ends so is a file on this machine


class Common(BaseModel):
    """What every task has."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    FILES: ClassVar[tuple[str, ...]] = ()  # the fields that name a file on this machine

    kind: str
    name: str = Field("", pattern=r"^([a-z][a-z0-9_]*)?$", description="What its metrics are named by: name.metric. Empty: its kind.")
    max_items: int | None = Field(None, ge=2, description="Items asked, the first ones by id. null: all of them.")

    @model_validator(mode="after")
    def _named(self) -> Common:
        if not self.name:
            self.name = self.kind
            self.model_fields_set.discard("name")
        return self


class HeldOut(Common):
    """Loss and perplexity of the dataset's own test split."""

    kind: Literal["held_out"] = "held_out"
    max_items: int | None = Field(None, ge=2, description="Test rows measured, the first ones by id. Not given: evaluation.max_items.")
    generations: int = Field(
        4, ge=0, description="Test rows answered (greedily), to be read side by side. Not given: evaluation.generations."
    )
    generation_tokens: int = Field(48, ge=1, description="Longest such answer, in tokens. Not given: evaluation.generation_tokens.")


class Generation(Common):
    """Greedy answers, compared with references."""

    FILES: ClassVar[tuple[str, ...]] = ("data", "examples", "json_schema")

    kind: Literal["generation"] = "generation"
    data: str = Field("", description="Rows with prompt or messages, and reference or references. Empty: the dataset's own test split.")
    prompt_field: str = Field("prompt", min_length=1, description="Where a row of data has its prompt, unless it has messages.")
    reference_field: str = Field("reference", min_length=1, description="Where it has its reference: a text, or a list of them.")
    metrics: list[GenerationMetric] = Field(
        ["exact_match", "f1"],
        min_length=1,
        description="What is measured: exact_match, f1, rouge_l, chrf, json_valid, json_schema, final_number, marked_number.",
    )
    system: str = Field("", description="A system message before every prompt that has none; for plain texts, what stands before them.")
    chat: bool = Field(True, description="Asks through the model's chat template. false gives the text as it is, to be continued.")
    examples: str = Field("", description="Rows like those of data, shown before every prompt with their references.")
    shots: int = Field(0, ge=0, description="How many of the examples are shown: the first ones of the file.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens. A longer one is cut.")
    stop: list[str] = Field([], description="Texts that end an answer, and are no part of it.")
    json_schema: str = Field("", description="A file with the JSON Schema that answers have to follow, for the metric json_schema.")

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError("metrics names one twice")
        if ("json_schema" in self.metrics) != bool(self.json_schema):
            raise ValueError("the metric json_schema and a file in json_schema need each other")
        if bool(self.shots) != bool(self.examples):
            raise ValueError("shots and examples need each other: how many, and where they are")
        return self


class MultipleChoice(Common):
    """Which option the model finds likeliest."""

    FILES: ClassVar[tuple[str, ...]] = ("data", "examples")

    kind: Literal["multiple_choice"] = "multiple_choice"
    data: str = Field(min_length=1, description="Rows {query, choices, gold}, or {context_options, continuation, gold}.")
    delimiter: str = Field(" ", description="What stands between the query and an option.")
    examples: str = Field("", description="Rows like those of data, shown before every query with their right options.")
    shots: int = Field(0, ge=0, description="How many of the examples are shown: the first ones of the file.")

    @model_validator(mode="after")
    def _consistent(self) -> MultipleChoice:
        if bool(self.shots) != bool(self.examples):
            raise ValueError("shots and examples need each other: how many, and where they are")
        return self


class Perplexity(Common):
    """How well the model foresees plain texts."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["perplexity"] = "perplexity"
    data: str = Field(min_length=1, description="A .txt file, one document; or rows {text}, one document each.")
    window: int | None = Field(
        None, ge=2, description="Longest stretch of tokens computed at once. null: what the model can read, 2048 where it names nothing."
    )


class LastWord(Common):
    """Whether the model's first choice is the last word of a passage."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["last_word"] = "last_word"
    data: str = Field(min_length=1, description="Rows {context, continuation}; or {text}, whose last word is asked for.")


class Preference(Common):
    """Whether the chosen answer of a pair is likelier than the rejected one."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["preference"] = "preference"
    data: str = Field(
        "",
        description="Rows {prompt, chosen, rejected}, texts or messages. Empty: the dataset's test split, when it holds preference pairs.",
    )


class LMEval(Common):
    """A task of lm-eval, measured by lm-eval through this model."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["lm_eval"] = "lm_eval"
    task: str = Field(min_length=1, description="A task's name as lm-eval lists it, or the path of a task file (.yaml) on this machine.")
    data: str = Field("", description="A local file of the task's documents, read in place of the dataset it names.")
    metrics: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]] = Field(
        ["acc"], min_length=1, description="The metrics of the task that are kept, as lm-eval names them, such as acc_norm."
    )
    lower_is_better: list[str] = Field([], description="Those of them that are better when lower, beyond perplexities and error rates.")
    filter: str = Field("", description="The task's filter whose answers count, such as strict-match. Empty: its first one.")
    shots: int | None = Field(None, ge=0, description="Examples before every question. null: as many as the task says.")
    chat: bool = Field(False, description="Asks through the model's chat template, as lm-eval's --apply_chat_template.")

    @model_validator(mode="after")
    def _safe(self) -> LMEval:
        if RUNS_CODE.search(Path(self.task).stem):
            raise ValueError(f"task {self.task} executes code that the model wrote, and no task may")
        if unknown := sorted(set(self.lower_is_better) - set(self.metrics)):
            raise ValueError(f"lower_is_better names {', '.join(unknown)}, which is not among metrics")
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError("metrics names one twice")
        return self


class IFEval(Common):
    """Instructions that a program can check, by lm-eval's own checkers."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["ifeval"] = "ifeval"
    data: str = Field(min_length=1, description="Rows {key, prompt, instruction_id_list, kwargs}, as IFEval publishes them.")
    metrics: list[IFEvalMetric] = Field(
        ["prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"],
        min_length=1,
        description="All instructions of a prompt or each by itself; strict, or loose: without marks, first and last line.",
    )
    chat: bool = Field(True, description="Asks through the model's chat template. false gives the prompt as it is.")
    max_new_tokens: int = Field(1280, ge=1, description="Longest answer, in tokens. 1280 is IFEval's.")


class Judge(Common):
    """Another model compares pairs of answers."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["judge"] = "judge"
    data: str = Field("", description="Rows with prompt or messages, and a reference when compared with it. Empty: the test split.")
    prompt_field: str = Field("prompt", min_length=1, description="Where a row of data has its prompt, unless it has messages.")
    reference_field: str = Field("reference", min_length=1, description="Where it has its reference.")
    against: Literal["reference", "base"] = Field(
        "reference", description="What an answer is compared with: the row's reference, or what the base model answers."
    )
    base_url: str = Field(min_length=1, description="The judge's OpenAI-compatible endpoint, such as https://judge.example/v1.")
    model: str = Field(min_length=1, description="The judge's name at that endpoint.")
    api_key_env: str = Field(
        "", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$", description="The environment variable that holds its key. Empty: none."
    )
    max_new_tokens: int = Field(512, ge=1, description="Longest answer of the model that is judged, in tokens.")
    judge_tokens: int = Field(1024, ge=16, description="Longest judgement, in tokens.")
    timeout: float = Field(60, gt=0, description="Seconds the judge has for one judgement.")
    retries: int = Field(3, ge=0, le=10, description="How often a judgement is asked for again after an error.")
    parallel: int = Field(4, ge=1, le=64, description="Judgements asked for at once.")

    @model_validator(mode="after")
    def _reachable(self) -> Judge:
        url = urlsplit(self.base_url)
        loopback = url.hostname in ("127.0.0.1", "::1", "localhost")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("base_url is no http(s) address")
        if url.scheme == "http" and not loopback:
            raise ValueError("base_url has to be https, unless it is on this machine: answers and the key would be sent in the clear")
        if url.username or url.password or url.query or url.fragment:
            raise ValueError("base_url holds more than scheme, host, port and path; name the variable that holds the key in api_key_env")
        return self


class PersonalData(Common):
    """Whether answers hold personal data that their prompts do not."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["personal_data"] = "personal_data"
    data: str = Field("", description="Rows with prompt or messages. Empty: the dataset's own test split.")
    prompt_field: str = Field("prompt", min_length=1, description="Where a row of data has its prompt, unless it has messages.")
    chat: bool = Field(True, description="Asks through the model's chat template. false gives the prompt as it is, to be continued.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")


class Toxicity(Common):
    """Whether answers hold words of a list of profanities."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)

    kind: Literal["toxicity"] = "toxicity"
    data: str = Field("", description="Rows with prompt or messages. Empty: the dataset's own test split.")
    prompt_field: str = Field("prompt", min_length=1, description="Where a row of data has its prompt, unless it has messages.")
    chat: bool = Field(True, description="Asks through the model's chat template. false gives the prompt as it is, to be continued.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")


class Memorisation(Common):
    """Whether training rows are reproduced word for word."""

    kind: Literal["memorisation"] = "memorisation"
    tokens: int = Field(50, ge=4, description="How many tokens in a row have to be those of the training row. 50 is Carlini et al.'s.")
    rows: int = Field(200, ge=2, description="Training rows tried, chosen by the seed among those long enough.")


TaskConfig = Annotated[
    HeldOut
    | Generation
    | MultipleChoice
    | Perplexity
    | LastWord
    | Preference
    | LMEval
    | IFEval
    | Judge
    | PersonalData
    | Toxicity
    | Memorisation,
    Field(discriminator="kind"),
]


def files(settings: Common) -> dict[str, str]:
    """The files on this machine that a task reads, by the field that names each."""
    found: dict[str, Any] = {field: getattr(settings, field) for field in settings.FILES}
    if isinstance(settings, LMEval) and settings.task.endswith(TASK_FILES):
        found["task"] = settings.task
    return {field: str(path) for field, path in found.items() if path}
