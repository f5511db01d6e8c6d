"""Further training of a tuned model's adapter: SFT, then DPO or KTO of the same adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.models.model_loading import LocalBaseModel
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning import adapters, callbacks, stage, trainers
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from pipelines.config.customization_config import Customization
from pipelines.steps import input_resolution
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import recipe
from tests.pipelines.test_pipeline import flip_bit
from tests.tiny import tiny_model


@dataclass(frozen=True)
class Trained:
    """A base model, preference pairs, and an SFT adapter of the base model."""

    base: LocalBaseModel
    pairs: Artifact
    adapter: Artifact

    def open(self, **changes: Any) -> Artifact | None:
        config = recipe(self.base.path, **{"initial_adapter": str(self.adapter.path), **changes})
        return adapters.open_initial_adapter(config, self.base.sha256, model_loading.load_configuration(self.base.path))


def tune(base: Path, dataset: Artifact, output: Path, **changes: Any) -> Artifact:
    config = recipe(base, **changes)
    state = output.parent / f"{output.name}-state"
    return finetune(dataset, output, config, seed=3, state=state, reporter=SilentReporter())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("initial-adapter")
    base = tiny_model(folder / "tiny")
    adapter = tune(base, small_dataset(folder / "sft"), folder / "adapter", max_steps=2)
    return Trained(model_loading.resolve_base_model(str(base)), dataset_of("preference", folder / "pairs"), adapter)


def read_weights(model: Artifact) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model.path / "adapter_model.safetensors")


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_reference_model_is_the_initial_adapter(
    trained: Trained, tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss before the first step is that of a model without preference, and TRL's copy is not published.

    The model's code is restored after the training, although the adapter wraps the model.
    """
    import torch
    from transformers.models.llama import modeling_llama

    built: list[Any] = []
    build, norm = trainers.build_trainer_class, modeling_llama.LlamaRMSNorm

    def record(*args: Any) -> Any:
        trainer_class = build(*args)
        modeling_llama.LlamaRMSNorm = None  # as Liger replaces it

        class Recorded(trainer_class):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                built.append(self)

        return Recorded

    monkeypatch.setattr(trainers, "build_trainer_class", record)
    source = str(trained.adapter.path)
    model = tune(
        trained.base.path, trained.pairs, tmp_path / "tuned", objective=objective, initial_adapter=source, max_steps=2
    )
    log = callbacks.read_log(model.path / callbacks.LOG_FILENAME)
    expected = {"dpo": 0.6931, "kto": 0.5}[objective]
    assert next(line["validation_loss"] for line in log if line["step"] == 0) == pytest.approx(expected, abs=1e-3)
    initial, final = read_weights(trained.adapter), read_weights(model)
    assert initial.keys() == final.keys()
    assert any(not torch.equal(initial[name], final[name]) for name in initial)
    parameters = dict(built[0].model.named_parameters())
    for name, value in initial.items():
        stem, _, suffix = name.rpartition(".")
        reference = parameters[f"{stem}.ref.{suffix}"]
        assert torch.equal(reference, value)
        assert not reference.requires_grad
    assert not (model.path / "ref").exists()
    assert modeling_llama.LlamaRMSNorm is norm
    one = trained.adapter
    assert [(i.kind, i.content_sha256, i.uri) for i in model.manifest.inputs][1:] == [
        ("base_model", trained.base.sha256, trained.base.uri),
        ("initial_adapter", one.sha256, source),
    ]
    assert model.manifest.summary["parameters"] == one.manifest.summary["parameters"]
    loadable = model_loading.open_model(model.path)
    assert (loadable.base.sha256, loadable.adapter) == (trained.base.sha256, model.path)


def test_sft_starts_with_the_weights_of_the_initial_adapter(trained: Trained, tmp_path: Path) -> None:
    import torch

    rows = small_dataset(tmp_path / "rows")
    source = str(trained.adapter.path)
    options = {"initial_adapter": source, "learning_rate": 1e-12, "max_steps": 1}
    model = tune(trained.base.path, rows, tmp_path / "tuned", **options)
    initial, final = read_weights(trained.adapter), read_weights(model)
    assert all(torch.allclose(initial[name], final[name], atol=1e-9) for name in initial)
    lora = model.manifest.config["lora"]
    dropout = json.loads((model.path / "adapter_config.json").read_text())["lora_dropout"]
    assert dropout == lora["dropout"]


def test_interrupted_dpo_of_an_initial_adapter_resumes(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"objective": "dpo", "initial_adapter": str(trained.adapter.path)}
    whole = tune(trained.base.path, trained.pairs, tmp_path / "whole", **options)
    publish = callbacks.checkpoints.publish

    def interrupt(checkpoint: Path, folder: Path, verify_lock: Callable[[], None]) -> None:
        publish(checkpoint, folder, verify_lock)
        if checkpoint.name == "checkpoint-2":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(callbacks.checkpoints, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(trained.base.path, trained.pairs, tmp_path / "resumed", **options)
    resumed = tune(trained.base.path, trained.pairs, tmp_path / "resumed", **options)
    assert resumed.manifest.summary["resumed_from"] == 2
    assert resumed.sha256 == whole.sha256


def test_adapter_is_part_of_the_key_and_other_recipes_keep_theirs(trained: Trained) -> None:
    config = recipe(trained.base.path)
    keys = {stage.compute_key("a", "b", config, 1, {}, one) for one in (None, "c", "d")}
    assert len(keys) == 3
    assert "initial_adapter" not in config.model_dump()
    path = recipe(trained.base.path, initial_adapter="/another/folder")
    assert stage.compute_key("a", "b", path, 1, {}, "c") in keys  # the digest, not the path, identifies the adapter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"rank": 3}}, r"the tensor .* has the shape \(.*\); expected \(3, "),
        ({"lora": {"target_modules": ["q_proj"]}}, r"the tensor .* has the shape \(.*\); expected None"),
        ({"lora": {"alpha": 5}}, "lora_alpha of the adapter is .*; expected 5"),
        ({"lora": {"rslora": True}}, "use_rslora of the adapter is False; expected True"),
        ({"lora": {"dora": True}}, "use_dora of the adapter is False; expected True"),
    ],
)
def test_adapter_with_other_settings_is_refused(trained: Trained, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"fine_tuning.initial_adapter: {message}"):
        trained.open(**changes)


def test_adapter_of_another_base_model_is_refused(trained: Trained) -> None:
    config = recipe(trained.base.path, initial_adapter=str(trained.adapter.path))
    with pytest.raises(ConfigurationError, match=r"expected that of fine_tuning\.base_model, 0a0a0a0a0a0a") as error:
        adapters.open_initial_adapter(config, "0a" * 32, model_loading.load_configuration(trained.base.path))
    assert error.value.hint == f"Set fine_tuning.base_model to {trained.base.uri}."


def test_plan_has_the_digest_and_every_recipe_of_a_sweep_is_checked(trained: Trained) -> None:
    section = {"base_model": str(trained.base.path), "initial_adapter": str(trained.adapter.path)}
    model_config = model_loading.load_configuration(trained.base.path)

    def find(**changes: Any) -> str | None:
        config = Customization.model_validate({"fine_tuning": {**section, **changes}})
        return input_resolution.find_initial_adapter(config, trained.base.sha256, model_config)

    assert find() == find(sweep={"vary": {"learning_rate": [1e-4, 1e-3]}}) == trained.adapter.sha256
    assert find(initial_adapter=None) is None
    with pytest.raises(ConfigurationError, match=r"the tensor .* has the shape"):
        find(sweep={"vary": {"lora.rank": [16, 3]}})
    plans = [input_resolution.build_fine_tuning_plan(Customization(), "0a", one) for one in (None, "0b")]
    assert "initial_adapter_sha256" not in plans[0]
    assert plans[1]["initial_adapter_sha256"] == "0b"


def test_source_that_is_no_adapter_is_refused(trained: Trained) -> None:
    with pytest.raises(ConfigurationError, match="is not a tuned model with an adapter"):
        trained.open(initial_adapter=str(trained.base.path))


def test_damaged_or_replaced_adapter_is_refused(trained: Trained, tmp_path: Path) -> None:
    copy = shutil.copytree(trained.adapter.path, tmp_path / "copy")
    config = recipe(trained.base.path, initial_adapter=str(copy))
    model_config = model_loading.load_configuration(trained.base.path)
    with pytest.raises(ArtifactDamagedError, match=r"fine_tuning.initial_adapter: the digest of .*; expected 0a0a"):
        adapters.open_initial_adapter(config, trained.base.sha256, model_config, "0a" * 32)
    flip_bit(copy / "adapter_model.safetensors")
    with pytest.raises(ArtifactDamagedError, match=r"adapter_model.safetensors of the model in .* has changed"):
        adapters.open_initial_adapter(config, trained.base.sha256, model_config)


@pytest.mark.parametrize(
    "changes", [{"adaptation": "full"}, {"adaptation": "qlora"}, {"strategy": "fsdp2", "processes": 2}]
)
def test_initial_adapter_requires_lora_in_whole_processes(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="initial_adapter cannot be used with adaptation"):
        FineTuningConfig.model_validate({"initial_adapter": "store:x", **changes})
