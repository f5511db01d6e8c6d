"""Greedy answers to prompts, compared with references by the metrics that the settings name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.errors import InputError
from components.evaluation.metrics import numbers, structured, words
from components.evaluation.task import Decoding, Engine, Given, Item, Metric, Scores
from components.evaluation.tasks import asking, reading
from components.evaluation.tasks.config import Generation

RIGHT = Metric("higher", right_or_wrong=True)
LIKENESS = Metric("higher")
METRICS: dict[str, Metric] = {
    "exact_match": RIGHT,
    "f1": LIKENESS,
    "rouge_l": LIKENESS,
    "chrf": LIKENESS,
    "json_valid": RIGHT,
    "json_schema": RIGHT,
    "final_number": RIGHT,
    "marked_number": RIGHT,
}
BY_REFERENCE: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": words.exact_match,
    "f1": words.f1,
    "rouge_l": words.rouge_l,
    "chrf": words.chrf,
    "final_number": numbers.same_number,
    "marked_number": numbers.same_marked_number,
}
# What a reference has to hold for a metric, or no answer could ever be right.
NEEDS: dict[str, Callable[[str], Any]] = {
    "final_number": lambda reference: numbers.final_number(reference) is not None,
    "marked_number": numbers.marked_number,
}


@dataclass(frozen=True)
class GenerationTask:
    """Prompts from a file or the dataset's test split, answered greedily."""

    settings: Generation

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Those that the settings name."""
        return {name: METRICS[name] for name in self.settings.metrics}

    @property
    def against_base(self) -> bool:
        """An answer is compared with references alone."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The prompts, each with its examples and system message; `ask` holds also the decoding and the schema."""
        settings, schema = self.settings, self._schema()
        needed = [name for name in settings.metrics if name in BY_REFERENCE]
        before = self._before(given)
        decoding = {"chat": settings.chat, "max_new_tokens": settings.max_new_tokens, "stop": settings.stop}
        made = []
        for item in asking.row_items(settings, given, referenced=bool(needed)):
            _check(item, needed)
            messages = self._asked(item.ask["messages"], before)
            made.append(_with(item, {**item.ask, **decoding, "messages": messages, "schema": schema}))
        return asking.first(made, settings.max_items)

    def _schema(self) -> Any:
        if not self.settings.json_schema:
            return None
        schema = reading.json_file(self.settings.json_schema, "json_schema")
        structured.validator(schema, self.settings.json_schema)
        return schema

    def _before(self, given: Given) -> list[dict[str, str]]:
        """The examples as turns; without a chat template each ends with an empty line."""
        settings = self.settings
        if not settings.shots:
            return []
        turns: list[dict[str, str]] = []
        shown = reading.records(settings.examples, "examples")[: settings.shots]
        if len(shown) < settings.shots:
            raise InputError(f"{settings.examples} has {len(shown)} rows, and {settings.shots} are to be shown", hint="Lower shots.")
        for one in shown:
            field = settings.reference_field if settings.reference_field in one.row else "references"
            turns += [m for m in asking.messages_of(one, settings.prompt_field) if m["role"] != "assistant"]
            turns.append({"role": "assistant", "content": one.texts(field)[0] if field in one.row else _last_answer(one, settings)})
        return turns

    def _asked(self, messages: Sequence[Mapping[str, str]], before: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        system = [m for m in messages if m["role"] == "system"]
        if not system and self.settings.system:
            system = [{"role": "system", "content": self.settings.system}]
        turns = [dict(m) for m in (*system, *before, *(m for m in messages if m["role"] != "system"))]
        return turns if self.settings.chat else _as_text(turns)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """The answers, and by metric one score an item."""
        answers = answered(engine, items, self.settings.max_new_tokens, given, stop=self.settings.stop, as_chat=self.settings.chat)
        schema = items[0].ask["schema"] if items else None
        checker = structured.validator(schema, self.settings.json_schema) if schema is not None else None
        pairs = _pairs(answers, items)
        values = {str(name): [_score(name, answer, item, checker) for answer, item in pairs] for name in self.settings.metrics}
        return Scores(values, answers=answers)


def answered(
    engine: Engine, items: Sequence[Item], max_new_tokens: int, given: Given, *, stop: Sequence[str] = (), as_chat: bool = True
) -> list[str]:
    """One greedy answer an item, without white space around it."""
    prompts = [asking.prompt_ids(engine.tokenizer, item, as_chat=as_chat) for item in items]
    prompts = asking.within_room(prompts, engine.room, max_new_tokens, given.reporter)
    return [answer.strip() for answer in engine.answers(prompts, Decoding(max_new_tokens, tuple(stop)), given.reporter)]


def _pairs(answers: Sequence[str], items: Sequence[Item]) -> list[tuple[str, Item]]:
    return list(zip(answers, items, strict=True))


def _score(metric: str, answer: str, item: Item, checker: Any) -> float:
    if metric == "json_valid":
        return structured.json_valid(answer)
    if metric == "json_schema":
        return structured.follows(answer, checker)
    return BY_REFERENCE[metric](answer, item.ask["references"])


def _check(item: Item, needed: Sequence[str]) -> None:
    """Raise InputError where the item has no reference that the metrics could compare with."""
    references = item.ask["references"]
    for metric in needed:
        if not references or not any(NEEDS.get(metric, bool)(reference) for reference in references):
            what = "no reference" if not any(references) else f"no reference with what {metric} compares"
            raise InputError(f"item {item.id} has {what}", hint="Give every row its reference, or measure something else.")


def _with(item: Item, ask: Mapping[str, Any]) -> Item:
    """The item with more to ask; its prompt is all that the model is shown."""
    prompt = "\n\n".join(m["content"].strip() for m in ask["messages"])
    scale = len(prompt) / max(len(item.prompt), 1)
    length = item.length if prompt == item.prompt else math.ceil(item.length * scale)
    return Item(item.id, prompt, item.reference, item.source, item.category, length, ask)


def _last_answer(one: reading.Record, settings: Generation) -> str:
    turns = asking.messages_of(one, settings.prompt_field)
    if turns[-1]["role"] != "assistant":
        raise one.wrong("is an example without a reference")
    return turns[-1]["content"]


def _as_text(turns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The turns as one text to be continued: an example's answer follows its prompt, and an empty line parts the examples."""
    text = ""
    for turn in turns:
        content = turn["content"]
        if turn["role"] == "system":
            text += content + "\n\n"
        elif turn["role"] == "assistant":
            text += ("" if text.endswith((" ", "\n")) else " ") + content.strip() + "\n\n"
        else:
            text += content
    return [{"role": "user", "content": text}]
