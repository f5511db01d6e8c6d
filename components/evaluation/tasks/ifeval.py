"""Task kind `ifeval`: verifiable instructions (Zhou et al., arXiv 2311.07911), scored by lm-eval's checkers."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import Field

from components.common.runtime.errors import ConfigurationError, InputError
from components.evaluation.task_interface import Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks import item_encoding, lm_eval_runner, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.record_files import Record, Row

if TYPE_CHECKING:
    from types import ModuleType

IFEvalMetric = Literal[
    "prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"
]
PUNKT_RESOURCE = "tokenizers/punkt_tab"


class IFEval(TaskSettings):
    """Settings of an ifeval task."""

    kind: Literal["ifeval"] = "ifeval"
    data: str = Field(
        min_length=1,
        description="File of rows {key, prompt, instruction_id_list, kwargs}, in the format of the IFEval dataset.",
    )
    metrics: list[IFEvalMetric] = Field(
        list(get_args(IFEvalMetric)),
        min_length=1,
        description="Metrics per prompt (all its instructions) or per instruction; "
        "strict, or loose (without markup, first or last line).",
    )
    chat: bool = Field(True, description="Apply the model's chat template. false: send the raw prompt.")
    max_new_tokens: int = Field(1280, ge=1, description="Maximum answer length in tokens. 1280 as in IFEval.")


class IFEvalTask(Task[IFEval]):
    """Greedy answers to prompts with instructions, and the checks of the instructions."""

    METRICS: ClassVar = {
        "prompt_level_strict_acc": Metric("higher", is_binary=True),
        "inst_level_strict_acc": Metric("higher", max_item_loss=1.0),
        "prompt_level_loose_acc": Metric("higher", is_binary=True),
        "inst_level_loose_acc": Metric("higher", max_item_loss=1.0),
    }

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the prompts; `request` holds the row and the decoding.

        Every checker is run once, so that invalid options are found before the evaluation.

        Raises:
            ConfigurationError: nltk's sentence splitter is missing.
            InputError: An instruction or its options are unknown to the checkers, or a key is a duplicate.
        """
        instructions = list(load_checkers().instructions_registry.INSTRUCTION_DICT)
        locations: dict[str, str] = {}
        values = self.settings.model_dump(include={"chat", "max_new_tokens"})
        items = []
        for record in record_files.read_records(self.settings.data):
            key = str(record.row.get("key", record.id))
            if (first := locations.setdefault(key, record.location)) != record.location:
                raise InputError(
                    f"{record.location}: duplicate key {key}, first used at {first}",
                    hint="Give every row a distinct key, or remove all keys.",
                )
            row = {"key": key, **_parse_row(record, instructions)}
            for name, option in zip(row["instruction_id_list"], row["kwargs"], strict=True):
                try:
                    check_answer({**row, "instruction_id_list": [name], "kwargs": [option]}, "An answer.")
                except Exception as error:  # checkers raise various exceptions for unknown options
                    problem = f"has kwargs that {name} does not accept: {str(error)[:200]}"
                    raise record.build_error(problem) from None
            messages = [{"role": "user", "content": row["prompt"]}]
            category = row["instruction_id_list"][0].partition(":")[0]
            labelled = Record(key, {"category": category}, record.location)
            item = item_encoding.build_prompt_item(labelled, messages, [], context)
            items += item_encoding.extend_requests([item], {"row": row, **values})
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return whether all instructions of a prompt are followed, and the number of followed instructions."""
        answers = self.generate_answers(engine, items, context)
        results = [check_answer(item.request["row"], answer) for item, answer in zip(items, answers, strict=True)]
        values: dict[str, list[float]] = {}
        weights: dict[str, list[float]] = {}
        for name in self.settings.metrics:
            found = [result[name] if isinstance(result[name], list) else [result[name]] for result in results]
            values[name] = [float(sum(followed)) for followed in found]
            if not self.METRICS[name].is_binary:
                weights[name] = [float(len(followed)) for followed in found]
        return Scores(values, weights, answers)


def check_answer(row: Row, answer: str) -> Row:
    """Return lm-eval's results for an answer by metric: a boolean, or a list of booleans by instruction.

    Two checkers draw random values, so the seed is reset for every answer.

    Raises:
        ConfigurationError: nltk's sentence splitter is missing.
    """
    with lm_eval_runner.set_lm_eval_seeds():
        results: Row = load_checkers().process_results(dict(row), [answer])
    return results


@cache
def load_checkers() -> ModuleType:
    """Return lm-eval's IFEval module.

    Raises:
        ConfigurationError: nltk's sentence splitter is missing, which the module would download.
    """
    import nltk

    nltk.data.path[:0] = lm_eval_runner.find_bundled_nltk()
    try:
        nltk.data.find(PUNKT_RESOURCE)
    except LookupError:
        raise ConfigurationError(
            "IFEval requires nltk's punkt_tab, which is not on this machine (downloads are disabled)",
            hint=lm_eval_runner.NLTK_HINT,
        ) from None
    with lm_eval_runner.offline():
        import langdetect
        from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    module: ModuleType = utils
    return module


def _parse_row(record: Record, instructions: Container[str]) -> Row:
    """Return a row in IFEval's layout, without its key."""
    prompt, names, options = record.get_text("prompt"), record.row.get("instruction_id_list"), record.row.get("kwargs")
    if not isinstance(names, list) or not isinstance(options, list) or not names or len(names) != len(options):
        raise record.build_error(
            f"has {names!r:.60} in instruction_id_list and {options!r:.60} in kwargs; expected one entry in kwargs for "
            "every instruction"
        )
    if wrong := [option for option in options if not (option is None or isinstance(option, dict))]:
        raise record.build_error(f"has {wrong[0]!r:.60} in kwargs; expected an object or null for every instruction")
    if unknown := sorted(str(name) for name in names if name not in instructions):
        raise record.build_error(
            f"has the unknown instruction {unknown[0]}; expected an instruction of the IFEval dataset"
        )
    options = [option or {} for option in options]
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise record.build_error(f"has a value in kwargs that is not a JSON value: {error}") from None
    return {"prompt": prompt, "instruction_id_list": names, "kwargs": options}
