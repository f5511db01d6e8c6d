"""Memory and disk that the stages of a customization need, before data and weights exist.

`tuneline doctor` compares it with a machine or with platform.yaml. The formulas are those of `tuneline size` and of the
dry run, which also counts rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from components.common.models import resource_formulas
from components.common.models.accelerators import Accelerator
from components.common.models.model_shape import ModelShape
from components.common.models.quantizations import CALIBRATION_ROWS, MAX_CALIBRATION_TOKENS, find_quantization
from components.fine_tuning.config import FineTuningConfig
from pipelines.config.customization_config import Customization
from pipelines.planning import sizing, sizing_input
from pipelines.planning.sizing import SizingRequest, TrainingPlan

# Lengths tried where fine_tuning.max_length is null: a run shortens the rows until they fit.
LENGTHS = (sizing.DEFAULT_LENGTH, 1024, 512, 256, 128, 64)


@dataclass(frozen=True)
class RunDemand:
    """Bytes that a customization needs.

    Attributes:
        config: the recipe that needs the most memory; of a sweep, one recipe.
        plan: the layout of the training, with the memory of each process by part.
        length: tokens of the rows in this estimate.
        host: host memory by stage; of the training, on one node.
        disk: bytes that a run adds to the workdir, by part, without the dataset.
        assumptions: facts that the configuration leaves open.
    """

    config: FineTuningConfig
    plan: TrainingPlan
    length: int
    host: dict[str, int]
    disk: dict[str, int]
    assumptions: tuple[str, ...]


def estimate_demand(
    config: Customization,
    memory_bytes: float,
    *,
    on_gpu: bool,
    nodes: int = 1,
    evaluates_on_gpu: bool | None = None,
) -> RunDemand:
    """Return the demand of the recipe that needs the most memory.

    Args:
        config: the customization.
        memory_bytes: memory of a GPU; without GPUs, of the host.
        on_gpu: whether GPUs train.
        nodes: nodes of the training.
        evaluates_on_gpu: whether GPUs evaluate. None: like the training.

    Raises:
        UsageError: the shape of the base model is not known.
    """
    recipes = list(config.fine_tuning.recipes.values())
    trainings = [_plan_training(recipe, memory_bytes, on_gpu=on_gpu) for recipe in recipes]
    request, plan = max(trainings, key=lambda training: training[1].memory["total"])
    recipe = recipes[trainings.index((request, plan))]
    shape, local = request.shape, max(1, plan.gpus // nodes)
    sharded, full = recipe.is_sharded, request.adapter is None
    evaluation = resource_formulas.estimate_evaluation_memory(
        shape, batch_tokens=config.evaluation.batch_tokens, gpu=on_gpu
    )
    loading = resource_formulas.estimate_loading_memory(shape, processes=local, sharded=sharded, full=full)
    proven = config.triton_packaging.prove
    host = {
        "fine_tuning": loading if on_gpu else local * plan.memory["total"],
        # weights pass through host memory on their way to a GPU
        "evaluation": resource_formulas.estimate_loading_memory(shape, processes=1, sharded=False, full=False)
        if (on_gpu if evaluates_on_gpu is None else evaluates_on_gpu)
        else evaluation,
        "triton_packaging": resource_formulas.estimate_packaging_memory(shape, proven=proven),
    }
    entry = find_quantization(config.evaluation.quantization)
    if entry and entry.is_calibrated:
        tokens = CALIBRATION_ROWS * min(request.length, MAX_CALIBRATION_TOKENS)
        calibration = resource_formulas.estimate_calibration_memory(shape, tokens=tokens)
        host |= {stage: max(host[stage], calibration) for stage in ("evaluation", "triton_packaging")}
    checkpoint = resource_formulas.estimate_checkpoint_bytes(shape, full=full)
    return RunDemand(
        recipe,
        plan,
        request.length,
        host,
        _estimate_disk(config, recipe, shape, checkpoint, on_gpu),
        request.assumptions,
    )


def _estimate_disk(
    config: Customization, recipe: FineTuningConfig, shape: ModelShape, checkpoint: int, on_gpu: bool
) -> dict[str, int]:
    whole = recipe.adaptation_spec.trains_all_weights or recipe.merge
    return {
        "checkpoints": checkpoint * recipe.max_checkpoints,
        "model": resource_formulas.estimate_model_bytes(shape, whole=whole),
        "repository": resource_formulas.estimate_repository_bytes(
            shape, gpu=on_gpu, quantization=config.triton_packaging.quantization
        ),
    }


def _plan_training(
    recipe: FineTuningConfig, memory_bytes: float, *, on_gpu: bool
) -> tuple[SizingRequest, TrainingPlan]:
    """Return the request and the plan of a recipe; of open lengths, the longest that fits."""
    share = memory_bytes / (1 if on_gpu else recipe.processes)
    device = Accelerator("device", bf16=0.0, source="", node=recipe.processes, memory=share / 1e9)
    request = sizing_input.build_request(recipe, device, recipe.processes, "", on_gpu=on_gpu)
    if recipe.max_length is not None:
        return request, sizing.build_plan(request, recipe.processes)
    for length in LENGTHS:
        request = replace(request, length=length)
        plan = sizing.build_plan(request, recipe.processes)
        if plan.fits:
            break
    return request, plan
