"""Recorded cost of local runs, by stage and in sum, and the meter of a new run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from components.common.artifacts import artifact_folder
from components.common.cost import stage_cost
from components.common.cost.budgets import Budget, BudgetAccount, SpendingMeter
from components.common.cost.cost_rates import GIB, CostRates, Figures, format_figures
from components.common.cost.stage_cost import Cost
from components.common.pipeline_step import STAGE_BY_ARTIFACT
from components.common.runtime.errors import ArtifactDamagedError
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization
from pipelines.runs import run_folder, run_status
from pipelines.runs.run_folder import Run

Json = dict[str, Any]
SECONDS_PER_DAY = 86400
UNPAID_KEYS = ("budget", "team")  # keys that do not affect a run's results


def list_stage_costs(run: Run) -> list[Json]:
    """Return the cost of each step that a run has executed: {"name", "cached", "measured", **cost}, in order.

    Of a step that was killed or is running, only the wall time up to its last event is known ("measured" is False).
    """
    costs: dict[str, Json] = {}
    started: dict[str, float] = {}
    for event in run_status.read_events(run):
        name = event["stage"]
        started.setdefault(name, event["time"])
        if event["event"] in ("finished", "failed"):
            costs[name] = {"name": name, "cached": bool(event.get("cached")), "measured": True}
            costs[name] |= stage_cost.add_costs([event])
        else:
            seconds = event["time"] - started[name]
            wall_time = stage_cost.add_costs([{"seconds": seconds}])
            costs[name] = {"name": name, "cached": False, "measured": False, **wall_time}
    return list(costs.values())


def sum_costs(runs: Sequence[Run]) -> Cost:
    """Return the sum of the costs of runs."""
    return stage_cost.add_costs(cost for run in runs for cost in list_stage_costs(run))


def summarize_costs(run: Run, result: Json | None = None, rates: CostRates | None = None) -> Json:
    """Return the figures of a run's cost, of its stages, and of the cached artifacts when they were built.

    Args:
        run: the run.
        result: the run's result; default: the recorded one.
        rates: prices and power; default: those that the run recorded.

    Returns:
        The object under `cost` of `tuneline run --json`, described in docs/costs.md.
    """
    values, stages = run.read(), list_stage_costs(run)
    rates = rates or CostRates.model_validate(values.get("rates") or {})
    earlier = {}
    for kind, path in ((result or values.get("result") or {}).get("artifacts") or {}).items():
        stage = STAGE_BY_ARTIFACT[kind]
        has_built = any(cost["name"] == stage and not cost["cached"] for cost in stages)
        if path and not has_built and (cost := stage_cost.read_cost(Path(path).parent, Path(path).name)):
            earlier[stage] = rates.convert(cost)
    return {
        **rates.convert(stage_cost.add_costs(stages)),
        "complete": all(stage["measured"] for stage in stages),
        "stages": {stage["name"]: rates.convert(stage) for stage in stages},
        "cached": earlier,
    }


def measure_storage(run: Run, until: float) -> tuple[int, float]:
    """Return the bytes of the artifacts that a run built and the store still has, and their byte-seconds until a time."""
    values = run.read()
    built = {cost["name"] for cost in list_stage_costs(run) if not cost["cached"]}
    size, ended = 0, float(values.get("ended", until))
    for kind, path in ((values.get("result") or {}).get("artifacts") or {}).items():
        if path and STAGE_BY_ARTIFACT[kind] in built:
            try:
                size += sum(file.bytes for file in artifact_folder.read_manifest(Path(path)).files)
            except ArtifactDamagedError:  # deleted since
                continue
    return size, size * max(until - ended, 0.0)


def find_attempts(workdir: Workdir, config: Customization) -> list[Run]:
    """Return the unfinished runs that a run with this configuration resumes, newest first.

    These are the runs of the workdir with the same configuration, apart from `budget` and `team`, since the last one
    that finished.
    """
    recorded_text = yaml.safe_dump(config.model_dump(mode="json"))  # as a run records it
    expected, attempts = _drop_unpaid(yaml.safe_load(recorded_text)), []
    for run in run_folder.list_runs(workdir):
        try:
            recorded = yaml.safe_load((run.folder / "customization.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            continue
        if not isinstance(recorded, dict) or _drop_unpaid(recorded) != expected:
            continue
        if run.read().get("status") == "finished":
            break
        attempts.append(run)
    return attempts


def _drop_unpaid(values: Json) -> Json:
    return {name: value for name, value in values.items() if name not in UNPAID_KEYS}


def build_meter(
    workdir: Workdir, config: Customization, rates: CostRates, team_budgets: Mapping[str, Budget]
) -> SpendingMeter:
    """Return the meter of a new run, with the cost of its earlier attempts and of its team in this month."""
    accounts = []
    if config.budget.limits:
        spent = sum_costs(find_attempts(workdir, config))
        accounts.append(BudgetAccount(name="budget", budget=config.budget, spent=spent))
    if (budget := team_budgets.get(config.team)) and budget.limits:
        month = get_month(time.time())
        runs = [run for run in run_folder.list_runs(workdir) if run.read().get("team") == config.team]
        spent = sum_costs([run for run in runs if get_month(float(run.read().get("started", 0))) == month])
        accounts.append(BudgetAccount(name=f"team_budgets.{config.team}", budget=budget, spent=spent))
    return SpendingMeter(rates=rates, accounts=accounts)


def get_month(seconds: float) -> str:
    """Return the month of a time in seconds since 1970, in local time, such as 2026-11."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m")


def format_costs(cost: Figures) -> str:
    """Return a line of text with a run's cost."""
    text = format_figures(cost)
    return text if cost["complete"] else f"at least {text}; killed steps are not measured"


def group_costs(runs: Sequence[Run], by: str, rates: CostRates | None, now: float) -> list[Json]:
    """Return the summed figures of runs, with those of the storage of their artifacts until now.

    Args:
        runs: the runs.
        by: run, team, model (the registered name that a run was configured with) or month.
        rates: prices and power of all runs; default: those that each run recorded.
        now: the current time in seconds since 1970.

    Returns:
        For each group and currency "key", "runs", the figures of `CostRates.convert`, "storage_bytes", "gib_days" and
        "complete". The figures are sums of the known ones: None if no run has a known one.
    """
    groups: dict[tuple[str, str], list[Json]] = {}
    for run in sorted(runs, key=lambda run: float(run.read().get("started", 0.0))):
        own = rates or CostRates.model_validate(run.read().get("rates") or {})
        figures = summarize_costs(run, rates=own)
        size, byte_seconds = measure_storage(run, now)
        storage = own.price_storage(byte_seconds)
        if storage is None and byte_seconds:
            figures["unpriced"] = [*figures["unpriced"], "storage"]
        figures |= {"storage_bytes": size, "gib_days": byte_seconds / GIB / SECONDS_PER_DAY, "storage_cost": storage}
        groups.setdefault((_get_group(run, by), figures["currency"]), []).append(figures)
    return [_sum_figures(key, currency, members) for (key, currency), members in groups.items()]


def _sum_figures(key: str, currency: str, members: Sequence[Json]) -> Json:
    def add(*names: str) -> float | None:
        values = [member[name] for member in members for name in names if member[name] is not None]
        return round(sum(values), 6) if values else None

    bases = {member["energy"] for member in members} - {None}
    return {
        "key": key,
        "runs": len(members),
        **{name: add(name) for name in ("hours", "cpu_hours", "gpu_hours", "kwh")},
        "energy": None if not bases else "measured" if bases == {"measured"} else "estimated",
        "storage_bytes": sum(member["storage_bytes"] for member in members),
        "gib_days": add("gib_days"),
        "cost": add("cost", "storage_cost"),
        "currency": currency,
        "unpriced": sorted({name for member in members for name in member["unpriced"]}),
        "complete": all(member["complete"] for member in members),
    }


def _get_group(run: Run, by: str) -> str:
    """Return the key of a run's group; "" if it is not recorded."""
    values = run.read()
    if by == "run":
        return run.name
    if by == "month":
        return get_month(float(values.get("started", 0.0)))
    if by == "team":
        return str(values.get("team") or "")
    return str(values.get("model") or ((values.get("result") or {}).get("mlflow") or {}).get("model_name") or "")
