"""A model folder that cannot be loaded is told with the folder and what is wrong, before anything is learned from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.common import models
from components.common.errors import ConfigurationError
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def test_a_configuration_that_is_cut_off_is_said_before_any_work(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ConfigurationError, match=r"config.json of .*tiny is not JSON"):
        models.base_model(str(folder))


def test_a_configuration_without_an_architecture_is_said_before_any_work(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="names no model_type"):
        models.base_model(str(folder))


def test_an_architecture_that_transformers_does_not_know_is_said(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "nonsense"}))
    with pytest.raises(ConfigurationError, match=r"the configuration of the model in .*tiny cannot be loaded") as refused:
        models.outline(str(folder))
    assert "nonsense" in refused.value.message
    assert "knows the architecture" in refused.value.hint


def test_a_torn_tokenizer_and_torn_weights_are_said(folder: Path) -> None:
    model = models.open_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match=r"the weights of the model in .*tiny cannot be loaded"):
        models.load(model)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigurationError, match=r"the tokenizer of the model in .*tiny cannot be loaded"):
        models.load_tokenizer(folder)
