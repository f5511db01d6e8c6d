"""Fixtures of the engine tests: the tiny model, tuned models on it, and reference scores without batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.evaluation.task_interface import Continuation, Likelihood
from components.evaluation.transformers_engine import TransformersEngine
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> LoadableModel:
    base = model_loading.resolve_base_model(str(tiny_model(tmp_path_factory.mktemp("engine") / "tiny", seed=3)))
    return LoadableModel(base.sha256, base, base.path, None, None)


@pytest.fixture(scope="session")
def loaded_model(base_model: LoadableModel) -> Any:
    return model_loading.load_model(base_model)


@pytest.fixture(scope="session")
def engine(base_model: LoadableModel, loaded_model: Any) -> TransformersEngine:
    return TransformersEngine(loaded_model, model_loading.load_tokenizer(base_model.weights), 256)


@pytest.fixture(scope="session")
def make_tuned_model(
    base_model: LoadableModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., LoadableModel]:
    """Return a factory of tiny models with an adapter; weights that PEFT initializes to zero are random."""

    def make(settings: Any) -> LoadableModel:
        import peft
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            adapted = peft.get_peft_model(model_loading.load_model(base_model), settings)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        folder: Path = tmp_path_factory.mktemp("adapter")
        adapted.save_pretrained(folder)
        return LoadableModel("a" * 64, base_model.base, base_model.weights, folder, None)

    return make


def lora_settings(**changes: Any) -> Any:
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **changes)


def score_separately(model: Any, request: Continuation) -> Likelihood:
    """Score one sequence in a separate forward pass."""
    import torch

    with torch.inference_mode():
        logits = (
            model(input_ids=torch.tensor([list(request.ids)]), use_cache=False).logits[0, -len(request.ids) :].double()
        )
    logprobs, total, tokens, greedy = logits.log_softmax(-1), 0.0, 0, True
    for position in range(1, len(request.ids)):
        if request.scored[position]:
            total += float(logprobs[position - 1, request.ids[position]])
            tokens += 1
            greedy &= int(logits[position - 1].argmax()) == request.ids[position]
    return Likelihood(total, tokens, greedy)


def assert_likelihoods_close(
    actual: Sequence[Likelihood], expected: Sequence[Likelihood], tolerance: float = 1e-4
) -> None:
    """Assert equal token counts and greedy flags, and log-likelihoods within `tolerance` nats per token."""
    assert [(likelihood.tokens, likelihood.greedy) for likelihood in actual] == [
        (likelihood.tokens, likelihood.greedy) for likelihood in expected
    ]
    for likelihood, reference in zip(actual, expected, strict=True):
        assert abs(likelihood.logprob - reference.logprob) <= tolerance * max(1, reference.tokens)
