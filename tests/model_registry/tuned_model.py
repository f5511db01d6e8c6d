"""A tiny tuned model that loads and generates, with its evaluation and its package."""

from __future__ import annotations

from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from tests.model_registry.conftest import CustomizationArtifacts
from tests.model_registry.evidence_builder import build_dataset, build_evaluation, build_package
from tests.tiny import tiny_model


def build_tuned_model(root: Path, *, merged: bool = False) -> CustomizationArtifacts:
    """A tiny Llama with a random adapter, or with the adapter merged into its weights, its evaluation and its package."""
    import peft
    import torch

    base = model_loading.resolve_base_model(str(tiny_model(root / "base")))
    loaded = model_loading.load_model(model_loading.LoadableModel(base.sha256, base, base.path, None, None))
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(loaded, settings)
    folder = root / "model"
    artifact_folder.claim_folder(folder, "tuned")
    (adapted.merge_and_unload() if merged else adapted).save_pretrained(folder)
    model_loading.save_tokenizer(model_loading.load_tokenizer(base.path), folder)
    dataset = build_dataset(root / "dataset")
    model = artifact_folder.publish(
        folder,
        "model",
        payload=lambda name: name != "README.md",
        inputs=[dataset.as_input(), base.as_input()],
        config={"base_model": "tiny", "learning_rate": 1e-4},
        seed=1,
        key="tuned",
        summary={"steps": 3},
    )
    evaluation = build_evaluation(root / "evaluation", model.manifest, dataset)
    return CustomizationArtifacts(model, evaluation, build_package(root / "repository", model))
