"""The Python example of docs/how-to/mlflow.md runs, and the page states the limits of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.reporters import SilentReporter
from components.model_registry import mlmodel_files, run_summary
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from tests.model_registry.tuned_model import build_tuned_model
from tests.pipelines.command import ROOT

pytestmark = pytest.mark.mlflow
PAGE = (ROOT / "docs" / "how-to" / "mlflow.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_examples_load_the_champions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    for name in ("my-model", "my-merged-model"):
        tuned = build_tuned_model(tmp_path / name, merged="merged" in name)
        config = ModelRegistryConfig(name=name)
        register(tuned.model, tuned.evaluation, tuned.repository, config, reporter=SilentReporter())
        promote(name, "1", force=True, reason="the test", reporter=SilentReporter())
    (tmp_path / "my-llama").symlink_to(tmp_path / "my-model" / "base")
    pyfunc, transformers, peft = BLOCK.findall(PAGE)
    names: dict[str, Any] = {}
    capsys.readouterr()
    exec(pyfunc, names)
    one, two = map(eval, capsys.readouterr().out.splitlines())
    assert two == one * 2
    assert one[0]
    exec(transformers, names)
    [answer] = eval(capsys.readouterr().out)
    assert answer["generated_text"][-1]["role"] == "assistant"
    exec(peft, names)
    assert names["adapted"].peft_config


def test_page_states_the_limits() -> None:
    assert f"the first {run_summary.MAX_ITEMS_PER_TASK} items of each task" in PAGE
    assert f"cut to {run_summary.MAX_CELL_CHARACTERS:,} characters" in PAGE
    assert f"`max_new_tokens`, default {mlmodel_files.DEFAULT_MAX_NEW_TOKENS}" in PAGE
    assert f"`{mlmodel_files.LOADER_MODULE}`" in PAGE
    for name in run_summary.TRAINING_FIGURES:
        assert f"`{name}`" in PAGE
