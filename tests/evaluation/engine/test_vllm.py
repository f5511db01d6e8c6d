"""The vLLM engine against a stand-in of vLLM's LLM class, which answers from a transformers model. Real vLLM is not tested here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from components.common import models
from components.common.models import Model
from components.common.progress import Silent
from components.evaluation import loading, vllm_engine
from components.evaluation.task import Decoding
from tests.evaluation.engine.conftest import agree, lora
from tests.evaluation.engine.test_likelihoods import mixed


class LLM:
    """What is used of vllm.LLM, one prompt at a time."""

    made: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, **settings: Any) -> None:
        LLM.made.append(settings)
        self._folder = Path(settings["model"])
        self._tokenizer = models.load_tokenizer(Path(settings["tokenizer"]))

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        adapter = Path(lora_request.path) if lora_request else None
        base = models.base_model(str(self._folder))
        model = models.load(Model(base.sha256, base, base.path, adapter, None))
        return [self._one(model, prompt["prompt_token_ids"], sampling) for prompt in prompts]

    def _one(self, model: Any, ids: list[int], sampling: Any) -> Any:
        import torch

        with torch.inference_mode():
            scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            known = [None, *(self._entry(scores[place - 1], ids[place]) for place in range(1, len(ids)))]
            new = list(ids)
            for _ in range(sampling.max_tokens):
                new.append(int(model(input_ids=torch.tensor([new])).logits[0, -1].argmax()))
                if new[-1] == self._tokenizer.eos_token_id:
                    break
        text = self._tokenizer.decode(new[len(ids) :], skip_special_tokens=True)
        stops = [text.index(stop) for stop in sampling.stop if stop in text]
        return SimpleNamespace(prompt_logprobs=known, outputs=[SimpleNamespace(text=text[: min(stops, default=len(text))])])

    def _entry(self, scores: Any, token: int) -> dict[int, Any]:
        best = int(scores.argmax())
        rank = int((scores > scores[token]).sum()) + 1
        entries = {best: SimpleNamespace(logprob=float(scores[best]), rank=1)}
        return {**entries, token: SimpleNamespace(logprob=float(scores[token]), rank=rank)}


def sampling_params(**settings: Any) -> Any:
    return SimpleNamespace(**{"stop": [], **settings})


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, requests = ModuleType("vllm"), ModuleType("vllm.lora.request")
    vllm.LLM, vllm.SamplingParams = LLM, sampling_params  # type: ignore[attr-defined]
    requests.LoRARequest = lambda name, number, path: SimpleNamespace(path=path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", requests)
    monkeypatch.setattr(loading, "kind", lambda engine, model: engine)
    LLM.made.clear()


def test_scores_and_answers_are_those_of_the_transformers_engine(tuned: Callable[..., Model], tiny: Model) -> None:
    model, asked = tuned(lora()), [*mixed()[:30], mixed()[4]]
    prompts, decoding = [[5, 6, 7], [9, 9], [5, 6, 7]], Decoding(5, ("e",))
    found: dict[str, list[Any]] = {}
    for name in ("transformers", "vllm"):
        opened = loading.engines(model, tiny, batch_tokens=256, reporter=Silent(), engine=name)  # type: ignore[arg-type]
        found[name] = [
            (one.sha256, engine.likelihoods(asked, Silent()), engine.answers(prompts, decoding, Silent())) for one, engine in opened
        ]
    assert [one[0] for one in found["vllm"]] == [tiny.sha256, model.sha256]
    for ours, theirs in zip(found["transformers"], found["vllm"], strict=True):
        agree(theirs[1], ours[1])
        assert theirs[2] == ours[2]


def test_an_adapter_and_its_base_share_one_loaded_model(tuned: Callable[..., Model], tiny: Model) -> None:
    opened = list(vllm_engine.engines(tuned(lora()), tiny, models.load_tokenizer(tiny.weights), Silent()))
    assert len(opened) == 2
    (settings,) = LLM.made
    assert settings["enable_lora"]
    assert settings["max_lora_rank"] == 8
    assert settings["trust_remote_code"] is False


def test_one_token_of_the_room_is_vllm_s_own(tiny: Model) -> None:
    ((_, engine),) = vllm_engine.engines(tiny, None, models.load_tokenizer(tiny.weights), Silent())
    assert engine.room == 2047
