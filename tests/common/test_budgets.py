"""Figures of a cost, and budgets: arithmetic, labels, absent prices, charged attempts. A fake stands for the GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.common.cost import budgets, cost_rates, stage_cost
from components.common.cost.budgets import Budget, BudgetAccount, BudgetClock, BudgetReachedError, SpendingMeter
from components.common.cost.cost_rates import CostRates, Power, Prices
from components.common.cost.stage_cost import CostClock

HOUR = {"seconds": 3600.0, "cpu_seconds": 7200.0, "gpu_seconds": 0.0}
GPU_HOUR = {**HOUR, "gpu_seconds": 3600.0}


def test_cost_is_the_sum_of_amounts_times_prices() -> None:
    rates = CostRates(prices=Prices(gpu_hour=3.0, cpu_hour=0.05, kwh=0.2, currency="EUR"), pue=1.5)
    figures = rates.convert({**GPU_HOUR, "counted_gpu_seconds": 3600.0, "counted_kwh": 0.6})
    assert (figures["hours"], figures["cpu_hours"], figures["gpu_hours"]) == (1, 2, 1)
    assert (figures["kwh"], figures["energy"]) == (pytest.approx(0.9), "measured")
    assert figures["cost"] == pytest.approx(3.0 + 2 * 0.05 + 0.9 * 0.2)
    assert (figures["currency"], figures["unpriced"]) == ("EUR", [])
    assert cost_rates.format_figures(figures) == "1 GPU-hours, 2 CPU-hours, 0.9 kWh (measured), 3.28 EUR"


def test_estimated_energy_is_design_power_of_the_node_times_time() -> None:
    figures = CostRates().convert({**GPU_HOUR, "rated_gpu_seconds": 3600.0, "rated_kwh": 0.7})
    assert (figures["kwh"], figures["energy"]) == (pytest.approx(0.84), "estimated")
    replaced = CostRates(power=Power(gpu_watts=1000)).convert(
        {**GPU_HOUR, "rated_gpu_seconds": 3600.0, "rated_kwh": 0.7}
    )
    assert replaced["kwh"] == pytest.approx(1.2)
    with_cores = CostRates(power=Power(gpu_watts=1000, cpu_core_watts=10)).convert(GPU_HOUR)
    assert with_cores["kwh"] == pytest.approx(1.0 + 2 * 0.01)


def test_absent_price_or_power_gives_no_figure_instead_of_zero() -> None:
    figures = CostRates().convert(HOUR)
    assert (figures["kwh"], figures["energy"], figures["cost"]) == (None, None, None)
    assert figures["unpriced"] == ["cpu_hours", "kwh"]
    partly = CostRates(prices=Prices(gpu_hour=2.0)).convert(GPU_HOUR)
    assert (partly["cost"], partly["unpriced"]) == (2.0, ["cpu_hours", "kwh"])
    assert "2 without cpu_hours, kwh" in cost_rates.format_figures(partly)
    assert CostRates().price_storage(1e12) is None
    month = CostRates(prices=Prices(gib_month=0.5)).price_storage(2 * 2**30 * 30 * 86400)
    assert month == pytest.approx(1.0)


def test_costs_of_attempts_are_added_to_the_artifact(tmp_path: Path) -> None:
    stage_cost.record_attempt(tmp_path, "fine_tuning", "key", HOUR)
    stage_cost.record_attempt(tmp_path, "fine_tuning", "key", {**GPU_HOUR, "counted_kwh": 0.25})
    added = stage_cost.read_attempts(tmp_path, "fine_tuning", "key")
    assert added == {"seconds": 7200, "cpu_seconds": 14400, "gpu_seconds": 3600, "counted_kwh": 0.25}
    assert stage_cost.read_attempts(tmp_path, "fine_tuning", "other")["seconds"] == 0
    stage_cost.reset_attempts(tmp_path, "fine_tuning", "key")
    assert stage_cost.read_attempts(tmp_path, "fine_tuning", "key")["seconds"] == 0


def test_job_reports_its_cost_to_the_clocks_of_its_step(tmp_path: Path) -> None:
    clock = CostClock()
    lines = [json.dumps({**GPU_HOUR, "rated_kwh": 0.7}), json.dumps(GPU_HOUR), '{"seconds": 1']
    (tmp_path / stage_cost.JOB_COST_FILENAME).write_text("\n".join(lines))
    stage_cost.collect_job_cost(tmp_path, is_local=True)
    spent = clock.read()
    assert (spent["gpu_seconds"], spent["rated_kwh"]) == (7200, 0.7)
    assert spent["cpu_seconds"] < 7200, "the CPU time of children is measured by this process"
    assert spent["seconds"] < 3600
    stage_cost.collect_job_cost(tmp_path, is_local=True)
    assert clock.read()["gpu_seconds"] == 7200, "the file is read once"


def test_counter_measures_the_energy_of_used_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = iter([1000.0, 1000.0 + 3.6e6])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _: "GPU-a",
        nvmlDeviceGetTotalEnergyConsumption=lambda _: next(joules) * 1000,
    )
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_reserved=lambda index: 1,
        get_device_properties=lambda index: SimpleNamespace(uuid="ab"[index], name="NVIDIA H100 80GB HBM3"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    clock = CostClock()
    clock._wall -= 3600
    spent = clock.read()
    assert spent["gpu_seconds"] == pytest.approx(7200, abs=5)
    assert spent["counted_kwh"] == pytest.approx(1.0)
    assert spent["rated_kwh"] == pytest.approx(0.7, abs=0.001), "the GPU without a counter counts with its design power"


def build_meter(**limits: float) -> SpendingMeter:
    return SpendingMeter(
        rates=CostRates(prices=Prices(gpu_hour=2.0, currency="EUR")),
        accounts=[BudgetAccount(name="budget", budget=Budget(**limits))],
    )


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"gpu_hours": 1.5}, "budget.gpu_hours is used up: 2 of 1.5"),
        ({"cost": 4.0}, "budget.cost is used up: 4 of 4 EUR"),
        ({"hours": 2.0}, "budget.hours is used up: 2 of 2"),
    ],
)
def test_budget_is_used_up_by_earlier_and_current_cost(limits: dict[str, float], sentence: str) -> None:
    meter = build_meter(**limits)
    meter.check(GPU_HOUR)
    with pytest.raises(BudgetReachedError) as refused:
        meter.charge(GPU_HOUR).check(GPU_HOUR)
    assert refused.value.message == f"{sentence}; no further stage starts"
    assert refused.value.exit_code == 75
    key = sentence.split()[0]
    assert refused.value.hint == f"Raise {key} in the configuration and run the same command again to resume."


def test_limit_on_an_unknown_amount_is_reported_instead_of_reached() -> None:
    meter = SpendingMeter(accounts=[BudgetAccount(name="team_budgets.a", budget=Budget(cost=1.0, kwh=1.0))])
    assert meter.describe_exhausted(GPU_HOUR) is None
    assert [sentence.split()[0] for sentence in meter.list_unmeasurable()] == [
        "team_budgets.a.cost",
        "team_budgets.a.kwh",
    ]


def test_estimate_beyond_the_budget_is_listed_with_figures() -> None:
    meter = build_meter(gpu_hours=2.5, hours=10).charge(GPU_HOUR)
    assert meter.list_exceeded(GPU_HOUR) == []
    twice = stage_cost.add_costs([GPU_HOUR, GPU_HOUR])
    assert meter.list_exceeded(twice) == ["budget.gpu_hours is 2.5; the estimate is 3, including 1 already used"]


def test_clock_of_a_job_counts_equal_processes_and_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    step = BudgetClock(build_meter(gpu_hours=10))
    dumped = step.dump(peers=2)
    job = BudgetClock.load(dumped, processes=3)
    monkeypatch.setattr(job.clock, "read", lambda: GPU_HOUR)
    assert job.read() == {"seconds": 3600, "cpu_seconds": 7200 * 6, "gpu_seconds": 3600 * 6}
    assert job.describe_exhausted() is None
    monkeypatch.setattr(job.clock, "read", lambda: stage_cost.add_costs([GPU_HOUR, GPU_HOUR]))
    assert job.describe_exhausted() == ("budget.gpu_hours", "budget.gpu_hours is used up: 12 of 10")
    assert BudgetClock.load({}, 1).describe_exhausted() is None


def test_meter_passes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = build_meter(kwh=3.0)
    for name, value in budgets.to_environment(meter).items():
        monkeypatch.setenv(name, value)
    assert budgets.load_meter() == meter
    assert budgets.to_environment(SpendingMeter()) == {}
