"""A training on a tuned base model reports test rows that the base model was trained on.

Fast tier: artifacts without weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models.model_loading import LocalBaseModel
from components.common.runtime.errors import EngineMissingError
from components.common.workspace import artifact_store
from components.fine_tuning.earlier_training import describe_trained_test_rows
from tests.datasets import small_dataset

MISSING = "a promotion will be refused: the dataset {} of its lineage is not in the artifact store, so its"


@pytest.fixture
def earlier(tmp_path: Path) -> Artifact:
    """Return a dataset whose training rows include ten of the twelve test rows of `later`."""
    return small_dataset(tmp_path / "earlier", start=30)


@pytest.fixture
def later(tmp_path: Path) -> Artifact:
    return small_dataset(tmp_path / "later")


@pytest.fixture
def tuned(tmp_path: Path, earlier: Artifact) -> Artifact:
    """Return a model that was trained on `earlier`."""
    folder = tmp_path / "tuned"
    artifact_folder.claim_folder(folder, "tuned")
    (folder / "adapter.bin").write_text("weights", encoding="utf-8")
    inputs = [earlier.as_input(str(earlier.path))]
    return artifact_folder.publish(
        folder, "model", payload=["adapter.bin"], inputs=inputs, config={}, seed=0, key="tuned", summary={}
    )


def as_base(model: Artifact) -> LocalBaseModel:
    return LocalBaseModel(model.path, model.sha256, str(model.path))


def test_test_rows_of_an_earlier_training_are_reported(tuned: Artifact, earlier: Artifact, later: Artifact) -> None:
    [warning] = describe_trained_test_rows(later, as_base(tuned))
    assert "a promotion will be refused: the base model was trained on 10 of the 12 test rows" in warning
    assert f"of the training split of dataset {earlier.sha256[:12]}" in warning


def test_rows_of_the_initial_adapter_are_reported(tuned: Artifact, later: Artifact, tmp_path: Path) -> None:
    untuned = LocalBaseModel(tmp_path, "ba5e" * 16, str(tmp_path))
    [warning] = describe_trained_test_rows(later, untuned, tuned)
    assert "trained on 10 of the 12 test rows" in warning


def test_other_rows_and_untuned_models_give_no_warning(tuned: Artifact, earlier: Artifact, tmp_path: Path) -> None:
    assert describe_trained_test_rows(earlier, as_base(tuned)) == []
    assert describe_trained_test_rows(earlier, LocalBaseModel(tmp_path, "ba5e" * 16, str(tmp_path))) == []


def test_lost_dataset_of_the_base_model_is_reported(tuned: Artifact, earlier: Artifact, later: Artifact) -> None:
    shutil.rmtree(earlier.path)
    [warning] = describe_trained_test_rows(later, as_base(tuned))
    assert warning.startswith(MISSING.format(earlier.sha256[:12]))


def test_unreachable_store_does_not_stop_the_training(
    tuned: Artifact, earlier: Artifact, later: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(uri: str) -> Path | None:
        raise EngineMissingError(f"the store of {uri} does not answer")

    shutil.rmtree(earlier.path)
    monkeypatch.setattr(artifact_store, "resolve_artifact_uri", resolve)
    [warning] = describe_trained_test_rows(later, as_base(tuned))
    assert warning.startswith("the test rows were not compared with the training rows of the base model: the store of ")
