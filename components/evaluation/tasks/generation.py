"""Task kind `generation`: answers, compared with references by the configured metrics.

Answers are greedy, or sampled: several samples per item give pass@k (Chen et al., arXiv 2107.03374).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from components.common.answer_metrics import json_answers, numeric_answers, squad_metrics, text_similarity
from components.common.artifacts import hashing
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import Engine, Item, Metric, Sampling, Scores, TaskContext
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import AnswerCheckTask
from components.evaluation.tasks.config import AnswerSettings, FewShotSettings, check_distinct
from components.evaluation.tasks.item_encoding import Message

GenerationMetric = Literal[
    "exact_match", "f1", "rouge_l", "chrf", "json_valid", "json_schema", "final_number", "marked_number"
]
BINARY, SIMILARITY = Metric("higher", is_binary=True), Metric("higher", max_item_loss=1.0, harm=0.5)
MIN_TEMPERATURE = 0.01  # quotients of logits by much smaller temperatures are infinite
PASS_AT = "_pass_at_"  # between the metric and k
CHRF = Metric("higher", max_item_loss=100.0, harm=50.0)
REFERENCE_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": squad_metrics.exact_match,
    "f1": squad_metrics.f1,
    "rouge_l": text_similarity.rouge_l,
    "chrf": text_similarity.chrf,
    "final_number": numeric_answers.score_final_number,
    "marked_number": numeric_answers.score_marked_number,
}
# Checks of whether an answer can match the reference.
REFERENCE_CHECKS: dict[str, Callable[[str], bool]] = {
    "final_number": lambda reference: numeric_answers.extract_final_number(reference) is not None,
    "marked_number": lambda reference: bool(numeric_answers.extract_marked_number(reference)),
}


GENERATION_METRICS: dict[str, Metric] = {
    "exact_match": BINARY,
    "f1": SIMILARITY,
    "rouge_l": SIMILARITY,
    "chrf": CHRF,
    "json_valid": BINARY,
    "json_schema": BINARY,
    "final_number": BINARY,
    "marked_number": BINARY,
}


class Generation(AnswerSettings, FewShotSettings):
    """Settings of a generation task."""

    FILE_FIELDS: ClassVar[tuple[str, ...]] = ("data", "examples", "json_schema")

    kind: Literal["generation"] = "generation"
    data: str = Field(
        "",
        description="File of rows with prompt or messages, and reference or references. "
        "Empty: the dataset's test split.",
    )
    reference_field: str = Field(
        "reference", min_length=1, description="Field that contains a row's reference: a string, or a list of strings."
    )
    metrics: list[GenerationMetric] = Field(
        ["exact_match", "f1"],
        min_length=1,
        description="Metrics: exact_match, f1, rouge_l, chrf, json_valid, json_schema, final_number, marked_number.",
    )
    system: str = Field(
        "",
        description="System message for prompts without a system message. Without a chat template, the message "
        "precedes the prompt. Empty: no system message.",
    )
    stop: list[str] = Field([], description="Stop strings. A stop string ends an answer and is removed from it.")
    temperature: float = Field(
        0.0,
        ge=0,
        le=10,
        exclude_if=operator.not_,
        description="Temperature of sampled answers, at least 0.01. 0: greedy decoding.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        exclude_if=(1.0).__eq__,
        description="Nucleus sampling: sample only from the most likely tokens whose probabilities add up to this "
        "share. 1: all tokens.",
    )
    samples: int = Field(
        1,
        ge=1,
        le=1000,
        exclude_if=(1).__eq__,
        description="Number of sampled answers per item. A metric is then the mean over an item's answers.",
    )
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        [],
        exclude_if=operator.not_,
        description="Values of k for the metrics NAME_pass_at_k: for each binary metric, the probability that at least "
        "one of k sampled answers is correct. Empty: 1 and samples, if samples exceeds 1.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        exclude_if=lambda seed: seed is None,
        description="Seed of sampled answers. null: the seed of the run.",
    )
    store_texts: bool = Field(
        True,
        exclude_if=operator.truth,
        description="Store prompts, references and answers. false: store only scores, for texts that may have to be "
        "erased.",
    )
    json_schema: str = Field("", description="File with the JSON Schema for the metric json_schema. Empty: no schema.")

    @model_validator(mode="after")
    def _check_metrics(self) -> Generation:
        check_distinct(list(self.metrics))
        if ("json_schema" in self.metrics) != bool(self.json_schema):
            raise ValueError(
                f"json_schema is {self.json_schema or 'empty'}; expected a file if metrics contains json_schema, "
                "else empty"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Generation:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; expected 0 for greedy answers, or at least {MIN_TEMPERATURE}"
            )
        sampled = {"samples": self.samples > 1, "top_p": self.top_p < 1, "seed": self.seed is not None}
        for name in (name for name, is_set in sampled.items() if is_set and not self.temperature):
            raise ValueError(
                f"{name} is {getattr(self, name)}, and temperature is 0; expected a temperature above 0, such as 0.8, "
                "because greedy answers do not differ"
            )
        if self.pass_at and (self.samples == 1 or max(self.pass_at) > self.samples):
            raise ValueError(
                f"pass_at is {self.pass_at}, and samples is {self.samples}; expected at least 2 samples, and numbers "
                "from 1 to samples in pass_at"
            )
        if self.samples > 1 and not self.store_texts:
            raise ValueError(
                f"store_texts is false, and samples is {self.samples}; expected samples 1, because only stored answers "
                "can verify the scores of several samples"
            )
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"pass_at is {self.pass_at}; expected distinct numbers")
        if self.pass_at and not any(GENERATION_METRICS[name].is_binary for name in self.metrics):
            raise ValueError(
                f"pass_at is {self.pass_at}, and metrics is {self.metrics}; expected at least one binary metric, "
                "such as exact_match"
            )
        return self

    @property
    def reported_k(self) -> list[int]:
        """The numbers k of the metrics NAME_pass_at_k."""
        return self.pass_at or ([1, self.samples] if self.samples > 1 else [])


class GenerationTask(AnswerCheckTask[Generation]):
    """Answers to prompts from a file or from the dataset's test split."""

    METRICS: ClassVar = GENERATION_METRICS

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The configured metrics and, for several samples, those of pass@k, which are shares of right answers."""
        settings = self.settings
        metrics = {str(name): GENERATION_METRICS[name] for name in settings.metrics}
        if settings.samples == 1:
            return metrics
        shares = {name: SIMILARITY if metric.is_binary else metric for name, metric in metrics.items()}
        return {
            **shares,
            **{
                f"{name}{PASS_AT}{k}": SIMILARITY
                for name, metric in metrics.items()
                if metric.is_binary
                for k in settings.reported_k
            },
        }

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the prompts with examples and system message; `request` also holds the decoding and the schema.

        Raises:
            ConfigurationError: A file does not exist or has an unknown format, or the JSON Schema is invalid.
            InputError: A row is invalid, or has no reference that a configured metric can compare.
        """
        settings, schema = self.settings, None
        if settings.json_schema:
            schema = record_files.read_json_file(settings.json_schema, "json_schema")
            json_answers.build_validator(schema, settings.json_schema)
        reference_metrics = [name for name in settings.metrics if name in REFERENCE_METRICS]
        reference_field = settings.reference_field if reference_metrics else ""
        examples = self._read_example_turns()
        values = {**settings.model_dump(include={"chat", "max_new_tokens", "stop"}), "schema": schema}
        if settings.temperature:
            values["seed"] = context.seed if settings.seed is None else settings.seed
        items = []
        for item in item_encoding.build_row_items(settings, context, reference_field):
            references = item.request["references"]
            for metric in reference_metrics:
                if not any(REFERENCE_CHECKS.get(metric, bool)(reference) for reference in references):
                    problem = f"no reference that {metric} can compare" if any(references) else "no reference"
                    raise InputError(
                        f"item {item.id} has {problem}", hint="Give every row a reference, or choose another metric."
                    )
            messages = self._assemble_messages(item.request["messages"], examples)
            prompt = "\n\n".join(m["content"].strip() for m in messages)
            length = item.length
            if prompt != item.prompt:
                length = math.ceil(length * (len(prompt) / max(len(item.prompt), 1)))
            request = {**item.request, **values, "messages": messages}
            items.append(replace(item, prompt=prompt, length=length, request=request))
        return items

    def _read_example_turns(self) -> list[Message]:
        """Return the few-shot examples as user and assistant turns."""
        settings, turns = self.settings, list[Message]()
        for record in item_encoding.read_examples(settings):
            messages = item_encoding.read_messages(record, settings.prompt_field)
            field = settings.reference_field if settings.reference_field in record.row else "references"
            if field in record.row:
                answer = record.get_texts(field)[0]
            elif messages[-1]["role"] == "assistant":
                answer = messages[-1]["content"]
            else:
                raise record.build_error("is an example without a reference")
            turns += [m for m in messages if m["role"] != "assistant"]
            turns.append({"role": "assistant", "content": answer})
        return turns

    def _assemble_messages(self, messages: Sequence[Message], examples: Sequence[Message]) -> list[Message]:
        """Return system message, examples and prompt; without a chat template, as one text."""
        system = [m for m in messages if m["role"] == "system"]
        if not system and self.settings.system:
            system = [{"role": "system", "content": self.settings.system}]
        turns = [dict(m) for m in (*system, *examples, *(m for m in messages if m["role"] != "system"))]
        if self.settings.chat:
            return turns
        text = ""
        for turn in turns:  # an empty line follows every example
            if turn["role"] == "system":
                text += turn["content"] + "\n\n"
            elif turn["role"] == "assistant":
                text += ("" if text.endswith((" ", "\n")) else " ") + turn["content"].strip() + "\n\n"
            else:
                text += turn["content"]
        return [{"role": "user", "content": text}]

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Generate the answers and check them. With several samples, scores are means and estimates of pass@k."""
        settings = self.settings
        if not settings.temperature:
            return super().score(engine, items, context, base)
        repeated = [item for item in items for _ in range(settings.samples)]
        seeds = [
            derive_seed(item.request["seed"], item.id, index) for item in items for index in range(settings.samples)
        ]
        sampling = Sampling(settings.temperature, settings.top_p, tuple(seeds))
        answers = self.generate_answers(engine, repeated, context, sampling)
        checked = self.check_answers(answers, repeated)
        if settings.samples == 1:
            return checked
        return self._summarize_samples(answers, checked.values)

    def _summarize_samples(self, answers: Sequence[str], checked: Mapping[str, Sequence[float]]) -> Scores:
        """Return the scores by item.

        Args:
            answers: The sampled answers; those of an item are consecutive.
            checked: Scores of the answers by metric.
        """
        n = self.settings.samples
        starts = range(0, len(answers), n)
        values: dict[str, list[float]] = {}
        for name, scores in checked.items():
            values[name] = [math.fsum(scores[start : start + n]) / n for start in starts]
        for name in [name for name in checked if GENERATION_METRICS[name].is_binary]:
            for k in self.settings.reported_k:
                right = [round(sum(checked[name][start : start + n])) for start in starts]
                values[f"{name}{PASS_AT}{k}"] = [estimate_pass_at(n, count, k) for count in right]
        samples: list[list[dict[str, str | float]]] = [
            [
                {"answer": answers[index], **{name: scores[index] for name, scores in checked.items()}}
                for index in range(start, start + n)
            ]
            for start in starts
        ]
        return Scores(values, answers=[answers[start] for start in starts], samples=samples)

    def check_answers(self, answers: Sequence[str], items: Sequence[Item]) -> Scores:
        """Return the answers with one score per item and metric."""
        schema = items[0].request["schema"] if items else None
        validator = json_answers.build_validator(schema, self.settings.json_schema) if schema is not None else None

        def score_answer(metric: str, answer: str, item: Item) -> float:
            if metric == "json_valid":
                return json_answers.score_json(answer)
            if metric == "json_schema":
                return json_answers.score_schema(answer, validator)
            return REFERENCE_METRICS[metric](answer, item.request["references"])

        values = {
            str(metric): [score_answer(metric, answer, item) for answer, item in zip(answers, items, strict=True)]
            for metric in self.settings.metrics
        }
        return Scores(values, answers=answers)


def derive_seed(seed: int, item_id: str, sample: int) -> int:
    """Return the seed of one sample: equal in any batch, order and subset of items."""
    return int(hashing.digest([seed, item_id, sample])[:15], 16)


def estimate_pass_at(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 − C(n−c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).

    Args:
        samples: Number of samples n.
        right: Number of right samples c.
        k: Number of answers of which one has to be right.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
