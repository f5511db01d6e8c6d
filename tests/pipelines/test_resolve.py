"""The incumbent of a run, and the results of earlier runs that it reuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from components.common import pipeline_step
from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.fine_tuning import sweep
from components.fine_tuning.component import fine_tuning
from components.fine_tuning.config import recipe_from_plan
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import promote, register
from components.triton_packaging import serving_env, triton_installation
from pipelines.config.customization_config import Customization, load_customization
from pipelines.runs import local_runner
from pipelines.steps import input_resolution
from tests.datasets import SCHEMA, small_dataset
from tests.model_registry.conftest import NAME, build, customize, empty_store, registry
from tests.model_registry.conftest import Customization as Customize

__all__ = ["customize", "empty_store", "registry"]
CONFIG = Customization.model_validate({"model_registry": {"name": NAME}})
RECIPE = "a recipe's key"


@pytest.fixture
def champions(registry: Any, customize: Customize) -> tuple[str, str]:
    """Return the model digests of version 1 and of version 2, the champion, whose evaluation compared it with version 1."""
    first = customize("one")
    second = customize("two", incumbent=first.model.sha256)
    settings = ModelRegistryConfig(name=NAME)
    for artifacts, key in ((first, "another key"), (second, RECIPE)):
        registration = register(
            artifacts.model,
            artifacts.evaluation,
            artifacts.repository,
            settings,
            reporter=SilentReporter(),
            finetune_key=key,
        )
        promote(NAME, registration.version, reporter=SilentReporter())
    return first.model.sha256, second.model.sha256


@pytest.mark.mlflow
@pytest.mark.parametrize(("key", "index"), [(RECIPE, 0), ("some other key", 1)])
def test_missing_incumbent_is_fetched(champions: tuple[str, str], tmp_path: Path, key: str, index: int) -> None:
    fresh = Workdir(tmp_path / "fresh")
    assert input_resolution._fetch_incumbent(CONFIG, fresh, key, SilentReporter()) == champions[index]
    assert artifact_folder.read(fresh.store / champions[index], "model").sha256 == champions[index]


@pytest.mark.mlflow
def test_deleted_incumbent_is_replaced_by_the_champion(
    champions: tuple[str, str], registry: Any, tmp_path: Path
) -> None:
    registry.delete_model_version(NAME, "1")
    assert (
        input_resolution._fetch_incumbent(CONFIG, Workdir(tmp_path / "fresh"), RECIPE, SilentReporter()) == champions[1]
    )


@pytest.mark.mlflow
def test_champion_of_another_kind_is_found_before_the_run(champions: tuple[str, str], tmp_path: Path) -> None:
    work = Workdir(tmp_path / "fresh")
    reward = Customization.model_validate({"model_registry": {"name": NAME}, "fine_tuning": {"objective": "reward"}})
    input_resolution.check_champion_kind(reward, work)  # the store lacks the champion
    assert input_resolution._fetch_incumbent(CONFIG, work, "some other key", SilentReporter()) == champions[1]
    input_resolution.check_champion_kind(CONFIG, work)
    with pytest.raises(
        ConfigurationError, match=f"the champion of {NAME} is a language model; objective reward trains"
    ):
        input_resolution.check_champion_kind(reward, work)


@pytest.mark.parametrize("is_transient", [True, False])
def test_result_of_a_transient_failure_is_not_cached(tmp_path: Path, is_transient: bool) -> None:
    summary = {"verdict": "refused", **({artifact_folder.TRANSIENT_FAILURE_KEY: True} if is_transient else {})}
    evaluation = build(tmp_path / "store" / "made", "evaluation", "some", [], summary)
    (tmp_path / "store" / "made").rename(tmp_path / "store" / evaluation.sha256)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "1.json").write_text(json.dumps({"outputs": {"evaluation": evaluation.sha256}}))
    local_runner._drop_stale_cache_entries(tmp_path / "cache", tmp_path / "store")
    assert (tmp_path / "cache" / "1.json").exists() is not is_transient


def test_limits_of_a_judge_are_not_part_of_the_cache_key() -> None:
    judge = {"base_url": "https://judge.example/v1", "model": "rater", "criteria": "Brevity."}
    other = {**judge, "api_key_env": "KEY", "concurrency": 9, "timeout_seconds": 7, "retries": 1, "max_tokens": 5}
    customizations = [
        load_customization(
            None,
            [
                "fine_tuning.objective=grpo",
                "fine_tuning.packing=false",
                f"fine_tuning.grpo.rewards={json.dumps(entries)}",
            ],
        )
        for entries in (
            [{"kind": "f1"}, {"kind": "judge", "judge": one}] for one in (judge, other, {**judge, "model": "other"})
        )
    ]
    plans = [input_resolution.build_fine_tuning_plan(config, "0a") for config in customizations]
    keys = [input_resolution.drop_placement(plan) for plan in plans]
    assert keys[0] == keys[1] != keys[2]
    for config, plan in zip(customizations, json.loads(json.dumps(plans)), strict=True):
        assert recipe_from_plan(plan["config"], plan["where"]) == config.fine_tuning


def test_parallelism_is_not_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The keys of cache and registry ignore `parallel`; the training receives it."""
    serial, other = (
        load_customization(
            None, ["fine_tuning.sweep.vary={learning_rate: [1e-4, 1e-3]}", f"fine_tuning.sweep.parallel={n}"]
        )
        for n in (1, 3)
    )
    plans = [input_resolution.build_fine_tuning_plan(config, "0a") for config in (serial, other)]
    assert input_resolution.drop_placement(plans[0]) == input_resolution.drop_placement(plans[1])
    assert "where" not in input_resolution.build_fine_tuning_plan(load_customization(None), "0a")
    parameters_of_steps: list[Any] = []

    def produce(stage: str, parameters: dict[str, Any], build: Any, links: str) -> Any:
        parameters_of_steps.append(parameters)
        work = SimpleNamespace(
            reporter=SilentReporter(),
            workdir=SimpleNamespace(state=tmp_path),
            mlflow_run=None,
            spending=None,
            load_artifact=lambda *_: None,
        )
        return SimpleNamespace(sha256=build(tmp_path, work))

    monkeypatch.setattr(pipeline_step, "produce_artifact", produce)
    monkeypatch.setattr(pipeline_step, "copy_report", lambda *_: None)
    monkeypatch.setattr(pipeline_step, "describe_to_kfp", lambda *_: None)
    monkeypatch.setattr(model_loading, "resolve_base_model", lambda *_: None)
    monkeypatch.setattr(sweep, "tune", lambda dataset, out, config, **_: config.sweep.parallel)
    outputs = dict.fromkeys(("report", "links", "tuned_model"), SimpleNamespace(path=str(tmp_path / "report")))
    version = json.dumps({"uri": "git+file:///there@a"})
    parallelism = [
        fine_tuning.python_func(**input_resolution.list_parameters(plan), dataset="d", version=version, **outputs)
        for plan in plans
    ]
    assert parallelism == [(1,), (3,)]
    assert (
        parameters_of_steps[0]
        == parameters_of_steps[1]
        == {"plan": input_resolution.drop_placement(plans[0]), "dataset": "d", "revision": "a"}
    )


def test_invalid_tools_end_the_fine_tuning_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset")
    turns = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": '<tool_call>{"name"'}]
    row = {**dict.fromkeys(SCHEMA.names), "id": "a1", "source": "log", "messages": turns, "tools": '[{"name": "f"}]'}
    parquet.write_table(pa.Table.from_pylist([row], SCHEMA), dataset.path / "test.parquet")
    step = SimpleNamespace(load_artifact=lambda *_: dataset)
    monkeypatch.setattr(pipeline_step, "produce_artifact", lambda _, __, build, ___: build(tmp_path, step))
    config = load_customization(None, ["evaluation.tasks=[{kind: tool_calls}]"])
    given = input_resolution.list_parameters(input_resolution.build_fine_tuning_plan(config, "0a"))
    outputs = dict.fromkeys(("report", "links", "tuned_model"), SimpleNamespace(path=str(tmp_path / "report")))
    with pytest.raises(InputError, match=r"test\.parquet: row a1 of log: the row has the expected call "):
        fine_tuning.python_func(**given, dataset="d", version='{"uri": "there@a"}', **outputs)


def test_missing_vllm_is_reported_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_installation, "unavailable_reason", lambda: None)
    monkeypatch.setattr(serving_env, "missing_reason", lambda: None)
    monkeypatch.setattr(serving_env, "missing_vllm_reason", lambda: "vLLM is not installed")
    assert input_resolution.get_unproven_reason(load_customization(None)) is None
    reason = input_resolution.get_unproven_reason(load_customization(None, ["triton_packaging.backend=vllm"]))
    assert reason == "vLLM is not installed"
    assert "not be promoted: vLLM is not installed. Install vLLM" in input_resolution.format_unproven_warning(reason)
