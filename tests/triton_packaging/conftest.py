"""Tiny models with and without adapters, one proven package and the server that serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from components.triton_packaging.triton_server import Server, running_server
from tests.tiny import tiny_model

MAX_REQUESTS = 24  # concurrent requests of the served model: 16 in the batch and 8 in the queue
PROMPTS = ["What is a list?", "Name the fox.", "Grüße, 你好", "0123456789"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model's folder."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def base_model(tiny_folder: Path) -> LoadableModel:
    """The tiny base model."""
    return model_loading.open_model(tiny_folder)


@pytest.fixture(scope="session")
def adapted_model(base_model: LoadableModel, tmp_path_factory: pytest.TempPathFactory) -> LoadableModel:
    """The tiny model with a random LoRA adapter that changes its answers, as a finished model artifact."""
    return model_loading.open_model_artifact(publish_adapter(base_model, tmp_path_factory.mktemp("adapter") / "model"))


MISSING_DATASET = artifact_folder.ArtifactInput(kind="dataset", content_sha256="d" * 64, uri="store:" + "d" * 64)


def publish_adapter(
    base: LoadableModel,
    folder: Path,
    peft_type: str = "LORA",
    seed: int = 1,
    dataset: artifact_folder.ArtifactInput = MISSING_DATASET,
    **lora: Any,
) -> Artifact:
    """Publish a model artifact with a random adapter on `base`. By default, the recorded dataset does not exist."""
    import torch
    from peft import LoraConfig, PromptEncoderConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = (
            LoraConfig(
                **{
                    "r": 4,
                    "lora_alpha": 16,
                    "target_modules": "all-linear",
                    "init_lora_weights": False,
                    "task_type": "CAUSAL_LM",
                    **lora,
                }
            )
            if peft_type == "LORA"
            else PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM")
        )
        get_peft_model(model_loading.load_model(base), config).save_pretrained(folder)
    model_loading.load_tokenizer(base.tokenizer).save_pretrained(folder)
    return artifact_folder.publish(
        folder, "model", payload=lambda p: bool(model_loading.MODEL_FILE_PATTERN.fullmatch(p)),
        inputs=[base.base.as_input(), dataset], config={}, seed=0, key="k", summary={},
    )  # fmt: skip


@pytest.fixture(scope="session")
def second_adapter(base_model: LoadableModel, tmp_path_factory: pytest.TempPathFactory) -> LoadableModel:
    """The tiny model with another random LoRA adapter."""
    return model_loading.open_model_artifact(
        publish_adapter(base_model, tmp_path_factory.mktemp("other") / "model", seed=2, r=12)
    )


@pytest.fixture(scope="session")
def p_tuning_model(base_model: LoadableModel, tmp_path_factory: pytest.TempPathFactory) -> LoadableModel:
    """The tiny model with a p-tuning adapter of four virtual tokens."""
    return model_loading.open_model_artifact(
        publish_adapter(base_model, tmp_path_factory.mktemp("prompted") / "model", "P_TUNING")
    )


@pytest.fixture
def unproven_config() -> TritonPackagingConfig:
    """A configuration without the proof, which needs a server."""
    return TritonPackagingConfig(prove=False)


@pytest.fixture(scope="session")
def proven_package(adapted_model: LoadableModel, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The adapted tiny model, packaged and proven in a real server."""
    config = TritonPackagingConfig(
        model_name="tiny", golden_prompts=PROMPTS, golden_max_tokens=12, max_tokens=1000, max_queue=MAX_REQUESTS - 16
    )
    return package(
        adapted_model, tmp_path_factory.mktemp("package") / "repository", config, seed=1, reporter=SilentReporter()
    )


@pytest.fixture(scope="session")
def server(proven_package: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Triton server with the proven package."""
    with running_server(
        proven_package.path, models=["tiny", "tiny_stream"], log=tmp_path_factory.mktemp("served") / "triton.log"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def golden_answers(proven_package: Artifact) -> list[dict[str, str]]:
    """The golden prompts and their proven answers."""
    answers: list[dict[str, str]] = json.loads((proven_package.path / "proof.json").read_text(encoding="utf-8"))[
        "answers"
    ]
    return answers
