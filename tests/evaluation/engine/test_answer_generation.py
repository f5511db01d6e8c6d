"""Batched answers equal those of separate prompts, greedy and sampled; in float32 the tiny model has no ties between tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from components.common.runtime.reporters import SilentReporter
from components.evaluation import answer_generation
from components.evaluation.task_interface import Decoding, Sampling
from components.evaluation.transformers_engine import TransformersEngine

SHORT = Decoding(max_new_tokens=12)


def build_prompts() -> list[list[int]]:
    """Build prompts of many lengths; some share a long or short prefix, and one occurs twice."""
    rng = random.Random(4)
    header = rng.choices(range(250), k=80)
    prompts = [rng.choices(range(250), k=length) for length in (1, 3, 9, 9, 14, 30)]
    prompts += [[*header, *rng.choices(range(250), k=20 + item)] for item in range(14)]
    prompts += [[*header[::-1][:20], *rng.choices(range(250), k=1 + item)] for item in range(16)]
    return [*prompts, prompts[2]]


def generate_separately(model: Any, engine: TransformersEngine, decoding: Decoding) -> list[str]:
    import torch

    texts = []
    for prompt in build_prompts():
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
def expected(loaded_model: Any, engine: TransformersEngine) -> list[str]:
    return generate_separately(loaded_model, engine, SHORT)


@pytest.mark.parametrize("batch_tokens", [64, 2048])
def test_answers_equal_those_of_separate_prompts(
    loaded_model: Any, engine: TransformersEngine, expected: list[str], batch_tokens: int
) -> None:
    assert (
        TransformersEngine(loaded_model, engine.tokenizer, batch_tokens).generate(
            build_prompts(), SHORT, SilentReporter()
        )
        == expected
    )
    assert len(set(expected)) > 10


def test_answers_are_independent_of_order(engine: TransformersEngine, expected: list[str]) -> None:
    assert engine.generate(build_prompts()[::-1], SHORT, SilentReporter()) == expected[::-1]


def test_stop_text_ends_answer_and_is_removed(engine: TransformersEngine, expected: list[str]) -> None:
    longest = max(expected, key=len)
    stop = (longest[2:5], "never written")
    answers = engine.generate(build_prompts(), Decoding(12, stop), SilentReporter())
    assert answers == [answer_generation.truncate_at_stop(text, stop) for text in expected]
    assert answers[expected.index(longest)] == longest[: longest.index(stop[0])]


def test_stop_text_ends_generation_early(engine: TransformersEngine, loaded_model: Any, expected: list[str]) -> None:
    prompt, text = build_prompts()[5], expected[5]
    passes: list[int] = []
    hook = loaded_model.register_forward_pre_hook(lambda module, inputs: passes.append(1))
    engine.generate([prompt], Decoding(12, (text[:1],)), SilentReporter())
    hook.remove()
    assert len(passes) < 6


def test_model_generation_config_is_ignored(base_model: Any, engine: TransformersEngine, expected: list[str]) -> None:
    from components.common.models import model_loading

    model = model_loading.load_model(base_model)
    model.generation_config.update(
        repetition_penalty=5.0, do_sample=True, temperature=3.0, min_new_tokens=12, no_repeat_ngram_size=1
    )
    assert (
        TransformersEngine(model, engine.tokenizer, 512).generate(build_prompts(), SHORT, SilentReporter()) == expected
    )


def test_first_stop_text_counts_and_empty_is_ignored() -> None:
    assert answer_generation.truncate_at_stop("one two three", ("three", "two")) == "one "
    assert answer_generation.truncate_at_stop("one two", ("", "four")) == "one two"


def sample(engine: TransformersEngine, seeds: list[int], prompts: list[list[int]], **changes: float) -> list[str]:
    sampling = Sampling(**{"temperature": 1.0, "top_p": 0.95, **changes}, seeds=tuple(seeds))
    return engine.generate(prompts, Decoding(12, (), sampling), SilentReporter())


def test_sampled_answers_depend_on_their_seed_only(loaded_model: Any, engine: TransformersEngine) -> None:
    prompts = build_prompts()
    seeds = list(range(100, 100 + len(prompts)))
    answers = sample(engine, seeds, prompts)
    assert len(set(answers)) == len(prompts), "equal prompts with different seeds have different answers"
    assert sample(engine, seeds[::-1], prompts[::-1]) == answers[::-1]
    small = TransformersEngine(loaded_model, engine.tokenizer, 64)
    assert sample(small, seeds, prompts) == answers
    assert sample(engine, [seeds[4]], [prompts[4]]) == [answers[4]]
    assert sample(engine, [7, 7, 8], [prompts[2]] * 3) == sample(engine, [7, 7, 8], [prompts[2]] * 3)
    assert sample(engine, [7, 8], [prompts[2]] * 2) != sample(engine, [9, 10], [prompts[2]] * 2)


def test_low_temperature_gives_the_greedy_answers(engine: TransformersEngine, expected: list[str]) -> None:
    assert sample(engine, [5] * len(expected), build_prompts(), temperature=1e-6) == expected


def test_samples_have_the_probabilities_of_the_model() -> None:
    import torch

    logits, draws = torch.tensor([2.0, 1.0, 0.0, -1.0]), 4000
    rows = logits.repeat(draws, 1)
    for temperature, top_p, count in ((1.0, 1.0, 4), (0.5, 1.0, 4), (1.0, 0.8, 2)):
        sampler = answer_generation.SeededSampler(Sampling(temperature, top_p, ()), list(range(draws)))
        shares = torch.bincount(sampler(torch.empty(0), rows).argmax(-1), minlength=4) / draws
        expected = (logits[:count] / temperature).softmax(-1)
        assert shares[:count].tolist() == pytest.approx(expected.tolist(), abs=0.03)
        assert shares[count:].sum() == 0
