"""What may be served: promote's own checks, asked again by the server that follows an alias."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from components.common.errors import EngineMissingError
from components.common.progress import Silent
from components.model_registry import history, moving, service
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history import Entry
from components.model_registry.promotion import promote
from components.model_registry.stage import register
from tests.model_registry.conftest import Customization, Made

pytestmark = pytest.mark.mlflow
NAME = "helper"


def registered(made: Made) -> str:
    return register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=Silent()).version


def test_a_promotion_that_has_moved_the_alias_and_is_just_being_closed_counts(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(customize("one"))
    two = registered(customize("two", incumbent="f" * 64))
    promote(NAME, "1", reporter=Silent())
    seen: list[list[str]] = []
    close = history.close

    def closing(client: Any, model: str, entry: Entry, earlier: Any, state: str, note: str = "") -> Entry:
        if entry.to == two:
            seen.append(service.objections(NAME, two, "champion"))
        return close(client, model, entry, earlier, state, note)

    monkeypatch.setattr(moving.history, "close", closing)
    promote(NAME, two, force=True, reason="It was looked at.", reporter=Silent())
    assert seen == [[]]
    assert service.objections(NAME, two, "champion") == []


def test_files_that_cannot_be_fetched_now_are_no_objection_to_a_version(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = customize("one")
    version = registered(made)
    promote(NAME, version, reporter=Silent())
    shutil.rmtree(made.model.path)
    assert service.objections(NAME, version, "champion") == []
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", away)
    with pytest.raises(EngineMissingError, match="stopped answering"):
        service.objections(NAME, version, "champion")


def away(**_: Any) -> None:
    from mlflow.exceptions import MlflowException

    raise MlflowException("Max retries exceeded: Connection refused", error_code=14)  # TEMPORARILY_UNAVAILABLE


def test_a_version_is_another_once_something_else_is_said_of_it_than_what_became_of_it_in_service(
    registry: Any, customize: Customization
) -> None:
    version = registered(customize("one"))
    promote(NAME, version, reporter=Silent())
    first = service.wanted(NAME, "champion")
    service.mark(NAME, version, service.REFUSED, "It was not compared with the model in service.")
    assert service.wanted(NAME, "champion") == first
    registry.set_model_version_tag(NAME, version, "tuneline.evaluation_sha256", "e" * 64)
    assert service.wanted(NAME, "champion") != first
