"""What a run is compared with, and what of earlier runs it takes over."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common import artifacts, models, step
from components.common.places import Workdir
from components.common.progress import Silent
from components.fine_tuning import sweep
from components.fine_tuning.component import fine_tuning
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


def test_how_many_recipes_are_trained_at_once_changes_no_steps_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step is found in the cache, and the model in the registry, whatever `parallel` is; what is trained knows it."""
    one, other = (load(None, ["fine_tuning.sweep.vary={learning_rate: [1e-4, 1e-3]}", f"fine_tuning.sweep.parallel={n}"]) for n in (1, 3))
    plans = [resolve.tuning_plan(config, "0a") for config in (one, other)]
    assert resolve.counting(plans[0]) == resolve.counting(plans[1])
    assert "where" not in resolve.tuning_plan(load(None), "0a")
    asked: list[Any] = []

    def produce(stage: str, parameters: dict[str, Any], build: Any, links: str) -> Any:
        asked.append(parameters)
        work = SimpleNamespace(reporter=Silent(), workdir=SimpleNamespace(state=tmp_path), tracked=None, artifact=lambda *_: None)
        return SimpleNamespace(sha256=build(tmp_path, work))

    monkeypatch.setattr(step, "produce", produce)
    monkeypatch.setattr(step, "copy_report", lambda *_: None)
    monkeypatch.setattr(models, "base_model", lambda *_: None)
    monkeypatch.setattr(sweep, "tune", lambda dataset, out, config, **_: config.sweep.parallel)
    place = SimpleNamespace(path=str(tmp_path / "report"))
    given = [json.dumps(one) for one in plans]
    version = json.dumps({"uri": "git+file:///there@a"})
    trained = [fine_tuning.python_func(plan=text, dataset="d", version=version, report=place, links=place) for text in given]
    assert trained == [(1,), (3,)]
    assert asked[0] == asked[1] == {"plan": resolve.counting(plans[0]), "dataset": "d", "revision": "a"}


def test_a_run_for_vllm_says_before_any_work_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "availability", lambda: None)
    monkeypatch.setattr(serving_env, "missing", lambda: None)
    monkeypatch.setattr(serving_env, "missing_vllm", lambda: "vLLM is not installed here")
    assert resolve.unproven(load(None)) is None
    reason = resolve.unproven(load(None, ["triton_packaging.backend=vllm"]))
    assert reason == "vLLM is not installed here"
    assert "not be promoted: vLLM is not installed here. Install vLLM" in resolve.unproven_note(reason)
