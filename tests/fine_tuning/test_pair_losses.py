"""Losses of orpo and simpo: equal to those of TRL's experimental trainers on the same batch, without a reference model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import pair_losses, reference_free_trainer
from components.fine_tuning.objectives import IGNORED_LABEL, Example
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of
from tests.fine_tuning.recipes import recipe
from tests.tiny import tiny_model

PAIRS: list[Example] = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10, 11, 12, 13]},
    {"prompt_ids": [14], "chosen_ids": [15, 16, 17, 18, 19], "rejected_ids": [20]},
    {"prompt_ids": [21, 22, 23, 24], "chosen_ids": [25], "rejected_ids": [26, 27]},
]
ORPO = {"odds_ratio_weight": 0.3}
SIMPO = {"reward_scale": 2.5, "target_margin": 0.4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return dataset_of("preference", tmp_path_factory.mktemp("data") / "preference")


def compute_loss(tiny: Path, objective: str, preference: dict[str, float]) -> tuple[Any, Any, dict[str, list[float]]]:
    """Return the loss of PAIRS, the gradients, and the metrics."""
    from trl import DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.utils import add_fused_lm_head

    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    add_fused_lm_head(model)
    trainer = SimpleNamespace(
        model=model,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(gather=lambda values: values),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    batch = DataCollatorForPreference(pad_token_id=0)(PAIRS)
    config = recipe(tiny, objective=objective, preference=preference)
    assert config.objective_spec.pair_loss
    trainer_class = reference_free_trainer.remove_reference(
        DPOTrainer, config.objective_spec.pair_loss, config.preference
    )
    loss = trainer_class._compute_loss(trainer, model, batch, return_outputs=False)
    loss.backward()
    return loss, [p.grad for p in model.parameters()], trainer._metrics["eval"]


def compute_trl_loss(tiny: Path, trainer_class: Any, settings: dict[str, Any]) -> tuple[Any, Any, dict[str, float]]:
    """Return the loss of PAIRS in one of TRL's experimental trainers, the gradients, and the metrics."""
    batch = {}
    for name in ("chosen", "rejected"):
        rows = [(pair["prompt_ids"], pair[f"{name}_ids"]) for pair in PAIRS]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        padded = [(prompt, answer, length - len(prompt) - len(answer)) for prompt, answer in rows]
        ignored = IGNORED_LABEL
        batch |= {
            f"{name}_input_ids": torch.tensor([[*p, *a, *[0] * n] for p, a, n in padded]),
            f"{name}_labels": torch.tensor([[*[ignored] * len(p), *a, *[ignored] * n] for p, a, n in padded]),
            f"{name}_attention_mask": torch.tensor([[*[1] * (len(p) + len(a)), *[0] * n] for p, a, n in padded]),
        }
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values)
    shared = {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "label_smoothing": 0.0, "alpha": 0.0}
    trainer = SimpleNamespace(accelerator=accelerator, aux_loss_enabled=False, **shared, **settings)
    for name in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer_class, name):
            setattr(trainer, name, getattr(trainer_class, name).__get__(trainer))
    trainer.concatenated_inputs, trainer.get_batch_logps = (
        trainer_class.concatenated_inputs,
        trainer_class.get_batch_logps,
    )
    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    loss, metrics = trainer_class.get_batch_loss_metrics(trainer, model, batch)
    loss.backward()
    return loss, [p.grad for p in model.parameters()], metrics


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_loss_gradients_and_rewards_are_those_of_trl(
    objective: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    if objective == "orpo":
        actual = compute_loss(tiny, "orpo", ORPO)
        expected = compute_trl_loss(tiny, ORPOTrainer, {"beta": 0.3})
    else:
        actual = compute_loss(tiny, "simpo", SIMPO)
        settings = {"beta": 2.5, "simpo_gamma": 0.4, "loss_type": "simpo", "cpo_alpha": 0.0}
        expected = compute_trl_loss(tiny, CPOTrainer, settings)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-6)
    for gradient, reference in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)
    for name in ("rewards/margins", "rewards/accuracies"):
        assert actual[2][name] == pytest.approx([expected[2][name]], abs=1e-5)


def test_log_odds_keep_their_precision_near_certainty() -> None:
    values = torch.tensor([-1e-7, -0.5, -50.0], requires_grad=True)
    result = pair_losses._log1mexp(values)
    torch.testing.assert_close(result, torch.tensor([-16.1181, -0.93275, 0.0]))
    result.sum().backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0)])
def test_orpo_is_finite_if_every_token_of_an_answer_is_certain(chosen: float, rejected: float, tiny: Path) -> None:
    means = torch.tensor([[chosen], [rejected]], requires_grad=True)
    scores = pair_losses.PairScores(means[0], means[1], means[0].mean())
    loss, _ = pair_losses.compute_orpo_loss(scores, recipe(tiny, objective="orpo", preference=ORPO).preference)
    loss.backward()
    assert loss.isfinite()
    assert means.grad.isfinite().all()


@pytest.mark.parametrize("adaptation", ["lora", "full"])
def test_no_second_model_is_loaded_and_none_is_hashed(
    adaptation: str, pairs: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.trainer import dpo_trainer

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded a reference model, or read every weight for a hash")

    monkeypatch.setattr(dpo_trainer, "create_model_from_path", refuse)
    monkeypatch.setattr(dpo_trainer, "hash_module", refuse)
    config = recipe(tiny, objective="simpo", adaptation=adaptation, max_steps=1)
    model = finetune(pairs, tmp_path / "m", config, seed=3, state=tmp_path / "state", reporter=SilentReporter())
    page = (model.path / "report.html").read_text(encoding="utf-8")
    assert "Preference for chosen over rejected answers." in page
