"""The vLLM engine with a fake of vLLM's LLM class, backed by a transformers model; vLLM itself is not tested."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import SilentReporter
from components.evaluation import engine_loading, vllm_engine
from components.evaluation.task_interface import Decoding, Sampling
from tests.evaluation.engine.conftest import assert_likelihoods_close, lora_settings
from tests.evaluation.engine.test_likelihoods import build_mixed_requests


class FakeLLM:
    """The used part of vllm.LLM, one prompt at a time."""

    instances: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, **settings: Any) -> None:
        FakeLLM.instances.append(settings)
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=settings["dtype"]).eval()
        self._tokenizer = model_loading.load_tokenizer(Path(settings["tokenizer"]))

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        if isinstance(sampling, list):
            assert len(sampling) == len(prompts)
            answers = [
                f"{one.seed} {one.temperature} {one.top_p} {p['prompt_token_ids']}"
                for one, p in zip(sampling, prompts, strict=True)
            ]
            return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in answers]
        return [self._generate_one(self._model, prompt["prompt_token_ids"], sampling) for prompt in prompts]

    def _generate_one(self, model: Any, ids: list[int], sampling: Any) -> Any:
        import torch

        with torch.inference_mode():
            scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            prompt_logprobs = [
                None,
                *(self._entry(scores[position - 1], ids[position]) for position in range(1, len(ids))),
            ]
            generated = list(ids)
            for _ in range(sampling.max_tokens):
                generated.append(int(model(input_ids=torch.tensor([generated])).logits[0, -1].argmax()))
                if generated[-1] == self._tokenizer.eos_token_id:
                    break
        text = self._tokenizer.decode(generated[len(ids) :], skip_special_tokens=True)
        stops = [text.index(stop) for stop in sampling.stop if stop in text]
        return SimpleNamespace(
            prompt_logprobs=prompt_logprobs, outputs=[SimpleNamespace(text=text[: min(stops, default=len(text))])]
        )

    def _entry(self, scores: Any, token: int) -> dict[int, Any]:
        best = int(scores.argmax())
        rank = int((scores > scores[token]).sum()) + 1
        entries = {best: SimpleNamespace(logprob=float(scores[best]), rank=1)}
        return {**entries, token: SimpleNamespace(logprob=float(scores[token]), rank=rank)}


def build_sampling_params(**settings: Any) -> Any:
    return SimpleNamespace(**{"stop": [], **settings})


@pytest.fixture(autouse=True)
def install_fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = FakeLLM, build_sampling_params  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    monkeypatch.setattr(engine_loading, "resolve_engine", lambda engine, model: engine)
    FakeLLM.instances.clear()


def test_vllm_matches_transformers_engine(
    make_tuned_model: Callable[..., LoadableModel], base_model: LoadableModel
) -> None:
    model, requests = make_tuned_model(lora_settings()), [*build_mixed_requests()[:30], build_mixed_requests()[4]]
    prompts, decoding = [[5, 6, 7], [9, 9], [5, 6, 7]], Decoding(5, ("e",))
    results: dict[str, list[Any]] = {}
    for name in ("transformers", "vllm"):
        engines = engine_loading.open_engines(
            model,
            base_model,
            batch_tokens=256,
            reporter=SilentReporter(),
            engine=name,  # type: ignore[arg-type]
        )
        results[name] = [
            (
                loadable.sha256,
                engine.compute_likelihoods(requests, SilentReporter()),
                engine.generate(prompts, decoding, SilentReporter()),
            )
            for loadable, engine in engines
        ]
    assert [result[0] for result in results["vllm"]] == [base_model.sha256, model.sha256]
    assert os.environ["VLLM_CPU_INT4_W4A8"] == "0", "vLLM would round the inputs of 4-bit layers on a CPU"
    for ours, theirs in zip(results["transformers"], results["vllm"], strict=True):
        assert_likelihoods_close(theirs[1], ours[1])
        assert theirs[2] == ours[2]


def test_every_sample_has_its_own_seed(base_model: LoadableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "REQUESTS_PER_CALL", 2)
    tokenizer = model_loading.load_tokenizer(base_model.weights)
    engines = vllm_engine.open_engines(base_model, None, tokenizer, SilentReporter())
    _, engine = next(engines)
    decoding = Decoding(5, (), Sampling(0.7, 0.9, (3, 4, 3, 5)))
    answers = engine.generate([[5, 6], [5, 6], [9], [7]], decoding, SilentReporter())
    assert answers == ["3 0.7 0.9 [5, 6]", "4 0.7 0.9 [5, 6]", "3 0.7 0.9 [9]", "5 0.7 0.9 [7]"]


def test_merged_weights_are_temporary(
    make_tuned_model: Callable[..., LoadableModel], base_model: LoadableModel
) -> None:
    assert (
        len(
            list(
                vllm_engine.open_engines(
                    make_tuned_model(lora_settings()),
                    base_model,
                    model_loading.load_tokenizer(base_model.weights),
                    SilentReporter(),
                )
            )
        )
        == 2
    )
    assert [settings["model"] == str(base_model.weights) for settings in FakeLLM.instances] == [True, False]
    assert not Path(FakeLLM.instances[1]["model"]).exists()
    assert all(
        (settings["trust_remote_code"], settings["dtype"]) == (False, "float32") for settings in FakeLLM.instances
    )


def test_format_that_vllm_refuses_in_float32_is_evaluated_in_bfloat16(base_model: LoadableModel) -> None:
    tokenizer = model_loading.load_tokenizer(base_model.weights)
    engines = vllm_engine.open_engines(
        base_model, None, tokenizer, SilentReporter(), quantization="int4-gptq", calibrated=base_model.weights
    )
    assert len(list(engines)) == 1
    assert [settings["dtype"] for settings in FakeLLM.instances] == ["bfloat16"]


def test_vllm_reserves_one_input_token(base_model: LoadableModel) -> None:
    ((_, engine),) = vllm_engine.open_engines(
        base_model, None, model_loading.load_tokenizer(base_model.weights), SilentReporter()
    )
    assert engine.max_input_tokens == 2047
