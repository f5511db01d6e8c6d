"""Preflight checks of the tasks, before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import InputError
from components.common.runtime.reporters import SilentReporter
from components.evaluation import suite
from components.evaluation.tasks import task_preflight
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.generation import Generation
from components.evaluation.tasks.held_out import HeldOut
from components.evaluation.tasks.lm_eval import LMEval
from components.evaluation.tasks.memorisation import Memorisation
from components.evaluation.tasks.multiple_choice import MultipleChoice
from components.evaluation.tasks.preference import Preference
from components.evaluation.tasks.toxicity import Toxicity
from tests.evaluation.tasks.test_lm_eval import GENERATION_TASK, write_task_file
from tests.tiny import tiny_tokenizer

STRICT_TEMPLATE = "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"


def run_check(
    settings: TaskSettings, *, tokenizer: Any = None, context: int | None = None
) -> task_preflight.TaskWorkload:
    return task_preflight.check_tasks([settings], tokenizer or tiny_tokenizer(), 0, 256, SilentReporter(), context)[0]


def write_rows(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(path)


def build_strict_tokenizer() -> Any:
    """Build a tokenizer whose template rejects system messages."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = STRICT_TEMPLATE + tokenizer.chat_template.removeprefix("{% for message in messages %}")
    return tokenizer


QUESTIONS = (
    {"prompt": "Capital of France?", "reference": "Paris"},
    {"prompt": "Capital of Peru?", "reference": "Lima"},
)


@pytest.mark.parametrize(
    ("settings", "answer_tokens", "field"),
    [
        (HeldOut(generation_tokens=48), 48, "generation_tokens"),
        (Memorisation(tokens=50), 58, "tokens"),
        (Toxicity(max_new_tokens=128), 128, "max_new_tokens"),
    ],
)
def test_answer_limit_is_checked_before_dataset_exists(settings: TaskSettings, answer_tokens: int, field: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"tasks\[0\]: the model's context length is {answer_tokens} tokens; an answer of {answer_tokens}",
    ) as refused:
        run_check(settings, context=answer_tokens)
    assert refused.value.hint == f"Lower {field}."
    assert run_check(settings, context=answer_tokens + 1).items is None


def test_context_too_small_for_the_suite_names_its_setting() -> None:
    """The tasks of the suite are not in the user's configuration, and their settings are fixed."""
    settings = next(task for task in suite.build_tasks() if task.name == "suite_harmful")
    with pytest.raises(
        InputError, match=r"^evaluation\.suite: suite_harmful: the model's context length is 24"
    ) as refused:
        run_check(settings, context=24)
    assert refused.value.hint == "Set evaluation.suite to none, and promote the model with `tuneline promote`."


def test_prompt_task_is_checked_against_context_length(tmp_path: Path) -> None:
    settings = Generation(data=write_rows(tmp_path / "q.jsonl", *QUESTIONS), max_new_tokens=128)
    with pytest.raises(InputError, match="context length is 128 tokens; an answer of 128 tokens leaves no room"):
        run_check(settings, context=128)
    assert run_check(settings, context=129).items == run_check(settings).items == 2


def test_lm_eval_answer_limit_is_checked(tmp_path: Path) -> None:
    questions = [{"question": "2+2?", "answer": "four"}, {"question": "3+3?", "answer": "six"}]
    settings = LMEval(task=write_task_file(tmp_path, GENERATION_TASK, questions), metrics=["exact_match"])
    with pytest.raises(InputError, match="context length is 8 tokens; an answer of 8 tokens leaves no room") as refused:
        run_check(settings, context=8)
    assert "max_gen_toks" in refused.value.hint
    assert run_check(settings, context=9).items == 2


def test_task_without_answers_needs_no_answer_room(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "c.jsonl", *({"query": f"Which {n}?", "choices": ["a", "b"], "gold": 0} for n in range(2))
    )
    assert run_check(MultipleChoice(data=data), context=8).items == 2


def test_every_role_sequence_is_checked_with_chat_template(tmp_path: Path) -> None:
    system_row = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}],
        "reference": "Lima",
    }
    settings = Generation(data=write_rows(tmp_path / "q.jsonl", *QUESTIONS, system_row))
    assert run_check(settings).items == 3
    with pytest.raises(
        InputError, match="chat template rejects a conversation with the roles system, user: no system message here"
    ):
        run_check(settings, tokenizer=build_strict_tokenizer())


def test_preference_pairs_are_checked_with_chat_template(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}]
    settings = Preference(
        data=write_rows(tmp_path / "p.jsonl", *({"prompt": p, "chosen": "a", "rejected": "b"} for p in ("Say.", turns)))
    )
    assert run_check(settings).items == 2
    with pytest.raises(InputError, match="no system message here"):
        run_check(settings, tokenizer=build_strict_tokenizer())


def test_samples_multiply_the_workload(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "q.jsonl", *QUESTIONS)
    greedy = run_check(Generation(data=data, max_new_tokens=10))
    sampled = run_check(Generation(data=data, max_new_tokens=10, temperature=1, samples=4))
    assert (greedy.output_tokens, sampled.output_tokens) == (20, 80)
    assert sampled.input_tokens == 4 * greedy.input_tokens
    assert greedy.settings.estimate_tokens(5, 20.0) == (100, 50)
    assert sampled.settings.estimate_tokens(5, 20.0) == (400, 200)


def test_memorisation_reads_a_prompt_and_writes_a_continuation_of_each_row() -> None:
    assert Memorisation(rows=10, tokens=8).estimate_tokens(100, 20.0) == (80, 80)
