"""Models to package, small and real, and one package proven for the whole module of tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, models
from components.common.artifacts import Artifact
from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.server import Server, running_server
from components.triton_packaging.stage import package
from tests.tiny import tiny_model

CAPACITY = 24  # requests the served model takes: 16 computed together and 8 waiting
PROMPTS = ["What is a list?", "Name the fox.", "Grüße, 你好", "0123456789"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model's folder."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_base(tiny_folder: Path) -> Model:
    """The tiny base model."""
    return models.open_model(tiny_folder)


@pytest.fixture(scope="session")
def tiny_adapted(tiny_base: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model with a random LoRA adapter that changes its answers, as a finished model artifact."""
    return models.from_artifact(publish_adapter(tiny_base, tmp_path_factory.mktemp("adapter") / "model"))


def publish_adapter(base: Model, folder: Path, peft_type: str = "LORA", seed: int = 1, **lora: Any) -> Artifact:
    """A model artifact with a random adapter on `base`, made from a dataset that only exists by name."""
    import torch
    from peft import LoraConfig, PromptEncoderConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = (
            LoraConfig(
                **{"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM", **lora}
            )
            if peft_type == "LORA"
            else PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM")
        )
        get_peft_model(models.load(base), config).save_pretrained(folder)
    models.load_tokenizer(base.tokenizer).save_pretrained(folder)
    dataset = artifacts.Input(kind="dataset", content_sha256="d" * 64, uri="store:" + "d" * 64)
    return artifacts.publish(
        folder, "model", payload=lambda p: bool(models.MODEL_FILES.fullmatch(p)),
        inputs=[base.base.as_input(), dataset], config={}, seed=0, key="k", summary={},
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_other(tiny_base: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Another random LoRA adapter over the same tiny model."""
    return models.from_artifact(publish_adapter(tiny_base, tmp_path_factory.mktemp("other") / "model", seed=2, r=12))


@pytest.fixture(scope="session")
def tiny_prompted(tiny_base: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model with four virtual tokens before every prompt (p-tuning)."""
    return models.from_artifact(publish_adapter(tiny_base, tmp_path_factory.mktemp("prompted") / "model", "P_TUNING"))


@pytest.fixture
def quick() -> TritonPackagingConfig:
    """A configuration that needs no server."""
    return TritonPackagingConfig(prove=False)


@pytest.fixture(scope="session")
def proven(tiny_adapted: Model, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The adapted tiny model, packaged and proven in a real server."""
    config = TritonPackagingConfig(
        model_name="tiny", golden_prompts=PROMPTS, golden_max_tokens=12, max_tokens=1000, max_queue=CAPACITY - 16
    )
    return package(tiny_adapted, tmp_path_factory.mktemp("package") / "repository", config, seed=1, reporter=Silent())


@pytest.fixture(scope="session")
def served(proven: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server with the proven package."""
    with running_server(proven.path, models=["tiny", "tiny_stream"], log=tmp_path_factory.mktemp("served") / "triton.log") as server:
        yield server


@pytest.fixture(scope="session")
def golden(proven: Artifact) -> list[dict[str, str]]:
    """The golden prompts and their proven answers."""
    answers: list[dict[str, str]] = json.loads((proven.path / "proof.json").read_text(encoding="utf-8"))["answers"]
    return answers
