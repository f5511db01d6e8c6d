"""Serving objections: a server that follows an alias repeats the checks of `promote`."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import alias_moves, registry_history, servable_versions
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.promotion import promote
from components.model_registry.registry_history import Entry
from components.model_registry.stage import register
from tests.model_registry.conftest import Customization, CustomizationArtifacts

pytestmark = pytest.mark.mlflow
NAME = "helper"


def register_artifacts(artifacts: CustomizationArtifacts) -> str:
    return register(
        artifacts.model,
        artifacts.evaluation,
        artifacts.repository,
        ModelRegistryConfig(name=NAME),
        reporter=SilentReporter(),
    ).version


def test_promotion_still_being_closed_is_servable(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_artifacts(customize("one"))
    second = register_artifacts(customize("two", incumbent="f" * 64))
    promote(NAME, "1", reporter=SilentReporter())
    objections: list[list[str]] = []
    close = registry_history.close

    def close_after_check(client: Any, model: str, entry: Entry, earlier: Any, state: str, note: str = "") -> Entry:
        if entry.to == second:
            objections.append(servable_versions.list_serving_objections(NAME, second, "champion"))
        return close(client, model, entry, earlier, state, note)

    monkeypatch.setattr(alias_moves.registry_history, "close", close_after_check)
    promote(NAME, second, force=True, reason="It was looked at.", reporter=SilentReporter())
    assert objections == [[]]
    assert servable_versions.list_serving_objections(NAME, second, "champion") == []


def test_unfetchable_files_are_not_a_serving_objection(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = customize("one")
    version = register_artifacts(artifacts)
    promote(NAME, version, reporter=SilentReporter())
    shutil.rmtree(artifacts.model.path)
    assert servable_versions.list_serving_objections(NAME, version, "champion") == []
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", raise_unavailable)
    with pytest.raises(EngineMissingError, match="stopped answering"):
        servable_versions.list_serving_objections(NAME, version, "champion")


def raise_unavailable(**_: Any) -> None:
    from mlflow.exceptions import MlflowException

    raise MlflowException("Max retries exceeded: Connection refused", error_code=14)  # TEMPORARILY_UNAVAILABLE


def test_alias_target_changes_with_evaluation_not_with_serving_state(registry: Any, customize: Customization) -> None:
    version = register_artifacts(customize("one"))
    promote(NAME, version, reporter=SilentReporter())
    first = servable_versions.resolve_alias(NAME, "champion")
    servable_versions.record_serving_state(
        NAME, version, servable_versions.REFUSED, "It was not compared with the model in service."
    )
    assert servable_versions.resolve_alias(NAME, "champion") == first
    registry.set_model_version_tag(NAME, version, "tuneline.evaluation_sha256", "e" * 64)
    assert servable_versions.resolve_alias(NAME, "champion") != first
