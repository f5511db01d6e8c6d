"""Attached adapters, virtual tokens and referenced weights in our python backend, in a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common import models
from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.server import ModelLoadError, running_server
from components.triton_packaging.stage import package, write_repository
from tests.tiny import tiny_model
from tests.triton_packaging.clients import by_transformers, over_grpc, streamed

pytestmark = pytest.mark.triton

PROMPTS = ["What is a list?", "Name the fox."]


def proven(model: Model, output: Path, **settings: Any) -> Any:
    config = TritonPackagingConfig(golden_prompts=PROMPTS, golden_max_tokens=12, **settings)
    return package(model, output, config, seed=1, reporter=Silent())


def test_an_attached_adapter_is_proven_and_its_requests_are_computed_together(tiny_adapted: Model, tmp_path: Path) -> None:
    made = proven(tiny_adapted, tmp_path / "out", adapter="attached")
    assert made.manifest.summary["proof"]["matched"] == 2
    with running_server(made.path, log=tmp_path / "log") as server:
        assert over_grpc(server, "tuneline", text_input="Name the fox.", max_tokens=24)["text_output"] == by_transformers(
            tiny_adapted, "Name the fox.", 24
        )
    assert "one by one" not in (tmp_path / "log").read_text()


def test_virtual_tokens_are_proven_and_answered_one_by_one(tiny_prompted: Model, tmp_path: Path) -> None:
    made = proven(tiny_prompted, tmp_path / "out", max_prompt_tokens=3000)
    assert made.manifest.summary["proof"]["matched"] == 2
    with running_server(made.path, log=tmp_path / "log") as server:
        text = by_transformers(tiny_prompted, "Name the fox.", 24)
        assert streamed(server, "tuneline_stream", text_input="Name the fox.", max_tokens=24).text == text
        sampled = {"text_input": "Name the fox.", "max_tokens": 8, "temperature": 1.0, "seed": 3}
        assert over_grpc(server, "tuneline", **sampled) == over_grpc(server, "tuneline", **sampled)
        with pytest.raises(Exception, match="at most 2043 are allowed"):  # 2048, less 4 virtual tokens, less one to answer
            over_grpc(server, "tuneline", text_input="list " * 3000, max_tokens=1)
        longest = over_grpc(server, "tuneline", text_input="0 " * 1010, max_tokens=4)
        assert longest["prompt_tokens"] + 4 <= 2044
    assert "one by one: its adapter puts virtual tokens before every prompt" in (tmp_path / "log").read_text()


def test_referenced_weights_are_proven_and_missing_ones_are_told_when_the_model_is_loaded(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    made = proven(models.open_model(base), tmp_path / "out", weights="referenced")
    assert made.manifest.summary["proof"]["matched"] == 2
    (base / "model.safetensors").write_bytes(b"short")
    said = r"model\.safetensors in .*base, which this package refers to, is missing or of another size"
    with pytest.raises(ModelLoadError, match=said), running_server(made.path, log=tmp_path / "log"):
        pass


def test_an_attached_adapter_beside_referenced_base_weights_answers(tiny_adapted: Model, tmp_path: Path) -> None:
    config = TritonPackagingConfig(weights="referenced", adapter="attached")
    write_repository(tiny_adapted, tmp_path / "out", config, "float32")
    with running_server(tmp_path / "out", log=tmp_path / "log") as server:
        answer = over_grpc(server, "tuneline", text_input=PROMPTS[0], max_tokens=12)
    assert answer["text_output"] == by_transformers(tiny_adapted, PROMPTS[0], 12)
