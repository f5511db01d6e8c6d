"""What a run is compared with, and what of earlier runs it takes over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts
from components.common.places import Workdir
from components.common.progress import Silent
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from components.triton_packaging import engine, serving_env
from pipelines import local, resolve
from pipelines.config import Customization, load
from tests.model_registry.conftest import NAME, build, customize, empty_store, registry
from tests.model_registry.conftest import Customization as Customize

__all__ = ["customize", "empty_store", "registry"]
CONFIG = Customization.model_validate({"model_registry": {"name": NAME}})
RECIPE = "a recipe's key"


@pytest.fixture
def champions(registry: Any, customize: Customize) -> tuple[str, str]:
    """Version 1, and version 2 that was compared with it, is of the recipe and in service: their digests."""
    one = customize("one")
    two = customize("two", incumbent=one.model.sha256)
    settings = ModelRegistryConfig(name=NAME)
    for made, key in ((one, "another key"), (two, RECIPE)):
        done = register(made.model, made.evaluation, made.repository, settings, reporter=Silent(), finetune_key=key)
        promote(NAME, done.version, reporter=Silent())
    return one.model.sha256, two.model.sha256


@pytest.mark.mlflow
@pytest.mark.parametrize(("key", "which"), [(RECIPE, 0), ("some other key", 1)])
def test_what_a_run_is_compared_with_is_fetched_where_it_is_not_here(
    champions: tuple[str, str], tmp_path: Path, key: str, which: int
) -> None:
    fresh = Workdir(tmp_path / "fresh")
    assert resolve._incumbent(CONFIG, fresh, key, Silent()) == champions[which]
    assert artifacts.read(fresh.store / champions[which], "model").sha256 == champions[which]


@pytest.mark.mlflow
def test_what_is_gone_from_the_registry_is_not_compared_with(champions: tuple[str, str], registry: Any, tmp_path: Path) -> None:
    registry.delete_model_version(NAME, "1")
    assert resolve._incumbent(CONFIG, Workdir(tmp_path / "fresh"), RECIPE, Silent()) == champions[1]


@pytest.mark.parametrize("passing", [True, False])
def test_an_answer_that_rests_on_a_failure_in_passing_is_not_taken_from_the_cache(tmp_path: Path, passing: bool) -> None:
    summary = {"verdict": "refused", **({artifacts.PASSING: True} if passing else {})}
    made = build(tmp_path / "store" / "made", "evaluation", "some", [], summary)
    (tmp_path / "store" / "made").rename(tmp_path / "store" / made.sha256)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "1.json").write_text(json.dumps({"outputs": {"evaluation": made.sha256}}))
    local._forget_missing(tmp_path / "cache", tmp_path / "store")
    assert (tmp_path / "cache" / "1.json").exists() is not passing


def test_a_run_for_vllm_says_before_any_work_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "availability", lambda: None)
    monkeypatch.setattr(serving_env, "missing", lambda: None)
    monkeypatch.setattr(serving_env, "missing_vllm", lambda: "vLLM is not installed here")
    assert resolve.unproven(load(None)) is None
    reason = resolve.unproven(load(None, ["triton_packaging.backend=vllm"]))
    assert reason == "vLLM is not installed here"
    assert "not be promoted: vLLM is not installed here. Install vLLM" in resolve.unproven_note(reason)
