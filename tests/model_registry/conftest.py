from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, tracking
from components.common.artifacts import Artifact, Input
from components.common.progress import Silent
from components.model_registry import patience
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import register


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


def making(place: Path) -> Customization:
    """What makes a model, its evaluation and its package in `place`, small and valid; the content of the model makes its digest."""

    def make(content: str, verdict: str = "accepted", *, incumbent: str = "", proof: bool = True, packaged: bool = True) -> Made:
        base = Input(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")
        data = Input(kind="dataset", content_sha256="da7a" * 16, uri="store:" + "da7a" * 16)
        folder = place / f"{content}-{verdict}-{incumbent[:8]}"
        model = build(folder / "model", "model", content, [data, base], {"steps": 3})
        inputs = [model.as_input(), data, base]
        inputs += [Input(kind="incumbent", content_sha256=incumbent, uri="store:" + incumbent)] if incumbent else []
        reasons = [f"The candidate is {verdict}."]
        evaluation = build(folder / "evaluation", "evaluation", f"{content} {verdict}", inputs, {"verdict": verdict, "reasons": reasons})
        proven = {"server_version": "2.1", "matched": 4} if proof else None
        repository = build(folder / "repository", "repository", content, [model.as_input()], {"proof": proven}) if packaged else None
        return Made(model, evaluation, repository)

    return make


@pytest.fixture
def customize(tmp_path: Path) -> Customization:
    """Makes a model, its evaluation and its package in the test's own folder."""
    return making(tmp_path / "made")


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
    return opened(empty_store, tmp_path, monkeypatch)


def opened(store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a copy of a SQLite store in `folder`, which this process tracks to from now on."""
    shutil.copyfile(store, folder / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    return tracking.connect().MlflowClient()


NAME = "helper"


@pytest.fixture(scope="session")
def six_versions(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with version 1, 2, 3: accepted, each against the one before, and proven; 4: refused; 5: unproven; 6: not packaged."""
    folder = tmp_path_factory.mktemp("versions")
    make = making(folder / "made")
    made = [make("one")]
    for content in ("two", "three"):
        made.append(make(content, incumbent=made[-1].model.sha256))
    first = made[0].model.sha256
    made += [make("four", "refused", packaged=False), make("five", incumbent=first, proof=False)]
    made += [make("six", incumbent=first, packaged=False)]
    with pytest.MonkeyPatch.context() as patch:
        opened(empty_store, folder, patch)
        for one in made:
            register(one.model, one.evaluation, one.repository, ModelRegistryConfig(name=NAME), reporter=Silent())
    return folder / "mlflow.db"


@pytest.fixture
def versions(six_versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of the test's own with six versions; yields an MLflow client."""
    return opened(six_versions, tmp_path, monkeypatch)


class Killed(BaseException):
    """A process ends here, without a chance to tidy up."""


WRITES = ("create_", "set_", "delete_", "update_", "finalize_", "log_model_artifacts")


class Mortal:
    """An MLflow client whose process is killed before its n-th write: nothing it is asked from then on is done."""

    def __init__(self, client: Any, after: int, die: Callable[[], None]) -> None:
        self._client, self.left, self._die = client, after, die

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return (lambda *given, **named: self._called(name, call, given, named)) if callable(call) else call

    def _called(self, name: str, call: Any, given: Any, named: Any) -> Any:
        if self.left <= 0 and (self.left < 0 or name.startswith(WRITES)):
            self.left = -1
            self._die()
        self.left -= name.startswith(WRITES)
        return call(*given, **named)


def killed() -> None:
    raise Killed


@contextmanager
def killed_before(monkeypatch: pytest.MonkeyPatch, write: int) -> Iterator[list[bool]]:
    """Have the registry's client die before a write, counted from 0. Yields a list that says afterwards whether it did."""
    died: list[bool] = []
    whole = patience.Patient
    with monkeypatch.context() as patch:
        patch.setattr(patience, "Patient", lambda client: Mortal(whole(client), write, killed))
        try:
            yield died
        except Killed:
            died.append(True)
