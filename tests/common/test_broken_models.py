"""Errors for model folders that cannot be loaded: the message names the folder and the defect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.common.models import model_loading
from components.common.runtime.errors import ConfigurationError
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def test_truncated_configuration_is_refused_before_work(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ConfigurationError, match=r"config.json of .*tiny is not JSON"):
        model_loading.resolve_base_model(str(folder))


def test_configuration_without_architecture_is_refused_before_work(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="has no model_type"):
        model_loading.resolve_base_model(str(folder))


def test_unknown_architecture_is_refused(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "nonsense"}))
    with pytest.raises(ConfigurationError, match=r"the configuration of the model in .*tiny cannot be loaded") as error:
        model_loading.load_outline(str(folder))
    assert "nonsense" in error.value.message
    assert "supports the architecture" in error.value.hint


def test_truncated_tokenizer_and_weights_are_refused(folder: Path) -> None:
    model = model_loading.open_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match=r"the weights of the model in .*tiny cannot be loaded"):
        model_loading.load_model(model)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigurationError, match=r"the tokenizer of the model in .*tiny cannot be loaded"):
        model_loading.load_tokenizer(folder)
