"""Tasks are looked at before anything is trained, by what their models will read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import InputError
from components.common.progress import Silent
from components.evaluation.tasks import checking
from components.evaluation.tasks.config import Common, Generation, HeldOut, LMEval, Memorisation, MultipleChoice, Preference, Toxicity
from tests.evaluation.tasks.test_lm_eval import GENERATED, task_file
from tests.tiny import tiny_tokenizer

STRICT = "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"


def looked(settings: Common, *, tokenizer: Any = None, context: int | None = None) -> checking.Asked:
    return checking.look([settings], tokenizer or tiny_tokenizer(), 0, 256, Silent(), context)[0]


def rows(path: Path, *some: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


def strict() -> Any:
    """A tokenizer whose template refuses a system message."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = STRICT + tokenizer.chat_template.removeprefix("{% for message in messages %}")
    return tokenizer


QUESTIONS = ({"prompt": "Capital of France?", "reference": "Paris"}, {"prompt": "Capital of Peru?", "reference": "Lima"})


@pytest.mark.parametrize(
    ("settings", "longest", "named"),
    [
        (HeldOut(generation_tokens=48), 48, "generation_tokens"),
        (Memorisation(tokens=50), 58, "tokens"),
        (Toxicity(max_new_tokens=128), 128, "max_new_tokens"),
    ],
)
def test_an_answer_that_leaves_no_room_is_told_before_there_is_a_dataset(settings: Common, longest: int, named: str) -> None:
    with pytest.raises(
        InputError, match=rf"evaluation\.tasks\[0\]: the model reads {longest} tokens, and an answer of {longest}"
    ) as refused:
        looked(settings, context=longest)
    assert refused.value.hint == f"Lower {named}."
    assert looked(settings, context=longest + 1).items is None


def test_a_task_of_prompts_is_compared_with_what_the_model_reads(tmp_path: Path) -> None:
    settings = Generation(data=rows(tmp_path / "q.jsonl", *QUESTIONS), max_new_tokens=128)
    with pytest.raises(InputError, match="reads 128 tokens, and an answer of 128 leaves no room"):
        looked(settings, context=128)
    assert looked(settings, context=129).items == looked(settings).items == 2


def test_what_lm_evals_task_says_of_its_answers_is_compared_too(tmp_path: Path) -> None:
    questions = [{"question": "2+2?", "answer": "four"}, {"question": "3+3?", "answer": "six"}]
    settings = LMEval(task=task_file(tmp_path, GENERATED, questions), metrics=["exact_match"])
    with pytest.raises(InputError, match="reads 8 tokens, and an answer of 8 leaves no room") as refused:
        looked(settings, context=8)
    assert "max_gen_toks" in refused.value.hint
    assert looked(settings, context=9).items == 2


def test_a_task_without_answers_needs_no_room_for_one(tmp_path: Path) -> None:
    data = rows(tmp_path / "c.jsonl", *({"query": f"Which {n}?", "choices": ["a", "b"], "gold": 0} for n in range(2)))
    assert looked(MultipleChoice(data=data), context=8).items == 2


def test_every_sequence_of_roles_goes_through_the_chat_template(tmp_path: Path) -> None:
    refused = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}], "reference": "Lima"}
    settings = Generation(data=rows(tmp_path / "q.jsonl", *QUESTIONS, refused))
    assert looked(settings).items == 3
    with pytest.raises(InputError, match="chat template refuses a conversation of system, user: no system message here"):
        looked(settings, tokenizer=strict())


def test_the_pairs_of_a_preference_go_through_the_chat_template(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}]
    settings = Preference(data=rows(tmp_path / "p.jsonl", *({"prompt": p, "chosen": "a", "rejected": "b"} for p in ("Say.", turns))))
    assert looked(settings).items == 2
    with pytest.raises(InputError, match="no system message here"):
        looked(settings, tokenizer=strict())
