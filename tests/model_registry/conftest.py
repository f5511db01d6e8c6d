from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, tracking
from components.common.artifacts import Artifact, Input


@dataclass(frozen=True)
class Made:
    """What a customization hands to the registry."""

    model: Artifact
    evaluation: Artifact
    repository: Artifact | None


Customization = Callable[..., Made]


def build(folder: Path, kind: str, content: str, inputs: list[Input], summary: dict[str, Any]) -> Artifact:
    artifacts.begin(folder, f"{kind} {content}", overwrite=True)
    (folder / "weights").mkdir()
    (folder / "weights" / "payload.bin").write_text(content * 10)
    (folder / "report.html").write_text(f"<p>{content}</p>")
    payload = ["weights/payload.bin"]
    return artifacts.publish(folder, kind, payload=payload, inputs=inputs, config={}, seed=1, key=f"{kind} {content}", summary=summary)


@pytest.fixture
def customize(tmp_path: Path) -> Customization:
    """A model, its evaluation and its package, small and valid; the content of the model makes its digest."""

    def make(content: str, verdict: str = "accepted", *, incumbent: str = "", proof: bool = True, packaged: bool = True) -> Made:
        base = Input(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")
        data = Input(kind="dataset", content_sha256="da7a" * 16, uri="store:" + "da7a" * 16)
        folder = tmp_path / "made" / f"{content}-{verdict}-{incumbent[:8]}"
        model = build(folder / "model", "model", content, [data, base], {"steps": 3})
        inputs = [model.as_input(), data, base]
        inputs += [Input(kind="incumbent", content_sha256=incumbent, uri="store:" + incumbent)] if incumbent else []
        reasons = [f"The candidate is {verdict}."]
        evaluation = build(folder / "evaluation", "evaluation", f"{content} {verdict}", inputs, {"verdict": verdict, "reasons": reasons})
        proven = {"server_version": "2.1", "matched": 4} if proof else None
        repository = build(folder / "repository", "repository", content, [model.as_input()], {"proof": proven}) if packaged else None
        return Made(model, evaluation, repository)

    return make


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store that MLflow has set up; making one takes seconds, copying it does not."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        tracking.connect().MlflowClient().search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of the test's own; yields an MLflow client."""
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return tracking.connect().MlflowClient()
