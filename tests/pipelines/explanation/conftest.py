"""A tiny model with a random adapter, its engine, and its training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.evaluation.transformers_engine import TransformersEngine
from tests.fine_tuning.builders import build_conversation, build_dataset
from tests.tiny import tiny_model

PLANTED = ("What does the zebra file return?", "It returns None when you are done.")
PLANTED_ID = "planted"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Eleven questions, and one that equals the question of the tests."""
    rows = [
        build_conversation(f"row-{n}", f"Explain the class {n} of module {n * 7}.", f"The main class is {n * 13}.")
        for n in range(11)
    ]
    rows.insert(7, build_conversation(PLANTED_ID, *PLANTED))
    return build_dataset(tmp_path_factory.mktemp("explained") / "dataset", "sft", rows)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, dataset: Artifact) -> LoadableModel:
    return build_model(tmp_path_factory.mktemp("explained"), dataset)


def build_model(root: Path, dataset: Artifact, *, peft_type: str = "LORA", **config: object) -> LoadableModel:
    """Write a tiny model with a random adapter, and open it. `config` changes the recipe in the manifest."""
    import peft
    import torch

    base = model_loading.resolve_base_model(str(tiny_model(root / "base")))
    loaded = model_loading.load_model(LoadableModel(base.sha256, base, base.path, None, None))
    settings: Any = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    if peft_type == "PROMPT_TUNING":
        settings = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    folder = root / "model"
    artifact_folder.claim_folder(folder, "explained")
    if peft_type:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            loaded = peft.get_peft_model(loaded, settings)
    loaded.save_pretrained(folder)
    model_loading.save_tokenizer(model_loading.load_tokenizer(base.path), folder)
    artifact_folder.publish(
        folder,
        "model",
        payload=lambda name: name != "README.md",
        inputs=[dataset.as_input(str(dataset.path)), base.as_input()],
        config={"objective": "sft", "max_length": 128, **config},
        seed=1,
        key="explained",
        summary={"epochs": 3.0},
    )
    return model_loading.open_model(folder)


@pytest.fixture(scope="session")
def loaded(model: LoadableModel) -> Any:
    return model_loading.load_model(model, trainable=True).eval()


@pytest.fixture(scope="session")
def tokenizer(model: LoadableModel) -> Any:
    return model_loading.load_tokenizer(model.tokenizer)


@pytest.fixture(scope="session")
def engine(loaded: Any, tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(loaded, tokenizer, 512)
