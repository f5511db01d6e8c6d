"""Base and tuned model scored with one set of loaded weights, and selection of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import SilentReporter
from components.evaluation import engine_loading, forward_pass
from components.evaluation.task_interface import Decoding, Engine, Likelihood
from tests.evaluation.engine.conftest import assert_likelihoods_close, lora_settings, score_separately
from tests.evaluation.engine.test_likelihoods import build_mixed_requests

ModelFactory = Callable[..., LoadableModel]


def score_with_engines(
    model_with_adapter: LoadableModel, base: LoadableModel | None
) -> list[tuple[LoadableModel, list[Likelihood]]]:
    engines = engine_loading.open_engines(model_with_adapter, base, batch_tokens=256, reporter=SilentReporter())
    return [(model, engine.compute_likelihoods(build_mixed_requests(), SilentReporter())) for model, engine in engines]


def score_with_separate_model(model: LoadableModel) -> list[Likelihood]:
    loaded_model = model_loading.load_model(model)
    return [score_separately(loaded_model, request) for request in build_mixed_requests()]


def prompt_tuning_settings() -> Any:
    import peft

    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)


def p_tuning_settings() -> Any:
    import peft

    return peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16)


def dora_settings() -> Any:
    return lora_settings(use_dora=True)


@pytest.mark.parametrize("settings", [lora_settings, dora_settings, prompt_tuning_settings, p_tuning_settings])
def test_base_and_adapter_score_as_separately_loaded(
    settings: Callable[[], Any], make_tuned_model: ModelFactory, base_model: LoadableModel
) -> None:
    model = make_tuned_model(settings())
    scores = score_with_engines(model, base_model)
    assert [loadable for loadable, _ in scores] == [base_model, model]
    assert_likelihoods_close(scores[0][1], score_with_separate_model(base_model))
    assert_likelihoods_close(scores[1][1], score_with_separate_model(model))
    assert (
        max(
            abs(likelihood.logprob - other.logprob)
            for likelihood, other in zip(scores[0][1], scores[1][1], strict=True)
        )
        > 1
    )


def test_base_weights_are_loaded_once(
    make_tuned_model: ModelFactory, base_model: LoadableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loads = make_tuned_model(lora_settings()), list[LoadableModel]()
    load = model_loading.load_model
    monkeypatch.setattr(
        model_loading, "load_model", lambda model, **options: (loads.append(model), load(model, **options))[1]
    )
    for _, engine in engine_loading.open_engines(model, base_model, batch_tokens=256, reporter=SilentReporter()):
        engine.compute_likelihoods(build_mixed_requests()[:3], SilentReporter())
    assert loads == [base_model]


def test_low_rank_update_is_merged(make_tuned_model: ModelFactory) -> None:
    merged = engine_loading.load_tuned(make_tuned_model(lora_settings()), None, SilentReporter())
    assert not hasattr(merged, "peft_config")


def test_adapter_with_different_results_is_not_merged(
    make_tuned_model: ModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_pass, "is_close", lambda model, first, second: False)
    unmerged = engine_loading.load_tuned(make_tuned_model(lora_settings()), None, SilentReporter())
    assert hasattr(unmerged, "peft_config")


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_adapter_on_tied_embeddings_scores_as_trained(
    make_tuned_model: ModelFactory, base_model: LoadableModel
) -> None:
    """The tiny model ties its head to its embedding: merging an update into one would change the other.

    PEFT warns of this problem when the test makes the adapter.
    """
    import peft

    model = make_tuned_model(
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM")
    )
    ((_, likelihoods),) = score_with_engines(model, None)
    assert_likelihoods_close(likelihoods, score_with_separate_model(model))


def test_adapter_is_not_merged_in_bfloat16(make_tuned_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    load = model_loading.load_model
    monkeypatch.setattr(
        model_loading, "load_model", lambda model, **options: load(model, dtype=torch.bfloat16, **options)
    )
    assert hasattr(engine_loading.load_tuned(make_tuned_model(lora_settings()), None, SilentReporter()), "peft_config")


def test_virtual_tokens_reduce_max_input_tokens(make_tuned_model: ModelFactory, base_model: LoadableModel) -> None:
    engines = engine_loading.open_engines(
        make_tuned_model(prompt_tuning_settings()), base_model, batch_tokens=256, reporter=SilentReporter()
    )
    assert [engine.max_input_tokens for _, engine in engines] == [2048, 2043]


@pytest.mark.parametrize("settings", [lora_settings, prompt_tuning_settings])
def test_answers_with_adapter_equal_those_of_separate_prompts(
    settings: Callable[[], Any], make_tuned_model: ModelFactory, base_model: LoadableModel
) -> None:
    import torch

    model = make_tuned_model(settings())
    prompts = [[5, 9, 11], [40, 41, 42, 43, 44], [5, 9, 11, 12, 13]]
    decoding = Decoding(6)
    (_, _), (_, answers) = [
        (loadable, engine.generate(prompts, decoding, SilentReporter()))
        for loadable, engine in open_engines(model, base_model)
    ]
    loaded_model, tokenizer = model_loading.load_model(model), model_loading.load_tokenizer(model.tokenizer)
    for prompt, text in zip(prompts, answers, strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(decoding.max_new_tokens):
                ids.append(int(loaded_model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == tokenizer.eos_token_id:
                    break
        assert text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)


def open_engines(model_with_adapter: LoadableModel, base: LoadableModel) -> list[tuple[LoadableModel, Engine]] | Any:
    return engine_loading.open_engines(model_with_adapter, base, batch_tokens=256, reporter=SilentReporter())


def test_full_weights_are_loaded_one_at_a_time(base_model: LoadableModel, tmp_path: Any) -> None:
    from tests.tiny import tiny_model

    base = model_loading.resolve_base_model(str(tiny_model(tmp_path / "other", seed=8)))
    other = LoadableModel(base.sha256, base_model.base, base.path, None, None)
    engines = engine_loading.open_engines(other, base_model, batch_tokens=256, reporter=SilentReporter())
    _, first = next(engines)
    first_scores = first.compute_likelihoods(build_mixed_requests()[:5], SilentReporter())
    _, second = next(engines)
    assert first._model is None  # type: ignore[attr-defined]
    assert_likelihoods_close(
        first_scores,
        [score_separately(model_loading.load_model(base_model), request) for request in build_mixed_requests()[:5]],
    )
    assert_likelihoods_close(
        second.compute_likelihoods(build_mixed_requests()[:5], SilentReporter()),
        [score_separately(model_loading.load_model(other), request) for request in build_mixed_requests()[:5]],
    )


def test_missing_vllm_is_refused_with_hint(base_model: LoadableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissingError, match="vLLM is not installed") as raised:
        engine_loading.resolve_engine("vllm", base_model)
    assert "evaluation.engine to transformers" in raised.value.hint
    assert engine_loading.resolve_engine("auto", base_model) == "transformers"


def test_auto_selects_vllm_on_gpu_for_supported_models(
    make_tuned_model: ModelFactory, base_model: LoadableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [
        make_tuned_model(lora_settings()),
        make_tuned_model(dora_settings()),
        make_tuned_model(prompt_tuning_settings()),
    ]
    monkeypatch.setattr(engine_loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engine_loading.compute_devices, "select_device", lambda: "cpu")
    assert engine_loading.resolve_engine("auto", base_model) == "transformers"
    monkeypatch.setattr(engine_loading.compute_devices, "select_device", lambda: "cuda")
    assert engine_loading.resolve_engine("auto", base_model) == "vllm"
    assert engine_loading.resolve_engine("transformers", base_model) == "transformers"
    assert [engine_loading.resolve_engine("auto", model) for model in candidates] == ["vllm", "vllm", "transformers"]
    with pytest.raises(EngineMissingError, match="does not support the virtual tokens"):
        engine_loading.resolve_engine("vllm", candidates[2])
