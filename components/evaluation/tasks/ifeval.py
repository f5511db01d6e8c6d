"""Instructions that a program can check (Zhou et al., arXiv 2311.07911), by lm-eval's own checkers and scores."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from components.common.errors import ConfigurationError, InputError
from components.evaluation.task import Engine, Given, Item, Metric, Scores
from components.evaluation.tasks import asking, harness, reading
from components.evaluation.tasks.config import IFEval
from components.evaluation.tasks.generation import answered
from components.evaluation.tasks.reading import Record

PROMPT_LEVEL = Metric("higher", right_or_wrong=True)
INSTRUCTION_LEVEL = Metric("higher")
PUNKT = "tokenizers/punkt_tab"


@dataclass(frozen=True)
class IFEvalTask:
    """Prompts with instructions, answered greedily and checked."""

    settings: IFEval

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Those that the settings name: over prompts, or over instructions."""
        return {name: PROMPT_LEVEL if name.startswith("prompt") else INSTRUCTION_LEVEL for name in self.settings.metrics}

    @property
    def against_base(self) -> bool:
        """An instruction is followed or not."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The prompts; `ask` holds the row and the decoding. Raises InputError for an instruction or options that no checker takes, and
        for a key that stands twice."""
        known = checkers().instructions_registry.INSTRUCTION_DICT
        decoding = {"chat": self.settings.chat, "max_new_tokens": self.settings.max_new_tokens}
        rows = reading.records(self.settings.data)
        _check_keys(rows)
        made = [_item(one, known, given) for one in rows]
        return asking.first(asking.with_decoding(made, decoding), self.settings.max_items)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """Whether prompts, and how many of their instructions, are followed."""
        answers = answered(engine, items, self.settings.max_new_tokens, given, as_chat=self.settings.chat)
        found = [checked(item.ask["row"], answer) for item, answer in zip(items, answers, strict=True)]
        values: dict[str, list[float]] = {}
        weights: dict[str, list[float]] = {}
        for name in self.settings.metrics:
            values[name] = [float(sum(one[name]) if isinstance(one[name], list) else one[name]) for one in found]
            if not name.startswith("prompt"):
                weights[name] = [float(len(one[name])) for one in found]
        return Scores(values, weights, answers)


def checked(row: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """What lm-eval says of an answer: by metric right or wrong, or a list of it by instruction.

    Two checkers draw at random (what a row leaves open, and langdetect): they begin anew for every answer, so that equal ones score alike.
    """
    with _own_random():
        found: dict[str, Any] = checkers().process_results(dict(row), [answer])
    return found


@contextlib.contextmanager
def _own_random() -> Iterator[None]:
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


@cache
def checkers() -> Any:
    """lm-eval's module of IFEval, which would download nltk's sentence splitter if it were not there.

    Raises ConfigurationError where it is not.
    """
    import nltk

    nltk.data.path[:0] = harness.bundled_nltk()
    try:
        nltk.data.find(PUNKT)
    except LookupError:
        raise ConfigurationError(
            "IFEval needs nltk's punkt_tab, which is not on this machine, and nothing is downloaded",
            hint=harness.NLTK_HINT,
        ) from None
    with harness.offline():
        import langdetect
        from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    return utils


def _key(one: Record) -> str:
    return str(one.row.get("key", one.id))


def _check_keys(rows: Sequence[Record]) -> None:
    """Raise InputError for a key that stands twice, as for an id: items are told apart by it."""
    seen: dict[str, str] = {}
    for one in rows:
        if (place := seen.setdefault(_key(one), one.place)) != one.place:
            raise InputError(
                f"{one.place}: the key {_key(one)} stands already at {place}", hint="Give every row its own key, or none a key."
            )


def _check_options(one: Record, row: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Build and use every checker once, as the scoring will. Raises InputError for options that one of them does not take."""
    try:
        json.dumps(row["kwargs"], allow_nan=False)
    except (TypeError, ValueError):
        raise one.wrong("has a value in kwargs that JSON does not know, such as NaN") from None
    for name, options in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        try:
            with _own_random():
                _use(known[name](name), {field: value for field, value in options.items() if value}, row["prompt"])
        except Exception as error:  # whatever a checker says of options that it does not know
            raise one.wrong(f"has kwargs that {name} does not take: {str(error)[:200]}") from None


def _use(checker: Any, options: Mapping[str, Any], prompt: str) -> None:
    checker.build_description(**options)
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=prompt)
    checker.check_following("An answer.")


def _item(one: Record, known: Mapping[str, Any], given: Given) -> Item:
    prompt, names, options = one.text("prompt"), one.row.get("instruction_id_list"), one.row.get("kwargs")
    if not isinstance(names, list) or not isinstance(options, list) or not names or len(names) != len(options):
        raise one.wrong("needs as many kwargs as it has instructions in instruction_id_list")
    if not all(option is None or isinstance(option, dict) for option in options):
        raise one.wrong("needs an object, or null, in kwargs for every instruction")
    if unknown := sorted(str(name) for name in names if not isinstance(name, str) or name not in known):
        raise one.wrong(f"asks for {', '.join(unknown)}, which no checker knows")
    key = _key(one)
    row = {"key": key, "prompt": prompt, "instruction_id_list": names, "kwargs": [option or {} for option in options]}
    _check_options(one, row, known)
    item = asking.prompt_item(key, [{"role": "user", "content": prompt}], [], given, category=str(names[0]).partition(":")[0])
    return asking.with_decoding([item], {"row": row})[0]
