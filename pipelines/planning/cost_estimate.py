"""Estimated cost of a planned run, compared with the budgets before anything runs."""

from __future__ import annotations

from typing import Any

from components.common.cost import stage_cost
from components.common.cost.cost_rates import format_figures
from components.common.cost.stage_cost import JOULES_PER_KWH, Cost
from components.common.models import compute_devices
from components.common.runtime import cpu_cores
from components.common.runtime.errors import ConfigurationError
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.runs import run_costs

Json = dict[str, Any]
MODEL_STAGES = ("fine_tuning", "evaluation", "triton_packaging")  # the stages that compute with the model


def add_cost(
    estimate: Json, config: Customization, workdir: Workdir, platform: Platform, planned: dict[str, Cost] | None = None
) -> Json:
    """Return the estimate of a dry run with its cost under `cost`.

    Args:
        estimate: the estimate.
        config: the customization.
        workdir: the workdir, whose runs count against the budgets.
        platform: rates and the budgets of teams.
        planned: cost of the earlier runs of a chain by team; this one is added.

    Raises:
        ConfigurationError: the cost exceeds a budget, with what is spent already.
    """
    meter = run_costs.build_meter(workdir, config, platform.cost_rates, platform.team_budgets)
    cost = estimate_cost(estimate, config)
    if planned is not None:
        earlier = planned.setdefault(config.team, stage_cost.add_costs([]))
        meter = run_costs.charge_team(meter, earlier)
        planned[config.team] = stage_cost.add_costs([earlier, cost])
    if exceeded := meter.list_exceeded(cost):
        raise ConfigurationError(
            f"the estimated cost exceeds the budget: {'; '.join(exceeded)}",
            hint="Raise the limit, or reduce the number of steps, rows or evaluation items.",
        )
    unknown = [name for name, seconds in estimate["seconds"].items() if seconds is None and name != "total"]
    warnings = [*estimate["warnings"], *meter.list_unmeasurable()]
    return {**estimate, "warnings": warnings, "cost": {**meter.rates.convert(cost), "without": unknown}}


def estimate_cost(estimate: Json, config: Customization) -> Cost:
    """Return the cost of the stages whose time is estimated.

    Model stages use every thread of this machine, or one GPU and one core for each process; other steps use one core.
    """
    has_gpu, cost = estimate["memory"]["device"] == "gpu", dict.fromkeys(stage_cost.TIMES, 0.0)
    watts = compute_devices.get_design_watts(compute_devices.get_device_name("cuda")) if has_gpu else None
    processes = max(recipe.processes for recipe in config.fine_tuning.recipes.values())
    for stage, seconds in estimate["seconds"].items():
        if seconds is None or stage == "total":
            continue
        count = processes if stage == "fine_tuning" else 1
        cost["seconds"] += seconds
        if has_gpu and stage in MODEL_STAGES:
            cost["gpu_seconds"] += seconds * count
            cost["cpu_seconds"] += seconds * count
        else:
            cost["cpu_seconds"] += seconds * (cpu_cores.get_thread_count() if stage in MODEL_STAGES else 1)
    if watts:
        cost["rated_gpu_seconds"] = cost["gpu_seconds"]
        cost["rated_kwh"] = watts * cost["gpu_seconds"] / JOULES_PER_KWH
    return cost


def format_cost(cost: Json) -> str:
    """Return the line of a dry run with the cost."""
    left_out = f"; without {', '.join(cost['without'])}" if cost["without"] else ""
    return f"{'cost':<10}{format_figures(cost)}{left_out}"
