"""Answers in batches are those of every prompt alone. On the tiny model in float32 no two tokens are equally likely, so texts are equal."""

from __future__ import annotations

import random
from typing import Any

import pytest

from components.common.progress import Silent
from components.evaluation import generation
from components.evaluation.engine import TransformersEngine
from components.evaluation.task import Decoding

SHORT = Decoding(max_new_tokens=12)


def prompts() -> list[list[int]]:
    """Prompts of many lengths, some behind one beginning, one of them twice."""
    draw = random.Random(4)
    header = draw.choices(range(250), k=80)
    made = [draw.choices(range(250), k=length) for length in (1, 3, 9, 9, 14, 30)]
    made += [[*header, *draw.choices(range(250), k=20 + item)] for item in range(14)]
    return [*made, made[2]]


def one_by_one(model: Any, engine: TransformersEngine, decoding: Decoding) -> list[str]:
    import torch

    texts = []
    for prompt in prompts():
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(decoding.max_new_tokens):
                following = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
                if following == engine.tokenizer.eos_token_id:
                    break
                ids.append(following)
        texts.append(engine.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
    return texts


@pytest.fixture(scope="module")
def expected(loaded: Any, engine: TransformersEngine) -> list[str]:
    return one_by_one(loaded, engine, SHORT)


@pytest.mark.parametrize("batch_tokens", [64, 2048])
def test_they_are_those_of_each_prompt_alone(loaded: Any, engine: TransformersEngine, expected: list[str], batch_tokens: int) -> None:
    assert TransformersEngine(loaded, engine.tokenizer, batch_tokens).answers(prompts(), SHORT, Silent()) == expected
    assert len(set(expected)) > 10


def test_they_do_not_depend_on_the_order(engine: TransformersEngine, expected: list[str]) -> None:
    assert engine.answers(prompts()[::-1], SHORT, Silent()) == expected[::-1]


def test_a_stop_text_ends_an_answer_and_is_cut_off(engine: TransformersEngine, expected: list[str]) -> None:
    longest = max(expected, key=len)
    stop = (longest[2:5], "never written")
    found = engine.answers(prompts(), Decoding(12, stop), Silent())
    assert found == [generation.cut(text, stop) for text in expected]
    assert found[expected.index(longest)] == longest[: longest.index(stop[0])]


def test_a_stop_text_spares_the_passes_behind_it(engine: TransformersEngine, loaded: Any, expected: list[str]) -> None:
    prompt, text = prompts()[5], expected[5]
    passes: list[int] = []
    hook = loaded.register_forward_pre_hook(lambda module, given: passes.append(1))
    engine.answers([prompt], Decoding(12, (text[:1],)), Silent())
    hook.remove()
    assert len(passes) < 6


def test_what_a_model_s_own_configuration_adds_to_decoding_is_left_out(tiny: Any, engine: TransformersEngine, expected: list[str]) -> None:
    from components.common import models

    model = models.load(tiny)
    model.generation_config.update(repetition_penalty=5.0, do_sample=True, temperature=3.0, min_new_tokens=12, no_repeat_ngram_size=1)
    assert TransformersEngine(model, engine.tokenizer, 512).answers(prompts(), SHORT, Silent()) == expected


def test_the_first_stop_text_counts_and_an_empty_one_never() -> None:
    assert generation.cut("one two three", ("three", "two")) == "one "
    assert generation.cut("one two", ("", "four")) == "one two"
