from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.reporting import mlflow_tracking
from components.common.runtime.reporters import SilentReporter
from components.model_registry import mlflow_retry
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import register
from tests.model_registry.evidence_builder import build_dataset, build_evaluation, build_package


@dataclass(frozen=True)
class CustomizationArtifacts:
    """The artifacts of a customization that the registry receives."""

    model: Artifact
    evaluation: Artifact
    repository: Artifact | None


Customization = Callable[..., CustomizationArtifacts]


def build(
    folder: Path,
    kind: str,
    content: str,
    inputs: list[ArtifactInput],
    summary: dict[str, Any],
) -> Artifact:
    artifact_folder.claim_folder(folder, f"{kind} {content}", overwrite=True)
    (folder / "weights").mkdir()
    (folder / "weights" / "payload.bin").write_text(content * 10)
    (folder / "report.html").write_text(f"<p>{content}</p>")
    return artifact_folder.publish(
        folder,
        kind,
        payload=["weights/payload.bin"],
        inputs=inputs,
        config={},
        seed=1,
        key=f"{kind} {content}",
        summary=summary,
    )


def find_or_build_dataset(folder: Path) -> Artifact:
    if (folder / artifact_folder.MANIFEST_FILENAME).exists():
        return artifact_folder.read(folder)
    return build_dataset(folder)


def customization_factory(root: Path) -> Customization:
    """Return a function that builds a small valid model, evaluation and package under `root`; `content` determines the digest."""

    def customize(
        content: str,
        verdict: str = "accepted",
        *,
        incumbent: str = "",
        proof: bool = True,
        packaged: bool = True,
        acceptance_p: float | None = None,
        split: str = "",
    ) -> CustomizationArtifacts:
        base = ArtifactInput(kind="base_model", content_sha256="ba5e" * 16, uri="embedded:tiny")
        dataset = find_or_build_dataset(root / "dataset")
        folder = root / f"{content}-{verdict}-{incumbent[:8]}"
        model = build(folder / "model", "model", content, [dataset.as_input(str(dataset.path)), base], {"steps": 3})
        evaluation = build_evaluation(
            folder / "evaluation",
            model.manifest,
            dataset,
            verdict,
            incumbent=incumbent,
            acceptance_p=acceptance_p,
            split=split,
        )
        repository = build_package(folder / "repository", model, proof=proof) if packaged else None
        return CustomizationArtifacts(model, evaluation, repository)

    return customize


@pytest.fixture
def customize(tmp_path: Path) -> Customization:
    """A function that builds a model, its evaluation and its package in the test's folder."""
    return customization_factory(tmp_path / "customizations")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialized SQLite store of MLflow; tests copy it because an initialization takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        mlflow_tracking.connect().MlflowClient().search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An MLflow client of an empty registry."""
    return open_registry(empty_store, tmp_path, monkeypatch)


def open_registry(store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copy a SQLite store into `folder`, make it the tracking store of this process and return a client."""
    shutil.copyfile(store, folder / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    return mlflow_tracking.connect().MlflowClient()


NAME = "helper"


@pytest.fixture(scope="session")
def six_versions(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with versions 1 to 3 (accepted against their predecessor, proven), 4 (refused), 5 (unproven) and 6 (not packaged)."""
    folder = tmp_path_factory.mktemp("versions")
    customize = customization_factory(folder / "customizations")
    customizations = [customize("one")]
    for content in ("two", "three"):
        customizations.append(customize(content, incumbent=customizations[-1].model.sha256))
    first = customizations[0].model.sha256
    customizations += [customize("four", "refused", packaged=False), customize("five", incumbent=first, proof=False)]
    customizations += [customize("six", incumbent=first, packaged=False)]
    with pytest.MonkeyPatch.context() as patch:
        open_registry(empty_store, folder, patch)
        for artifacts in customizations:
            register(
                artifacts.model,
                artifacts.evaluation,
                artifacts.repository,
                ModelRegistryConfig(name=NAME),
                reporter=SilentReporter(),
            )
    return folder / "mlflow.db"


@pytest.fixture
def versions(six_versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An MLflow client of a registry with six versions."""
    return open_registry(six_versions, tmp_path, monkeypatch)


class ProcessKilled(BaseException):
    """Stands for SIGKILL: a BaseException, so that no `except Exception` handles it."""


WRITES = ("create_", "set_", "delete_", "update_", "finalize_", "log_model_artifacts")


class KillableClient:
    """An MLflow client that kills its process before the n-th write; all later calls kill it too."""

    def __init__(self, client: Any, write: int, kill: Callable[[], None]) -> None:
        self._client, self.remaining_writes, self._kill = client, write, kill

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return (lambda *args, **kwargs: self._call(name, call, args, kwargs)) if callable(call) else call

    def _call(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        if self.remaining_writes <= 0 and (self.remaining_writes < 0 or name.startswith(WRITES)):
            self.remaining_writes = -1
            self._kill()
        self.remaining_writes -= name.startswith(WRITES)
        return call(*args, **kwargs)


def raise_killed() -> None:
    raise ProcessKilled


@contextmanager
def kill_before_write(monkeypatch: pytest.MonkeyPatch, write: int) -> Iterator[list[bool]]:
    """Kill the registry's client before the given write, counted from 0. Yields a list that is non-empty after a kill."""
    kills: list[bool] = []
    client_class = mlflow_retry.RetryingClient
    with monkeypatch.context() as patch:
        patch.setattr(
            mlflow_retry, "RetryingClient", lambda client: KillableClient(client_class(client), write, raise_killed)
        )
        try:
            yield kills
        except ProcessKilled:
            kills.append(True)


@pytest.fixture(scope="session")
def signed_run(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a signed registry, built once; tests copy it."""
    from tests.model_registry.signed_registry import build_signed_registry

    return build_signed_registry(empty_store, tmp_path_factory.mktemp("signed"))


@pytest.fixture
def signed(signed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the signed registry, with the signing key and the trust configured."""
    from tests.model_registry.signed_registry import copy_signed_registry

    return copy_signed_registry(signed_run, tmp_path, monkeypatch)
