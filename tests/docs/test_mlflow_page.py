"""The Python example of docs/mlflow.md runs, and the page states the limits of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from components.common.runtime.reporters import SilentReporter
from components.model_registry import mlmodel_files, run_summary
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from tests.model_registry.tuned_model import build_tuned_model
from tests.pipelines.command import ROOT

pytestmark = pytest.mark.mlflow
PAGE = (ROOT / "docs" / "mlflow.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_example_loads_the_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    tuned = build_tuned_model(tmp_path / "tuned")
    config = ModelRegistryConfig(name="my-model")
    register(tuned.model, tuned.evaluation, tuned.repository, config, reporter=SilentReporter())
    promote("my-model", "1", force=True, reason="the test", reporter=SilentReporter())
    capsys.readouterr()
    [block] = BLOCK.findall(PAGE)
    exec(block, {})
    one, two = map(eval, capsys.readouterr().out.splitlines())
    assert two == one * 2
    assert one[0]


def test_page_states_the_limits() -> None:
    assert f"the first {run_summary.MAX_ITEMS_PER_TASK} items of each task" in PAGE
    assert f"cut to {run_summary.MAX_CELL_CHARACTERS:,} characters" in PAGE
    assert f"`max_new_tokens`, default {mlmodel_files.DEFAULT_MAX_NEW_TOKENS}" in PAGE
    assert f"`{mlmodel_files.LOADER_MODULE}`" in PAGE
    for name in run_summary.TRAINING_FIGURES:
        assert f"`{name}`" in PAGE
