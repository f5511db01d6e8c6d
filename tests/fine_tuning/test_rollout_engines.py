"""Continuous batching: its greedy answers equal those of `generate`, and its samples depend on the seed only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, MambaConfig

from components.common.runtime.errors import ConfigurationError, TrainingError
from components.fine_tuning import model_support
from components.fine_tuning.rollout_engines import answer_by_continuous_batching
from tests.fine_tuning.recipes import REQUIRED_SETTINGS, recipe
from tests.model_families import FAMILIES, Family, build_configuration
from tests.tiny import tiny_model

BATCHED = {
    "objective": "grpo",
    "grpo": {**REQUIRED_SETTINGS["grpo"]["grpo"], "rollouts": {"engine": "continuous_batching"}},
}
PROMPTS = [list(range(5, 5 + length)) for length in (7, 12, 40)]
ANSWER_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder).train()


def build_generation(end: int, *, do_sample: bool) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=ANSWER_TOKENS, do_sample=do_sample, eos_token_id=[end], pad_token_id=0)


def generate(model: Any, prompt: list[int], end: int) -> list[int]:
    config = build_generation(end, do_sample=False)
    tokens: list[int] = model.generate(input_ids=torch.tensor([prompt]), generation_config=config)[0].tolist()
    return tokens[len(prompt) :]


def test_greedy_answers_equal_those_of_generate_and_consume_no_random_numbers(model: Any) -> None:
    end = generate(model.eval(), PROMPTS[0], -1)[3]  # ends the first answer
    expected = [generate(model, prompt, end) for prompt in PROMPTS]
    model.train()
    before = torch.random.get_rng_state()
    assert answer_by_continuous_batching(model, PROMPTS, build_generation(end, do_sample=False)) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert len(expected[0]) <= 4
    assert max(map(len, expected)) == ANSWER_TOKENS


def test_sampled_answers_and_later_random_numbers_depend_on_the_seed_only(model: Any) -> None:
    def sample(seed: int) -> tuple[list[list[int]], float]:
        torch.manual_seed(seed)
        answers = answer_by_continuous_batching(model, PROMPTS, build_generation(-1, do_sample=True))
        return answers, float(torch.rand(1))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_failure_of_the_engine_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own call logs the failure and returns fewer answers."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(model), "forward", fail)
    with pytest.raises(TrainingError, match="continuous batching"):
        answer_by_continuous_batching(model, PROMPTS, build_generation(-1, do_sample=False))


def test_model_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path, **BATCHED)
    with pytest.raises(ConfigurationError, match="continuous_batching cannot generate with MambaForCausalLM") as error:
        model_support.check_model(config, MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=64))
    assert error.value.hint == "Set fine_tuning.grpo.rollouts.engine to generate."


UNPAGED_FAMILIES = {"Falcon", "Bloom", "DeepSeek V2", "DeepSeek V3 and R1", "Llama 4 (text)", "StableLM"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_is_refused_or_has_the_answers_of_generate(family: Family) -> None:
    config = build_configuration(family)
    model_class = model_support.find_class(config)
    is_refused = bool(model_support._explain_unpaged_layers(model_class, config))
    assert is_refused == (model_class._is_stateful or family.name in UNPAGED_FAMILIES)
    if not is_refused:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        expected = [generate(model, prompt, -1) for prompt in PROMPTS]
        assert answer_by_continuous_batching(model, PROMPTS, build_generation(-1, do_sample=False)) == expected
