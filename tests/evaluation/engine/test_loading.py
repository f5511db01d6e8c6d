"""A tuned model and its base, asked on the same loaded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from components.common import models
from components.common.errors import EngineMissingError
from components.common.models import Model
from components.common.progress import Silent
from components.evaluation import loading, passes
from components.evaluation.task import Decoding, Engine, Likelihood
from tests.evaluation.engine.conftest import agree, alone, lora
from tests.evaluation.engine.test_likelihoods import mixed

Tuned = Callable[..., Model]


def asked_of(tuned: Model, base: Model | None) -> list[tuple[Model, list[Likelihood]]]:
    opened = loading.engines(tuned, base, batch_tokens=256, reporter=Silent())
    return [(model, engine.likelihoods(mixed(), Silent())) for model, engine in opened]


def plainly(model: Model) -> list[Likelihood]:
    loaded = models.load(model)
    return [alone(loaded, one) for one in mixed()]


def prompt_tuning() -> Any:
    import peft

    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)


def p_tuning() -> Any:
    import peft

    return peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16)


def dora() -> Any:
    return lora(use_dora=True)


@pytest.mark.parametrize("settings", [lora, dora, prompt_tuning, p_tuning])
def test_a_base_and_its_adapter_score_as_each_does_alone(settings: Callable[[], Any], tuned: Tuned, tiny: Model) -> None:
    model = tuned(settings())
    found = asked_of(model, tiny)
    assert [one for one, _ in found] == [tiny, model]
    agree(found[0][1], plainly(tiny))
    agree(found[1][1], plainly(model))
    assert max(abs(one.logprob - other.logprob) for one, other in zip(found[0][1], found[1][1], strict=True)) > 1


def test_the_weights_are_loaded_once_for_both(tuned: Tuned, tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loads = tuned(lora()), list[Model]()
    load = models.load
    monkeypatch.setattr(models, "load", lambda model, **options: (loads.append(model), load(model, **options))[1])
    for _, engine in loading.engines(model, tiny, batch_tokens=256, reporter=Silent()):
        engine.likelihoods(mixed()[:3], Silent())
    assert loads == [tiny]


def test_a_low_rank_update_is_added_to_the_weights(tuned: Tuned) -> None:
    added = loading.switched_on(tuned(lora()), None, Silent())
    assert not hasattr(added, "peft_config")


def test_an_adapter_that_cannot_be_added_stays_beside_the_weights(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "same", lambda model, one, other: False)
    kept = loading.switched_on(tuned(lora()), None, Silent())
    assert hasattr(kept, "peft_config")


def test_tied_embeddings_that_an_adapter_changes_are_scored_as_they_are_trained(tuned: Tuned, tiny: Model) -> None:
    """The tiny model's head is its embedding: adding the update to one of them would change the other."""
    import peft

    model = tuned(peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM"))
    ((_, found),) = asked_of(model, None)
    agree(found, plainly(model))


def test_in_bfloat16_an_adapter_stays_beside_the_weights(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    load = models.load
    monkeypatch.setattr(models, "load", lambda model, **options: load(model, dtype=torch.bfloat16, **options))
    assert hasattr(loading.switched_on(tuned(lora()), None, Silent()), "peft_config")


def test_virtual_tokens_take_their_part_of_the_room(tuned: Tuned, tiny: Model) -> None:
    opened = loading.engines(tuned(prompt_tuning()), tiny, batch_tokens=256, reporter=Silent())
    assert [engine.room for _, engine in opened] == [2048, 2043]


@pytest.mark.parametrize("settings", [lora, prompt_tuning])
def test_answers_with_an_adapter_are_those_of_each_prompt_alone(settings: Callable[[], Any], tuned: Tuned, tiny: Model) -> None:
    import torch

    model = tuned(settings())
    prompts = [[5, 9, 11], [40, 41, 42, 43, 44], [5, 9, 11, 12, 13]]
    decoding = Decoding(6)
    (_, _), (_, found) = [(one, engine.answers(prompts, decoding, Silent())) for one, engine in opened_of(model, tiny)]
    loaded, tokenizer = models.load(model), models.load_tokenizer(model.tokenizer)
    for prompt, text in zip(prompts, found, strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(decoding.max_new_tokens):
                ids.append(int(loaded(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == tokenizer.eos_token_id:
                    break
        assert text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)


def opened_of(tuned: Model, base: Model) -> list[tuple[Model, Engine]] | Any:
    return loading.engines(tuned, base, batch_tokens=256, reporter=Silent())


def test_whole_weights_are_loaded_one_after_the_other(tiny: Model, tmp_path: Any) -> None:
    from tests.tiny import tiny_model

    base = models.base_model(str(tiny_model(tmp_path / "other", seed=8)))
    other = Model(base.sha256, tiny.base, base.path, None, None)
    opened = loading.engines(other, tiny, batch_tokens=256, reporter=Silent())
    _, first = next(opened)
    kept = first.likelihoods(mixed()[:5], Silent())
    _, second = next(opened)
    assert first._model is None  # type: ignore[attr-defined]
    agree(kept, [alone(models.load(tiny), one) for one in mixed()[:5]])
    agree(second.likelihoods(mixed()[:5], Silent()), [alone(models.load(other), one) for one in mixed()[:5]])


def test_vllm_named_where_it_is_missing_is_an_error_that_says_what_to_do(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissingError, match="vLLM is not installed") as raised:
        loading.kind("vllm", tiny)
    assert "engine: transformers" in raised.value.hint
    assert loading.kind("auto", tiny) == "transformers"


def test_auto_takes_vllm_only_on_a_gpu_and_for_what_it_serves(tuned: Tuned, tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    models_served = [tuned(lora()), tuned(dora()), tuned(prompt_tuning())]
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(loading.devices, "choose", lambda: "cpu")
    assert loading.kind("auto", tiny) == "transformers"
    monkeypatch.setattr(loading.devices, "choose", lambda: "cuda")
    assert loading.kind("auto", tiny) == "vllm"
    assert loading.kind("transformers", tiny) == "transformers"
    assert [loading.kind("auto", model) for model in models_served] == ["vllm", "vllm", "transformers"]
    with pytest.raises(EngineMissingError, match="takes no virtual tokens"):
        loading.kind("vllm", models_served[2])
