"""Checks of verifiable instructions (IFEval, Zhou et al., arXiv 2311.07911), which lm-eval's checkers carry out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import util
from typing import TYPE_CHECKING, Any

from components.common.answer_metrics import lm_eval_environment
from components.common.runtime.errors import ConfigurationError, EngineMissingError

if TYPE_CHECKING:
    from types import ModuleType

PUNKT_RESOURCE = "tokenizers/punkt_tab"
Row = dict[str, Any]


class InvalidInstructionsError(ValueError):
    """The instructions of a row are invalid. The message begins with a verb."""


def parse_instructions(row: Mapping[str, Any]) -> Row:
    """Return the fields instruction_id_list and kwargs of a row in the format of the IFEval dataset.

    Every checker is run once, so that invalid options are found before an evaluation or a training.

    Raises:
        InvalidInstructionsError: an instruction or its options are missing, or unknown to the checkers.
        ConfigurationError, EngineMissingError: see `load_checkers`.
    """
    names, options = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(names, list) or not isinstance(options, list) or not names or len(names) != len(options):
        raise InvalidInstructionsError(
            f"has {names!r:.60} in instruction_id_list and {options!r:.60} in kwargs; expected one entry in kwargs for "
            "every instruction"
        )
    if wrong := [option for option in options if not (option is None or isinstance(option, dict))]:
        raise InvalidInstructionsError(
            f"has {wrong[0]!r:.60} in kwargs; expected an object or null for every instruction"
        )
    known = load_checkers().instructions_registry.INSTRUCTION_DICT
    if unknown := sorted(str(name) for name in names if not isinstance(name, str) or name not in known):
        raise InvalidInstructionsError(
            f"has the unknown instruction {unknown[0]}; expected an instruction of the IFEval dataset"
        )
    options = [option or {} for option in options]
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInstructionsError(f"has a value in kwargs that is not a JSON value: {error}") from None
    for name, option in zip(names, options, strict=True):
        try:
            check_answer({"instruction_id_list": [name], "kwargs": [option]}, "An answer.")
        except Exception as error:  # checkers raise various exceptions for unknown options
            raise InvalidInstructionsError(f"has kwargs that {name} does not accept: {str(error)[:200]}") from None
    return {"instruction_id_list": names, "kwargs": options}


def check_answer(row: Row, answer: str) -> Row:
    """Return lm-eval's results for an answer by metric: a boolean, or a list of booleans by instruction.

    Two checkers draw random values, so the seed is reset for every answer.

    Raises:
        ConfigurationError, EngineMissingError: see `load_checkers`.
    """
    with lm_eval_environment.set_lm_eval_seeds():
        results: Row = load_checkers().process_results({"key": 0, "prompt": "", **row}, [answer])
    return results


@cache
def load_checkers() -> ModuleType:
    """Return lm-eval's IFEval module.

    Raises:
        ConfigurationError: nltk's sentence splitter is missing, which the module would download.
        EngineMissingError: lm-eval or one of its packages is not installed.
    """
    if not util.find_spec("lm_eval"):
        raise EngineMissingError(
            "IFEval's instructions require lm-eval, which is not installed", hint="Install tuneline[evaluation]."
        )
    import nltk

    nltk.data.path[:0] = lm_eval_environment.find_bundled_nltk()
    try:
        nltk.data.find(PUNKT_RESOURCE)
    except LookupError:
        raise ConfigurationError(
            "IFEval requires nltk's punkt_tab, which is not on this machine (downloads are disabled)",
            hint=lm_eval_environment.NLTK_HINT,
        ) from None
    with lm_eval_environment.offline():
        import langdetect
        from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    module: ModuleType = utils
    return module
