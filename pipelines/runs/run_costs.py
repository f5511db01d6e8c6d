"""Recorded cost of local runs, by stage and in sum, and the meter of a new run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from components.common.artifacts import artifact_folder
from components.common.cost import stage_cost
from components.common.cost.budgets import Budget, BudgetAccount, SpendingMeter
from components.common.cost.cost_rates import GIB, CostRates, Figures, format_figures
from components.common.cost.stage_cost import Cost
from components.common.pipeline_step import STAGE_BY_ARTIFACT
from components.common.runtime.errors import ArtifactDamagedError, UsageError
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization
from pipelines.runs import run_folder, run_status
from pipelines.runs.run_folder import Run

Json = dict[str, Any]
SECONDS_PER_DAY = 86400
ACCOUNTING_KEYS = ("budget", "team")  # of a customization; they do not affect its results


def list_stage_costs(run: Run) -> list[Json]:
    """Return the cost of each step that a run has executed: {"name", "cached", "measured", **cost}, in order.

    Of a step that was killed or is running, only the wall time up to its last event is known ("measured" is False).
    Of a step with a damaged record, no cost is known.
    """
    costs: dict[str, Json] = {}
    started: dict[str, float] = {}
    for event in run_status.read_events(run):
        name, now = str(event["stage"]), _read_number(event, "time")
        seconds = max(now - started.setdefault(name, now), 0.0)  # negative if the clock was set back
        is_measured = event["event"] in ("finished", "failed")
        try:
            cost = stage_cost.add_costs([event if is_measured else {"seconds": seconds}])
        except (TypeError, ValueError, OverflowError):
            is_measured, cost = False, stage_cost.add_costs([])
        is_cached = is_measured and bool(event.get("cached"))
        costs[name] = {"name": name, "cached": is_cached, "measured": is_measured, **cost}
    return list(costs.values())


def _read_number(values: Json, name: str) -> float:
    """Return a number of a record; 0 if it is missing or damaged."""
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def read_start(run: Run) -> float:
    """Return the start of a run in seconds since 1970; 0 if it is not recorded."""
    return _read_number(run.read(), "started")


def _read_rates(run: Run) -> CostRates:
    try:
        return CostRates.model_validate(run.read().get("rates") or {})
    except ValidationError:  # damaged, or of another version
        return CostRates()


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
        The object under `cost` of `tuneline run --json`, described in docs/how-to/costs.md.
    """
    values, stages = run.read(), list_stage_costs(run)
    rates = rates or _read_rates(run)
    earlier = {}
    for kind, path in ((result or values.get("result") or {}).get("artifacts") or {}).items():
        stage = STAGE_BY_ARTIFACT.get(kind, "")
        has_built = any(cost["name"] == stage and not cost["cached"] for cost in stages)
        if stage and path and not has_built and (cost := stage_cost.read_cost(Path(path).parent, Path(path).name)):
            earlier[stage] = rates.convert(cost)
    return {
        **rates.convert(stage_cost.add_costs(stages)),
        "complete": all(stage["measured"] for stage in stages),
        "stages": {stage["name"]: rates.convert(stage) for stage in stages},
        "cached": earlier,
    }


def measure_storage(run: Run, until: float) -> tuple[int, float]:
    """Return the bytes of the artifacts that a run built and the store still has, and their byte-seconds until a time.

    The run may have ended before its last stage; its artifacts stay in the store.
    """
    built = {cost["name"] for cost in list_stage_costs(run) if not cost["cached"]}
    results = ((run.read().get("result") or {}).get("artifacts") or {}).values()
    paths = {Path(path).name: Path(path) for path in results if path}  # of a store in a bucket: the local copies
    store, size, byte_seconds = Workdir(run.folder.parent.parent).store, 0, 0.0
    for event in run_status.read_events(run):
        for kind, stage in STAGE_BY_ARTIFACT.items():
            if event["event"] != "result" or event["stage"] != stage or stage not in built or not event.get(kind):
                continue
            try:
                manifest = artifact_folder.read_manifest(paths.get(event[kind], store / str(event[kind])))
            except (UsageError, ArtifactDamagedError, OSError):  # deleted since, damaged or not readable
                continue
            count = sum(file.bytes for file in manifest.files)
            size += count
            byte_seconds += count * max(until - _read_number(event, "time"), 0.0)
    return size, byte_seconds


def find_attempts(workdir: Workdir, config: Customization) -> list[Run]:
    """Return the unfinished runs that a run with this configuration resumes, newest first.

    These are the runs of the workdir with the same configuration, apart from `budget` and `team`, since the last one
    that finished.
    """
    recorded_text = yaml.safe_dump(config.model_dump(mode="json"))  # as a run records it
    expected, attempts = _drop_accounting_keys(yaml.safe_load(recorded_text)), []
    for run in run_folder.list_runs(workdir):
        try:
            recorded = yaml.safe_load((run.folder / "customization.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            continue
        if not isinstance(recorded, dict) or _drop_accounting_keys(recorded) != expected:
            continue
        if run.read().get("status") == "finished":
            break
        attempts.append(run)
    return attempts


def _drop_accounting_keys(values: Json) -> Json:
    return {name: value for name, value in values.items() if name not in ACCOUNTING_KEYS}


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
        spent = sum_costs([run for run in runs if get_month(read_start(run)) == month])
        accounts.append(BudgetAccount(name=f"team_budgets.{config.team}", budget=budget, spent=spent))
    return SpendingMeter(rates=rates, accounts=accounts)


def charge_team(meter: SpendingMeter, cost: Cost) -> SpendingMeter:
    """Return a meter whose account of the team also contains a cost; that of the run stays."""
    accounts = [
        account
        if account.name == "budget"
        else account.model_copy(update={"spent": stage_cost.add_costs([account.spent, cost])})
        for account in meter.accounts
    ]
    return meter.model_copy(update={"accounts": accounts})


def get_month(seconds: float) -> str:
    """Return the month of a time in seconds since 1970, in local time, such as 2026-11."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m")


def format_costs(cost: Figures) -> str:
    """Return a line of text with a run's cost."""
    text = format_figures(cost)
    return text if cost["complete"] else f"at least {text}; CPU and GPU time of killed and running steps is not known"


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
    for run in sorted(runs, key=lambda run: (read_start(run), run.name)):
        own = rates or _read_rates(run)
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
        return get_month(read_start(run))
    if by == "team":
        return str(values.get("team") or "")
    return str(values.get("model") or ((values.get("result") or {}).get("mlflow") or {}).get("model_name") or "")
