"""The vLLM engine against a stand-in of vLLM's LLM class, which answers from a transformers model. Real vLLM is not tested here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

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
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=settings["dtype"]).eval()
        self._tokenizer = models.load_tokenizer(Path(settings["tokenizer"]))

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        return [self._one(self._model, prompt["prompt_token_ids"], sampling) for prompt in prompts]

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
    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, sampling_params  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
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


def test_an_adapter_is_added_to_weights_that_are_gone_once_they_are_loaded(tuned: Callable[..., Model], tiny: Model) -> None:
    assert len(list(vllm_engine.engines(tuned(lora()), tiny, models.load_tokenizer(tiny.weights), Silent()))) == 2
    assert [settings["model"] == str(tiny.weights) for settings in LLM.made] == [True, False]
    assert not Path(LLM.made[1]["model"]).exists()
    assert all((settings["trust_remote_code"], settings["dtype"]) == (False, "float32") for settings in LLM.made)


def test_one_token_of_the_room_is_vllm_s_own(tiny: Model) -> None:
    ((_, engine),) = vllm_engine.engines(tiny, None, models.load_tokenizer(tiny.weights), Silent())
    assert engine.room == 2047
