"""The tiny model, a tuned one on top of it, and the plainest scoring there is, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from components.common import models
from components.common.models import Model
from components.evaluation.engine import TransformersEngine
from components.evaluation.task import Continuation, Likelihood
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    base = models.base_model(str(tiny_model(tmp_path_factory.mktemp("engine") / "tiny", seed=3)))
    return Model(base.sha256, base, base.path, None, None)


@pytest.fixture(scope="session")
def loaded(tiny: Model) -> Any:
    return models.load(tiny)


@pytest.fixture(scope="session")
def engine(tiny: Model, loaded: Any) -> TransformersEngine:
    return TransformersEngine(loaded, models.load_tokenizer(tiny.weights), 256)


@pytest.fixture(scope="session")
def tuned(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """A model with an adapter of PEFT's settings on the tiny one; what begins as zeros is random."""

    def make(settings: Any) -> Model:
        import peft
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            adapted = peft.get_peft_model(models.load(tiny), settings)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        folder: Path = tmp_path_factory.mktemp("adapter")
        adapted.save_pretrained(folder)
        return Model("a" * 64, tiny.base, tiny.weights, folder, None)

    return make


def lora(**changes: Any) -> Any:
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **changes)


def alone(model: Any, asked: Continuation) -> Likelihood:
    """One sequence in a pass of its own, all logits of it."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(asked.ids)]), use_cache=False).logits[0, -len(asked.ids) :].double()
    logprobs, total, tokens, greedy = logits.log_softmax(-1), 0.0, 0, True
    for place in range(1, len(asked.ids)):
        if asked.counted[place]:
            total += float(logprobs[place - 1, asked.ids[place]])
            tokens += 1
            greedy &= int(logits[place - 1].argmax()) == asked.ids[place]
    return Likelihood(total, tokens, greedy)


def agree(found: Sequence[Likelihood], expected: Sequence[Likelihood], tolerance: float = 1e-4) -> None:
    """Equal counts and choices, and log-likelihoods within so many nats a token."""
    assert [(one.tokens, one.greedy) for one in found] == [(one.tokens, one.greedy) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert abs(one.logprob - other.logprob) <= tolerance * max(1, other.tokens)
