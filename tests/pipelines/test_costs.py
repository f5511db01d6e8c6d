"""Recorded costs of runs, their budgets, and `tuneline costs`. Runs are folders that the tests write."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.artifacts import artifact_folder, code_digest
from components.common.cost.budgets import Budget
from components.common.cost.cost_rates import CostRates, Prices
from components.common.runtime.errors import ConfigurationError
from components.common.workspace.artifact_store import Workdir
from components.data_curation.quality_scoring.scoring_inputs import ScoringInputs
from pipelines.config.customization_config import Customization, load_customization, parse_values
from pipelines.config.platform_config import Platform, load_platform
from pipelines.planning import cost_estimate
from pipelines.runs import local_runner, run_costs
from pipelines.runs.run_folder import Run
from pipelines.steps import input_resolution
from pipelines.steps.curation_inputs import CurationInputs
from tests.pipelines.command import COMMAND, answer, answer_in_process, environment, refusal, run_in_process, tuneline
from tests.pipelines.project import run

HOUR = 3600.0
PRICES = "prices: {cpu_hour: 2, kwh: 1, gib_month: 3, currency: EUR}\npower: {cpu_core_watts: 500}\n"
RATES = CostRates(prices=Prices(cpu_hour=2.0, currency="EUR"))


def write_run(
    workdir: Path,
    name: str,
    stages: dict[str, dict[str, Any]],
    status: str = "finished",
    customization: Customization | None = None,
    **values: Any,
) -> Run:
    """Write the folder of a run: its state, configuration, and one start and end for each stage."""
    folder = workdir / "runs" / name
    folder.mkdir(parents=True)
    recorded = {"status": status, "started": time.time() - HOUR, "ended": time.time(), "where": "elsewhere", **values}
    (folder / "run.json").write_text(json.dumps(recorded))
    if customization:
        (folder / "customization.yaml").write_text(yaml.safe_dump(customization.model_dump(mode="json")))
    with (folder / "events.jsonl").open("w") as file:
        for stage, cost in stages.items():
            end = {"event": "finished", "seconds": 0.0, "cpu_seconds": 0.0, "gpu_seconds": 0.0, **cost}
            for event in ({"event": "started", "pid": 1}, end):
                file.write(json.dumps({"time": 1.0, "stage": stage, **event}) + "\n")
    return Run(folder)


def test_cost_of_a_run_is_the_sum_of_its_stages_and_cached_ones_are_separate(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "costs").mkdir(parents=True)
    cost = {"stage": "data_curation", "seconds": HOUR, "cpu_seconds": 4 * HOUR, "gpu_seconds": 0.0}
    (store / "costs" / "d1.json").write_text(json.dumps(cost))
    stages = {
        "data_curation": {"cached": True, "cpu_seconds": 36.0},
        "fine_tuning": {"seconds": HOUR, "cpu_seconds": 2 * HOUR},
    }
    artifacts = {"dataset": str(store / "d1"), "model": str(store / "m1")}
    summary = run_costs.summarize_costs(
        write_run(tmp_path, "r", stages, result={"artifacts": artifacts}, rates=RATES.model_dump())
    )
    assert (summary["cpu_hours"], summary["cost"]) == (2.01, 4.02)
    assert summary["stages"]["fine_tuning"]["cost"] == 4.0
    assert summary["cached"] == {"data_curation": run_costs.CostRates.convert(RATES, cost)}
    assert summary["complete"]


def test_killed_step_makes_the_cost_incomplete(tmp_path: Path) -> None:
    killed = write_run(tmp_path, "r", {"resolve": {"seconds": 60.0, "cpu_seconds": 30.0}}, status="running")
    with killed.events.open("a") as file:
        for seconds, event in ((10.0, "started"), (100.0, "step")):
            file.write(json.dumps({"time": seconds, "stage": "fine_tuning", "event": event, "name": "x"}) + "\n")
    summary = run_costs.summarize_costs(killed)
    assert not summary["complete"]
    assert summary["hours"] == pytest.approx(150 / HOUR, abs=1e-5)
    assert run_costs.format_costs(summary).startswith("at least ")


def test_attempts_of_a_run_count_against_its_budget(tmp_path: Path) -> None:
    config = parse_values({"budget": {"hours": 5}}, "test")
    other = parse_values({"seed": 7}, "test")
    stages = {"fine_tuning": {"seconds": HOUR, "cpu_seconds": HOUR}}
    write_run(tmp_path, "20260101-000000-aaaa", stages, customization=config)
    write_run(tmp_path, "20260102-000000-aaaa", stages, "interrupted", customization=Customization())
    write_run(tmp_path, "20260103-000000-aaaa", stages, customization=other)
    write_run(tmp_path, "20260104-000000-aaaa", stages, "failed", customization=config)
    [account] = run_costs.build_meter(Workdir(tmp_path), config, RATES, {}).accounts
    assert (account.name, account.spent["seconds"]) == ("budget", 2 * HOUR)
    assert run_costs.build_meter(Workdir(tmp_path), Customization(), RATES, {}).accounts == []


def test_runs_of_the_month_count_against_the_budget_of_the_team(tmp_path: Path) -> None:
    stages = {"fine_tuning": {"seconds": HOUR, "cpu_seconds": HOUR}}
    write_run(tmp_path, "a", stages, team="search")
    write_run(tmp_path, "b", stages, "failed", team="search")
    write_run(tmp_path, "c", stages, team="other")
    write_run(tmp_path, "d", stages, team="search", started=1.0)
    config = parse_values({"team": "search"}, "test")
    meter = run_costs.build_meter(Workdir(tmp_path), config, RATES, {"search": Budget(cost=3), "other": Budget(cost=1)})
    [account] = meter.accounts
    assert (account.name, account.spent["cpu_seconds"]) == ("team_budgets.search", 2 * HOUR)
    assert meter.describe_exhausted(HOUR_OF_WORK) == (
        "team_budgets.search.cost",
        "team_budgets.search.cost is used up: 6 of 3 EUR",
    )


HOUR_OF_WORK = {"seconds": HOUR, "cpu_seconds": HOUR, "gpu_seconds": 0.0}


def test_costs_are_grouped_and_priced(tmp_path: Path) -> None:
    stages = {"fine_tuning": {"seconds": HOUR, "cpu_seconds": HOUR}}
    (tmp_path / "platform.yaml").write_text(PRICES)
    write_run(tmp_path / "1", "a", stages, team="search", model="m")
    write_run(tmp_path / "1", "b", stages, "failed", team="search", model="n")
    write_run(tmp_path / "2", "c", stages, model="n", started=1.0)
    folders = ("--workdir", "1", "--workdir", "2")
    result = answer_in_process("costs", "--by", "team", *folders, "-p", "platform.yaml", cwd=tmp_path)
    by_team = {group["key"]: group for group in result["costs"]}
    assert by_team.keys() == {"", "search"}
    assert (by_team["search"]["runs"], by_team["search"]["cpu_hours"]) == (2, 2.0)
    assert by_team["search"]["cost"] == pytest.approx(2 * 2.0 + 2 * 0.5)
    assert (by_team["search"]["energy"], by_team["search"]["currency"]) == ("estimated", "EUR")
    unpriced = answer_in_process("costs", "--by", "model", *folders, "--since", "2000-01-01", cwd=tmp_path)
    assert [(group["key"], group["runs"], group["cost"]) for group in unpriced["costs"]] == [
        ("m", 1, None),
        ("n", 1, None),
    ]
    text = run_in_process("costs", *folders, cwd=tmp_path).stdout
    assert "* excludes cpu hours, kwh: the price is not known" in text
    error = refusal(2, "costs", "--since", "yesterday", cwd=tmp_path)
    assert error["message"] == "--since is 'yesterday'; expected a day as YYYY-MM-DD"


def test_storage_counts_from_the_build_of_an_artifact_until_its_deletion(tmp_path: Path) -> None:
    model = tmp_path / "store" / "m1"
    artifact_folder.claim_folder(model, "key")
    (model / "weights").write_bytes(b"1" * 1000)
    artifact_folder.publish(model, "model", payload=["weights"], inputs=[], config={}, seed=0, key="key", summary={})
    runs = {}
    for name, is_cached in (("built", False), ("cached", True)):
        runs[name] = write_run(tmp_path, name, {"fine_tuning": {"cached": is_cached}}, "interrupted")
        with runs[name].events.open("a") as file:
            file.write(json.dumps({"time": 1000.0, "stage": "fine_tuning", "event": "result", "model": "m1"}) + "\n")
            file.write(json.dumps({"time": 1001.0, "stage": "fine_tuning", "event": "finished", "cached": is_cached}))
    assert run_costs.measure_storage(runs["built"], 1010.0) == (1000, 10_000.0)
    assert run_costs.measure_storage(runs["built"], 900.0) == (1000, 0.0), "the clock was set back"
    assert run_costs.measure_storage(runs["cached"], 1010.0) == (0, 0.0)
    shutil.rmtree(model)
    assert run_costs.measure_storage(runs["built"], 1010.0) == (0, 0.0)


def test_damaged_records_and_a_clock_that_was_set_back_leave_the_other_costs(tmp_path: Path) -> None:
    damaged = {"seconds": float("nan"), "cpu_seconds": "many"}
    run = write_run(tmp_path, "a", {"resolve": {"cpu_seconds": HOUR}, "data_curation": damaged}, started="x", rates=7)
    with run.events.open("a") as file:
        for seconds, event in ((100.0, "started"), (10.0, "step")):
            file.write(json.dumps({"time": seconds, "stage": "fine_tuning", "event": event}) + "\n")
        file.write('{"stage": "fine_tuning", "event": "progress"}\n{"stage"')
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "run.json").write_text("{")
    (tmp_path / "store" / "costs").mkdir(parents=True)
    (tmp_path / "store" / "costs" / "d1.json").write_text('{"seconds": NaN, "cpu_seconds": 1, "gpu_seconds": 0}')
    result = answer_in_process("costs", "--workdir", ".", "--workdir", tmp_path, cwd=tmp_path)
    assert [(group["key"], group["hours"], group["cpu_hours"], group["complete"]) for group in result["costs"]] == [
        ("a", 0, 1, False),
        ("b", 0, 0, True),
    ]
    assert result["workdirs"] == [str(tmp_path)], "a workdir counts once"
    assert run_costs.stage_cost.read_cost(tmp_path / "store", "d1") is None


def test_workdir_without_matching_runs_has_no_costs(tmp_path: Path) -> None:
    write_run(tmp_path / "used", "a", {"resolve": {}})
    for folder, since, text in (
        ("missing", "", "no recorded runs; start a run with `tuneline run`\n"),
        ("used", "9000-01-01", "no recorded runs since 9000-01-01\n"),
    ):
        options = ("--workdir", folder, *(("--since", since) if since else ()))
        assert answer_in_process("costs", *options, cwd=tmp_path)["costs"] == []
        assert run_in_process("costs", *options, cwd=tmp_path).stdout == text
    assert not (tmp_path / "missing").exists()


def test_budget_and_team_are_part_of_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        code_digest, "code_sha256", lambda stage: stage
    )  # takes seconds; does not read the configuration

    def build_plans(config: Customization) -> list[Any]:
        sources = CurationInputs([], [], [], "", "", ScoringInputs())
        return [
            input_resolution.build_curation_plan(config, sources),
            input_resolution.build_fine_tuning_plan(config, "base"),
            input_resolution.build_evaluation_plan(config, None, []),
            input_resolution.build_packaging_plan(config, None),
        ]

    values = {"fine_tuning": {"max_length": 64, "micro_batch_size": 1}}  # automatic values depend on the device
    limited = {**values, "budget": {"hours": 1}, "team": "a"}
    assert build_plans(parse_values(limited, "test")) == build_plans(parse_values(values, "test"))
    assert not {"budget", "team"} & Customization().model_dump().keys(), "recorded configurations stay as they are"


def build_estimate(**seconds: float | None) -> dict[str, Any]:
    return {"seconds": {**seconds, "total": None}, "memory": {"device": "cpu"}, "warnings": []}


def test_dry_run_refuses_an_estimate_beyond_the_budget(tmp_path: Path) -> None:
    estimate = build_estimate(data_curation=HOUR, fine_tuning=HOUR, evaluation=None)
    enough = parse_values({"budget": {"hours": 2.5}}, "test")
    result = cost_estimate.add_cost(estimate, enough, Workdir(tmp_path), Platform())
    assert (result["cost"]["hours"], result["cost"]["without"]) == (2.0, ["evaluation"])
    assert "without evaluation" in cost_estimate.format_cost(result["cost"])
    short = parse_values({"budget": {"hours": 1.5}}, "test")
    with pytest.raises(ConfigurationError) as refused:
        cost_estimate.add_cost(estimate, short, Workdir(tmp_path), Platform())
    assert refused.value.message == "the estimated cost exceeds the budget: budget.hours is 1.5; the estimate is 2"


def test_dry_run_of_a_chain_adds_the_estimates_of_a_team(tmp_path: Path) -> None:
    estimate, planned = build_estimate(fine_tuning=HOUR), dict[str, Any]()
    platform = Platform(team_budgets={"search": Budget(hours=1.5)})
    search, other = (parse_values({"team": team, "budget": {"hours": 1.2}}, "test") for team in ("search", "other"))
    for config in (search, other, other):  # the budget of a run does not count the runs before it
        cost_estimate.add_cost(estimate, config, Workdir(tmp_path), platform, planned)
    with pytest.raises(
        ConfigurationError, match=r"team_budgets.search.hours is 1.5; the estimate is 2, including 1 already used"
    ):
        cost_estimate.add_cost(estimate, search, Workdir(tmp_path), platform, planned)


def test_budget_of_a_later_team_is_checked_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runner, "run", None)
    write_run(tmp_path / "wd", "a", {"fine_tuning": {"seconds": HOUR}}, team="search")
    (tmp_path / "platform.yaml").write_text("team_budgets: {search: {hours: 1}}")
    (tmp_path / "first.yaml").write_text("team: other")
    (tmp_path / "second.yaml").write_text("team: search")
    chain = ("run", "-c", "first.yaml", "-c", "second.yaml", "-p", "platform.yaml", "--workdir", "wd", "--json")
    process = run_in_process(*chain, cwd=tmp_path)
    assert process.returncode == 75
    assert "team_budgets.search.hours is used up: 1 of 1" in json.loads(process.stdout)["error"]["message"]


@pytest.mark.parametrize("key", ["budget.kwh", "prices.cpu_hour", "power.gpu_watts", "pue", "team_budgets.a.cost"])
def test_boolean_is_no_amount(key: str, tmp_path: Path) -> None:
    """YAML reads `on` and `yes` as true, which Pydantic reads as 1."""
    *sections, name = key.split(".")
    (tmp_path / "file.yaml").write_text(
        "".join(f"{section}: {{" for section in sections) + f"{name}: yes" + "}" * len(sections)
    )
    with pytest.raises(ConfigurationError, match=f"{key}: found true; expected a number, not a boolean"):
        load_customization(tmp_path / "file.yaml") if sections == ["budget"] else load_platform(tmp_path / "file.yaml")


@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.triton
@pytest.mark.stress
def test_run_stopped_by_its_budget_resumes_to_equal_digests(first_digests: dict[str, str], project: Path) -> None:
    """Stress: a whole run in several attempts. The budget of an attempt allows little more than its first step, `resolve`.

    The moment at which a budget stops a training depends on the speed of the machine; the tests of the training stop it
    after a known step.
    """
    platform = project / "prices.yaml"
    platform.write_text(PRICES)
    command = ("run", "-c", "customization.yaml", "--workdir", "budgeted", "-p", platform, "--set", "team=search")
    limit, shortest, messages = 1e-4, 0.0, [""]
    while "training was saved" not in messages[-1]:
        stopped = tuneline(*command, "--set", f"budget.hours={limit}", "--json", cwd=project)
        assert stopped.returncode == 75, stopped.stdout + stopped.stderr
        error = json.loads(stopped.stdout)["error"]
        assert error["kind"] == "budget"
        messages.append(error["message"])
        assert len(messages) < 20, messages
        [team] = answer("costs", "--by", "team", "--workdir", "budgeted", cwd=project)["costs"]
        status = answer("status", "latest", "--workdir", "budgeted", cwd=project)
        assert (status["state"], status["cost"]["currency"]) == ("interrupted", "EUR")
        shortest = shortest or status["cost"]["hours"]
        limit = team["hours"] + shortest * 1.15 ** len(messages)
    result = run(project, "budgeted", "-p", str(platform), "--set", "budget.hours=10", "--set", "team=search")
    digests = {kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items()}
    assert digests == first_digests
    cost = result["cost"]
    assert cost["cost"] == pytest.approx(2 * cost["cpu_hours"] + cost["kwh"], rel=1e-4)
    assert cost["stages"].keys() >= {"fine_tuning", "evaluation", "triton_packaging"}
    assert cost["cached"].keys() == {"data_curation"}, "an earlier attempt paid for it"
    [total] = answer("costs", "--by", "team", "--workdir", "budgeted", cwd=project)["costs"]
    assert (total["key"], total["runs"]) == ("search", len(messages))
    assert total["hours"] == pytest.approx(team["hours"] + cost["hours"], abs=1e-5)
    assert "cost, EUR" in Path(result["report"]).read_text()


@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.triton
@pytest.mark.stress
@pytest.mark.timeout(3 * 3600)
def test_demo_stopped_by_its_budget_resumes_to_equal_digests(tmp_path: Path) -> None:
    """Stress: the demo twice with a short evaluation. The budget of the second run ends in the middle of its fine-tuning.

    The limit is a cost at a price of CPU time, which other programs on the machine change less than wall time.
    """
    evaluation = ("suite=none", "generations=0", "max_items=64")
    short = [part for value in evaluation for part in ("--set", f"evaluation.{value}")]
    short += ["--set", "model_registry.auto_promote=false"]  # which requires the suite
    (tmp_path / "prices.yaml").write_text("prices: {cpu_hour: 1, currency: EUR}\n")

    def run_demo(workdir: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = [*COMMAND, "run", "--workdir", workdir, "-p", "prices.yaml", *short, *arguments, "--json"]
        process = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=3600)
        assert process.stdout, process.stderr
        return process.returncode, json.loads(process.stdout)

    def read_digests(result: dict[str, Any]) -> dict[str, str]:
        return {
            kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items() if path
        }

    status, whole = run_demo("whole")
    assert status == 0, whole
    costs = {stage: figures["cpu_hours"] for stage, figures in whole["cost"]["stages"].items()}
    earlier = sum(hours for stage, hours in itertools.takewhile(lambda item: item[0] != "fine_tuning", costs.items()))
    limit = earlier + costs["fine_tuning"] / 2
    status, stopped = run_demo("budgeted", "--set", f"budget.cost={limit}")
    assert (status, stopped["error"]["kind"]) == (75, "budget"), stopped
    saved = re.search(r"training was saved after step (\d+)", stopped["error"]["message"])
    assert saved, stopped
    status, resumed = run_demo("budgeted", "--set", f"budget.cost={10 * limit}")
    assert status == 0, resumed
    assert read_digests(resumed) == read_digests(whole)
    model = artifact_folder.read(Path(resumed["artifacts"]["model"]), "model").manifest
    assert model.summary["resumed_from"] == int(saved[1])
    assert resumed["cost"]["cached"].keys() >= {"data_curation"}, "the stopped attempt paid for it"
