"""The memory that two processes need to load a sharded model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.common import launch
from components.common.artifacts.artifact_folder import Artifact
from components.common.launch import Command, Launcher
from components.common.runtime.reporters import Reporter, SilentReporter
from components.fine_tuning.stage import finetune
from tests.fine_tuning.recipes import recipe
from tests.tiny import tiny_model


def measure_loading(strategy: str, dataset: Artifact, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the peak memory of loading 300 MB of weights, the largest of which has 33 MB, as a share of their size.

    One entry per process. The weights are stored in bfloat16 and loaded in float32, so a process needs memory for them.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")  # freed tensors return to the system at once
    base = tiny_model(folder / "large", head=512)
    weights = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    size = 4 * sum(parameter.numel() for parameter in weights.parameters())
    weights.save_pretrained(base)
    growth = {}

    def run(launcher: Launcher, command: Command, job_folder: Path, reporter: Reporter) -> dict[str, Any]:
        measured = replace(command, module="tests.fine_tuning.loading_memory_worker")
        outcome = launch.run(launcher, measured, job_folder, reporter)
        growth.update({path.name: int(path.read_text()) / size for path in job_folder.glob("growth.*")})
        return outcome

    config = recipe(base, lora={"dropout": 0.0}, processes=2, strategy=strategy, max_steps=1, validation_rows=0)
    finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=SilentReporter(), run=run)
    assert sorted(growth) == ["growth.0", "growth.1"]
    return list(growth.values())
