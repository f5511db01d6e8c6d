"""Long rows: scaled rotary positions are trained, published and loaded, and refused where a model cannot have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import compute_devices, model_loading
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import checkpoints, recipe_defaults
from components.fine_tuning.context_extension import extend_context
from components.fine_tuning.model_support import check_model
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.fine_tuning.recipes import recipe
from tests.fine_tuning.test_recipes import compute_validation_loss
from tests.model_families import FAMILIES, Family, build_configuration
from tests.tiny import tiny_model

YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "sft")


def tune(dataset: Artifact, tiny: Path, folder: Path, **changes: Any) -> Artifact:
    config = recipe(tiny, **changes)
    return finetune(dataset, folder / "model", config, seed=3, state=folder / "state", reporter=SilentReporter())


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
@pytest.mark.parametrize("adaptation", [{"adaptation": "full"}, {"merge": True}], ids=["full", "merged lora"])
def test_scaled_positions_are_published_and_loaded(
    scaling: str, adaptation: dict[str, Any], dataset: Artifact, tiny: Path, tmp_path: Path
) -> None:
    settings = {"rope_scaling": {"type": scaling, "factor": 4.0}, "validation_rows": 4, **adaptation}
    model = tune(dataset, tiny, tmp_path, **settings)
    published = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    parameters = published["rope_parameters"]
    assert published["max_position_embeddings"] == 8192
    assert (parameters["rope_type"], parameters["factor"]) == (scaling, 4.0)
    assert parameters["original_max_position_embeddings"] == 2048
    loaded = model_loading.load_model(model_loading.open_model(model.path))
    loss = model.manifest.summary["validation_loss"]
    assert compute_validation_loss(loaded, dataset, tiny) == pytest.approx(loss, abs=1e-4)


def test_scaling_changes_the_training_which_resumes_bit_identically(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    expected = tune(dataset, tiny, tmp_path / "whole", adaptation="full", **YARN)
    unscaled = tune(dataset, tiny, tmp_path / "unscaled", adaptation="full").manifest.summary
    assert expected.manifest.summary["train_loss"] != pytest.approx(unscaled["train_loss"], abs=1e-4)
    rotate = checkpoints.rotate

    def interrupt(folder: Path, keep: int) -> None:
        rotate(folder, keep)
        if (folder / "checkpoint-4").exists():
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "rotate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(dataset, tiny, tmp_path / "resumed", adaptation="full", **YARN)
    model = tune(dataset, tiny, tmp_path / "resumed", adaptation="full", **YARN)
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (expected.sha256, 4)


def test_recipe_context_grows_by_the_factor_and_the_base_keeps_its_own(tiny: Path) -> None:
    base = model_loading.load_configuration(tiny)
    scaled = recipe(tiny, adaptation="full", **YARN)
    assert recipe_defaults.get_context_length(scaled, base) == 8192
    assert extend_context(scaled, base).max_position_embeddings == 8192
    assert base.max_position_embeddings == 2048
    assert base.rope_parameters["rope_type"] == "default"
    assert extend_context(recipe(tiny), base) is base


def test_rows_that_do_not_fit_into_memory_are_refused_before_the_training(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_devices, "get_total_memory_bytes", lambda device: 10**6)
    with pytest.raises(ConfigurationError, match=r"each process has 0.0 GB") as error:
        tune(dataset, tiny, tmp_path)
    assert not list((tmp_path / "state").glob("fine_tuning/*/checkpoint-*"))
    assert error.value.hint


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("bloom", {}, "no rotary positions"),
        ("gemma3_text", {}, "different rotary positions in its layers"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rotary positions that are already scaled, of type linear",
        ),
    ],
)
def test_models_without_plain_rotary_positions_are_refused(
    model_type: str, settings: dict[str, Any], message: str, tiny: Path
) -> None:
    model_config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(ConfigurationError, match=rf"fine_tuning.rope_scaling: the model has {message}"):
        check_model(recipe(tiny, adaptation="full", **YARN), model_config)


UNSCALABLE = {
    "mixtral": r"a model of type mixtral does not accept yarn with this configuration: unsupported operand",
    "phi3": r"a model of type phi3 does not accept yarn .*longrope",
    "phimoe": r"a model of type phimoe does not accept yarn .*short_mscale",
    "granitemoehybrid": r"factor is 4.0; the model has rotary parameters in its configuration, but its layers",
    **dict.fromkeys(("gemma3_text", "olmo3"), "the model has different rotary positions in its layers"),
    **dict.fromkeys(("bloom", "jamba", "mamba", "mamba2"), "the model has no rotary positions"),
    "gpt_oss": "the model has rotary positions that are already scaled, of type yarn",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_family_is_scaled_and_saved_or_refused_before_the_training(
    family: Family, tiny: Path, tmp_path: Path
) -> None:
    model_config, config = build_configuration(family), recipe(tiny, adaptation="full", **YARN)
    if message := UNSCALABLE.get(family.model_type):
        with pytest.raises(ConfigurationError, match=message) as error:
            check_model(config, model_config)
        assert "rope_scaling.factor to 1" in error.value.hint
        return
    check_model(config, model_config)
    extended = extend_context(config, model_config)
    extended.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    rotation = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    assert rotation.attention_scaling > 1, "YaRN also scales the attention; a tiny model may have a single frequency"


def test_max_length_beyond_the_context_gives_a_note(tiny: Path) -> None:
    base = model_loading.load_configuration(tiny)
    note = recipe_defaults.describe_exceeded_context(recipe(tiny, max_length=3000), base)
    assert note == (
        "fine_tuning.max_length is 3000; the model's context is 2048 tokens. Lower max_length, or extend the context "
        "with fine_tuning.rope_scaling"
    )
    scaled = recipe(tiny, max_length=3000, adaptation="full", **YARN)
    assert recipe_defaults.describe_exceeded_context(scaled, base) is None
