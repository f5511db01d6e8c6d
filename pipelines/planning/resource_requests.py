"""Requests of the pods that platform.yaml leaves empty, from the estimate of `tuneline size`.

A filled memory request has no limit: an estimate that is too low must not kill a pod after hours of work.
"""

from __future__ import annotations

import math

from components.common.runtime.errors import UsageError
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform, Resources
from pipelines.planning import fit_checks
from pipelines.planning.fit_checks import STAGES


def fill_requests(config: Customization, platform: Platform) -> tuple[Platform, dict[str, str]]:
    """Return the platform with requests for a customization where it sets none, and the filled values by key.

    Memory is filled for the fine-tuning, the evaluation and the packaging; for a training run on CPUs only if rows per pass
    and their length are set. The number of accelerators is that of the processes. Values of platform.yaml stay, and so do
    jobs of a launcher. Nothing is filled if the shape of the base model is not known.
    """
    training = fit_checks.find_training_resources(platform)
    try:
        demand = fit_checks.estimate_platform_demand(config, platform)
    except UsageError:
        return platform, {}
    in_step = training.section == "resources.fine_tuning"  # otherwise a launcher's job trains, and the step waits
    on_gpu = fit_checks.trains_on_gpu(config, training)
    is_known = on_gpu or all(
        recipe.max_length and recipe.micro_batch_size for recipe in config.fine_tuning.recipes.values()
    )
    filled: dict[str, str] = {}
    changed: dict[str, Resources] = {}
    for stage in STAGES:
        resources: Resources = getattr(platform.resources, stage)
        update: dict[str, str | int] = {}
        if not (resources.memory or resources.memory_request) and (stage != "fine_tuning" or (in_step and is_known)):
            update["memory_request"] = f"{fit_checks.suggest_memory_gib(demand.host[stage])}Gi"
        needed = math.ceil(demand.config.processes / training.nodes)
        is_open = resources.accelerator and "accelerators" not in resources.model_fields_set
        if stage == "fine_tuning" and in_step and on_gpu and is_open and needed != resources.accelerators:
            update["accelerators"] = needed
        changed[stage] = resources.model_copy(update=update)
        filled |= {f"resources.{stage}.{key}": str(value) for key, value in update.items()}
    stages = platform.resources.model_copy(update=changed)
    return platform.model_copy(update={"resources": stages}), filled
