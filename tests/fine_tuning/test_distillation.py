"""Distillation on the tiny model. In the fast tier, because each training takes a second."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError
from components.fine_tuning import distillation, model_support, other_models
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.fine_tuning.recipes import recipe
from tests.fine_tuning.test_recipes import interrupt_at_step_four
from tests.note_recorder import NoteRecorder
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="module")
def teacher(dataset: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model that was tuned on the dataset."""
    folder = tmp_path_factory.mktemp("teacher")
    base = tiny_model(folder / "base", seed=1, head=32)
    config = recipe(base, adaptation="full", max_steps=60, checkpoint_every=60, batch_size=8)
    return finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=NoteRecorder()).path


def tune(dataset: Artifact, tiny: Path, folder: Path, teacher: Path, **changes: Any) -> tuple[Artifact, list[str]]:
    reporter = NoteRecorder()
    settings = {"teacher": str(teacher), "max_answer_tokens": 16, **changes.pop("distillation", {})}
    config = recipe(tiny, objective="distill", distillation=settings, **changes)
    model = finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=reporter)
    return model, reporter.notes


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_model_approaches_its_teacher(
    beta: float, dataset: Artifact, tiny: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    options: dict[str, Any] = {"adaptation": "full", "max_steps": 60, "checkpoint_every": 60, "batch_size": 8}
    model, notes = tune(dataset, tiny, tmp_path, teacher, distillation={"beta": beta}, **options)
    summary = model.manifest.summary
    assert summary["validation_loss"] < 0.8 * summary["validation_loss_before"]
    assert "objective distill trains on the prompts of the last answers" in notes
    source = model.manifest.find_input(distillation.TEACHER_INPUT)
    assert source is not None
    assert source.content_sha256 == model_loading.resolve_base_model(str(teacher)).sha256
    assert model.manifest.config["distillation"]["teacher_sha256"] == source.content_sha256
    samples = [json.loads(line) for line in (model.path / "samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in samples} == {0, 60}
    page = (model.path / "report.html").read_text()
    assert "Divergence of the model from the teacher" in page
    assert "Preference" not in page


def test_interrupted_training_resumes_bit_identically(
    dataset: Artifact, tiny: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    expected, _ = tune(dataset, tiny, tmp_path / "whole", teacher)
    interrupt_at_step_four(lambda: tune(dataset, tiny, tmp_path / "resumed", teacher))
    resumed, _ = tune(dataset, tiny, tmp_path / "resumed", teacher)
    assert (resumed.sha256, resumed.manifest.summary["resumed_from"]) == (expected.sha256, 4)


def test_distillation_in_bfloat16_trains(dataset: Artifact, tiny: Path, teacher: Path, tmp_path: Path) -> None:
    model, _ = tune(dataset, tiny, tmp_path, teacher, precision="bfloat16", max_steps=2, checkpoint_every=2)
    assert model.manifest.summary["steps"] == 2


def test_teacher_with_other_tokens_is_refused_before_training(
    dataset: Artifact, tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    other = tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = recipe(tiny, objective="distill", distillation={"teacher": str(other)})
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.distillation\.teacher: .* has other tokens than"):
        distillation.resolve_teacher(config, tiny, NoteRecorder())
    missing = recipe(tiny, objective="distill", distillation={"teacher": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigurationError, match=r"fine_tuning\.distillation\.teacher: .* is not a folder"):
        distillation.resolve_teacher(missing, tiny, NoteRecorder())
    pinned = {"teacher": str(teacher), "teacher_sha256": "0" * 64}
    with pytest.raises(ArtifactDamagedError, match="expected 000000000000"):
        distillation.resolve_teacher(recipe(tiny, objective="distill", distillation=pinned), tiny, NoteRecorder())


def test_teacher_at_an_endpoint_is_refused_and_synthesize_is_named(tiny: Path) -> None:
    with pytest.raises(
        ValidationError, match=r"teacher is a URL.*tuneline synthesize --template answer@1.*objective sft"
    ):
        recipe(tiny, objective="distill", distillation={"teacher": "https://teacher.example/v1"})


def test_adapter_of_the_output_layer_is_refused(tiny: Path, teacher: Path) -> None:
    model_config = model_loading.load_configuration(tiny)
    for modules, is_refused in ((["q_proj"], False), (["q_proj", "lm_head"], True)):
        options = {
            "objective": "distill",
            "distillation": {"teacher": str(teacher)},
            "lora": {"target_modules": modules},
        }
        with (
            pytest.raises(ConfigurationError, match="cannot train an adapter of the output layer")
            if is_refused
            else nullcontext()
        ):
            model_support.check_model(recipe(tiny, **options), model_config)


def test_memory_of_the_teacher_is_counted(tiny: Path, teacher: Path) -> None:
    config = recipe(tiny, objective="distill", distillation={"teacher": str(teacher)})
    model = model_loading.load_configuration(teacher)
    assert other_models.count_parameters(config) > model.vocab_size * model.hidden_size
    assert other_models.count_parameters(recipe(tiny)) == 0
