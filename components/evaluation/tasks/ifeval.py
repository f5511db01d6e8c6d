"""Instructions that a program can check (Zhou et al., arXiv 2311.07911), by lm-eval's own checkers and scores."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from components.common.errors import ConfigurationError
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
        """The prompts; `ask` holds the row and the decoding. Raises InputError for an instruction that is not known."""
        known = checkers().instructions_registry.INSTRUCTION_DICT
        decoding = {"chat": self.settings.chat, "max_new_tokens": self.settings.max_new_tokens}
        made = [_item(one, known, given) for one in reading.records(self.settings.data)]
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
    state = random.getstate()
    random.seed(0)
    try:
        found: dict[str, Any] = checkers().process_results(dict(row), [answer])
    finally:
        random.setstate(state)
    return found


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


def _item(one: Record, known: Mapping[str, Any], given: Given) -> Item:
    prompt, names, options = one.text("prompt"), one.row.get("instruction_id_list"), one.row.get("kwargs")
    if not isinstance(names, list) or not isinstance(options, list) or not names or len(names) != len(options):
        raise one.wrong("needs as many kwargs as it has instructions in instruction_id_list")
    if unknown := sorted(str(name) for name in names if name not in known):
        raise one.wrong(f"asks for {', '.join(unknown)}, which no checker knows")
    key = str(one.row.get("key", one.id))
    row = {"key": key, "prompt": prompt, "instruction_id_list": names, "kwargs": [option or {} for option in options]}
    item = asking.prompt_item(key, [{"role": "user", "content": prompt}], [], given, category=str(names[0]).partition(":")[0])
    return asking.with_decoding([item], {"row": row})[0]
