"""Checks that a customization fits this machine, or the resources that platform.yaml requests for it.

The memory and disk are those of `run_demand`. Kubernetes kills a pod above its memory limit after hours of work; these
checks need no cluster and no data.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from components.common.launch.kubernetes.pod_scheduling import NodeAffinity
from components.common.launch.kubernetes.pod_settings import PodSettings
from components.common.models import compute_devices, resource_formulas
from components.common.models.accelerators import Accelerator, load_accelerators
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from components.common.runtime.errors import TunelineError, UsageError
from components.common.runtime.filesystem import find_nearest_existing_path
from components.common.workspace.artifact_store import Workdir
from components.fine_tuning.recipe_defaults import MAX_ESTIMATE_RATIO
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform, Resources
from pipelines.definition import pod_spec
from pipelines.kubeflow.preflight import node_checks
from pipelines.kubeflow.preflight.check_context import Check, CheckContext, parse_amount
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError
from pipelines.planning.run_demand import RunDemand, estimate_demand
from pipelines.planning.sizing import GIB
from pipelines.steps import step_launcher

# A request of more than this many times the estimate is reported. The largest known error of an estimate is 32%
# (docs/reference/sizing-validation.md).
MAX_REQUEST_RATIO = 2.0
MIN_REPORTED_BYTES = 16 * GIB  # a smaller surplus is not worth a change
MEMORY_LABEL, PRODUCT_LABEL = "nvidia.com/gpu.memory", "nvidia.com/gpu.product"  # of NVIDIA's GPU feature discovery
MIB = 2**20
FIT_CHECK = "fit of the customization"
STAGES = ("fine_tuning", "evaluation", "triton_packaging")


@dataclass(frozen=True)
class TrainingResources:
    """What platform.yaml requests for each node of the training.

    Attributes:
        section: the section of platform.yaml with the keys.
        accelerators: accelerators of a node. 0: the training uses CPUs. None: not stated.
        memory: bytes of host memory of a node. None: not stated.
        memory_key: the key of the host memory; "" if the section has no such key.
        gpu_bytes: memory of a GPU on the nodes that the scheduling selects. None: not known.
        labels_gpu: whether labels of Kubernetes nodes select the GPU.
    """

    section: str
    nodes: int
    accelerators: int | None
    memory: float | None
    memory_key: str
    gpu_bytes: float | None = None
    labels_gpu: bool = False


def check_machine_fit(config: Customization, workdir: Workdir) -> list[CheckResult]:
    """Return whether the stages fit into the accelerators, the memory and the disk of this machine."""
    try:
        device = compute_devices.select_device(config.fine_tuning.device)
        on_gpu, memory = device != "cpu", compute_devices.get_total_memory_bytes(device)
    except TunelineError as error:
        return [skipped_check(FIT_CHECK, error.message, error.hint)]
    try:
        demand = estimate_demand(config, memory, on_gpu=on_gpu)
    except UsageError:
        return [_skip_unknown_model(config)]
    results = []
    if on_gpu:
        processes, count = demand.config.processes, compute_devices.count_devices(device) or 1
        hint = f"Set fine_tuning.processes to {count} or fewer."
        results.append(check_result("GPUs for fine_tuning", processes <= count, f"{processes} of {count}", hint))
        results.append(_check_gpu_memory(demand, memory))
    total = compute_devices.get_total_memory_bytes("cpu")
    for stage in STAGES:
        needed = demand.host[stage]
        parts = "" if on_gpu or stage != "fine_tuning" else f"; per process: {_format_parts(demand)}"
        found = f"{_format_gib(needed)} of {_format_gib(total)}{parts}"
        hint = "Use a machine with more memory, a smaller model, or an adaptation that needs less memory such as lora."
        needs_change = needed > resource_formulas.MAX_MEMORY_FRACTION * total
        is_certain = needed > MAX_ESTIMATE_RATIO * total
        results.append(check_result(f"memory for {stage}", not needs_change, found, hint, needed=is_certain))
    free, disk = shutil.disk_usage(find_nearest_existing_path(workdir.root)).free, sum(demand.disk.values())
    parts = ", ".join(f"{name} {_format_gib(size)}" for name, size in demand.disk.items())
    found = f"{_format_gib(disk)} required, without datasets ({parts}); {_format_gib(free)} free"
    results.append(
        check_result("disk space for a run", disk <= free, found, "Free some space, or choose another --workdir.")
    )
    return results


def check_platform_fit(config: Customization, platform: Platform, gpu_bytes: float | None = None) -> list[CheckResult]:
    """Return whether the stages fit into the resources that platform.yaml requests, and which requests are wasted.

    Args:
        config: the customization.
        platform: the platform.
        gpu_bytes: memory of a GPU on the cluster's nodes. None: that of the labels in platform.yaml.
    """
    training = find_training_resources(platform)
    gpu_bytes = gpu_bytes or training.gpu_bytes
    try:
        demand = estimate_platform_demand(config, platform, gpu_bytes)
    except UsageError:
        return [_skip_unknown_model(config)]
    on_gpu = trains_on_gpu(config, training)
    results = list(_check_accelerators(demand, training)) if on_gpu else []
    if on_gpu and gpu_bytes:
        results.append(_check_gpu_memory(demand, gpu_bytes))
    elif on_gpu:
        hint = "Select nodes by the label nvidia.com/gpu.product or nvidia.com/gpu.memory, or run the command with permission to read nodes."
        reason = "the memory of the GPU is not known"
        results.append(skipped_check("GPU memory for fine_tuning", reason, hint if training.labels_gpu else ""))
    if training.memory_key:
        key = f"{training.section}.{training.memory_key}"
        results.append(_check_memory_request("fine_tuning", demand.host["fine_tuning"], training.memory, key))
    for stage in STAGES[1:]:
        resources: Resources = getattr(platform.resources, stage)
        amount, key = _read_memory(resources)
        results.append(_check_memory_request(stage, demand.host[stage], amount, f"resources.{stage}.{key}"))
    return results


def trains_on_gpu(config: Customization, training: TrainingResources) -> bool:
    """Return whether the training uses the accelerators of the platform."""
    return training.accelerators != 0 and config.fine_tuning.device != "cpu"


def estimate_platform_demand(config: Customization, platform: Platform, gpu_bytes: float | None = None) -> RunDemand:
    """Return the demand of a customization on a platform.

    Raises:
        UsageError: the shape of the base model is not known.
    """
    training = find_training_resources(platform)
    on_gpu = trains_on_gpu(config, training)
    # Where the memory is not known, every layout fits, and the figures are those of the largest micro-batch.
    memory = (gpu_bytes or training.gpu_bytes) if on_gpu else training.memory
    return estimate_demand(
        config,
        memory or math.inf,
        on_gpu=on_gpu,
        nodes=training.nodes,
        evaluates_on_gpu=bool(platform.resources.evaluation.accelerator),
    )


def build_cluster_checks(config: Customization) -> dict[str, Check]:
    """Return the check of the platform by name; it reads the memory of the GPUs from the labels of the cluster's nodes.

    A caller who may not list nodes gets the comparison with the labels in platform.yaml.
    """

    def check(context: CheckContext) -> Iterator[CheckResult]:
        try:
            nodes = node_checks.list_training_nodes(context)
        except ForbiddenError:
            nodes = []
        known = [size for node in nodes if (size := _find_gpu_bytes(node["metadata"].get("labels") or {}))]
        yield from check_platform_fit(config, context.platform, min(known, default=None))

    return {FIT_CHECK: check}


def list_warnings(config: Customization, platform: Platform) -> list[str]:
    """Return a warning for each stage that does not fit into the request of platform.yaml."""
    results = [result for result in check_platform_fit(config, platform) if not result["ok"] and result["needed"]]
    return [f"{result['name']}: {result['found']}. {result['hint']}" for result in results]


def find_training_resources(platform: Platform) -> TrainingResources:
    """Return what platform.yaml requests for the training: the step's pod, or the job of the launcher."""
    launcher, own = platform.launcher, platform.resources.fine_tuning
    scheduling = pod_spec.merge_scheduling(platform.scheduling, own.scheduling)
    pods = step_launcher.resolve_launcher(platform, scheduling).section
    section = f"launcher.{launcher.kind}"
    if isinstance(pods, PodSettings):
        count = pods.accelerators if pods.accelerator else 0
        memory = float(parse_amount(pods.memory)) if pods.memory else None
        gpu_bytes = _find_gpu_bytes(pods.node_selector, pods.node_affinity)
        return TrainingResources(section, launcher.nodes, count, memory, "memory", gpu_bytes, labels_gpu=True)
    if launcher.kind == "slurm":
        slurm = launcher.slurm  # gpu:TYPE:COUNT, gpu:COUNT or gpu
        name, *rest = slurm.gres.partition("(")[0].split(":")
        count = (int(rest[-1]) if rest and rest[-1].isdigit() else 1) if name == "gpu" else 0
        device = load_accelerators().get(rest[0].lower()) if rest else None
        size = re.fullmatch(r"(\d+)([KMGT]?)", slurm.memory)  # without a unit, megabytes (sbatch --mem)
        memory = float(size[1]) * 1024 ** "KMGT".index(size[2] or "M") * 1024 if size else None
        gpu_bytes = device.memory_bytes if device else None
        return TrainingResources(section, launcher.nodes, count, memory, "memory", gpu_bytes)
    if launcher.kind == "ray":
        return TrainingResources(section, launcher.nodes, None if launcher.ray.accelerator else 0, None, "")
    count = own.accelerators if own.accelerator else 0
    memory, memory_key = _read_memory(own)
    gpu_bytes = _find_gpu_bytes(scheduling.node_selector, scheduling.node_affinity)
    return TrainingResources("resources.fine_tuning", 1, count, memory, memory_key, gpu_bytes, labels_gpu=True)


def _read_memory(resources: Resources) -> tuple[float | None, str]:
    """Return the bytes that a stage's pod requests, or None, and the key that sets them."""
    key = "memory_request" if resources.memory_request else "memory"
    request = getattr(resources, key)
    return (float(parse_amount(request)) if request else None), key


def _find_gpu_bytes(labels: dict[str, str], conditions: list[NodeAffinity] | None = None) -> float | None:
    """Return the memory of a GPU from labels of GPU feature discovery; of several products, the smallest."""
    sizes = [float(labels[MEMORY_LABEL]) * MIB] if labels.get(MEMORY_LABEL, "").isdigit() else []
    products = [labels[PRODUCT_LABEL]] if PRODUCT_LABEL in labels else []
    for condition in conditions or []:
        if condition.weight is None and condition.key == MEMORY_LABEL and condition.operator == "Gt":
            sizes.append(float(condition.values[0]) * MIB)
        if condition.weight is None and condition.key == PRODUCT_LABEL and condition.operator == "In":
            products += condition.values
    found = [device.memory_bytes for product in products if (device := _find_product(product))]
    known = [size for size in found if size]
    return max(sizes, default=None) or min(known, default=None)


def _find_product(product: str) -> Accelerator | None:
    """Return the accelerator of a product such as NVIDIA-H100-80GB-HBM3; the longest driver name applies."""
    plain = product.upper().replace("-", " ")
    matches = [
        device
        for device in load_accelerators().values()
        if device.driver and re.search(rf"\b{device.driver.upper()}\b", plain)
    ]
    # of equal driver names, the one with less memory
    return max(matches, key=lambda device: (len(device.driver), -(device.memory or 0)), default=None)


def _skip_unknown_model(config: Customization) -> CheckResult:
    reason = f"the shape of fine_tuning.base_model {config.fine_tuning.base_model!r} is not known"
    return skipped_check(
        FIT_CHECK, reason, "Estimate the fit with `tuneline size --model` and the path of the model's config.json."
    )


def _check_accelerators(demand: RunDemand, training: TrainingResources) -> Iterator[CheckResult]:
    if training.accelerators is None:  # one per process
        return
    needed, given = math.ceil(demand.config.processes / training.nodes), training.accelerators
    key = f"{training.section}.{'gres' if training.section.endswith('slurm') else 'accelerators'}"
    found = f"{needed} of {given} per node (fine_tuning.processes {demand.config.processes}, nodes {training.nodes})"
    if needed > given:
        yield check_result("GPUs for fine_tuning", False, found, f"Request {needed} in {key}, or lower processes.")
        return
    hint = f"Set fine_tuning.processes to {given * training.nodes}, or request {needed} in {key}; the other GPUs stay idle."
    yield check_result("GPUs for fine_tuning", needed == given, found, hint, needed=False)


def _check_gpu_memory(demand: RunDemand, gpu_bytes: float) -> CheckResult:
    """Compare the memory of a process with that of a GPU; the layout already has the smallest demand that was found."""
    required = demand.plan.memory["total"]
    found = (
        f"{_format_gib(required)} of {_format_gib(gpu_bytes)} per GPU: {_format_parts(demand)}; "
        f"rows of {demand.length:,} tokens, micro-batch {demand.plan.micro_batch}"
    )
    largest = max((name for name in demand.plan.memory if name != "total"), key=lambda name: demand.plan.memory[name])
    action = {
        "weights": "Use fine_tuning.adaptation qlora, or more processes with strategy fsdp2",
        "activations": "Lower fine_tuning.max_length, or set activation_checkpointing to auto",
        "logits": "Lower fine_tuning.max_length",
    }.get(largest, "Use fine_tuning.adaptation lora, or more processes with strategy fsdp2")
    return check_result(
        "GPU memory for fine_tuning",
        demand.plan.fits,
        found,
        f"{action}, or GPUs with more memory. The largest part is {largest}.",
        needed=required > MAX_ESTIMATE_RATIO * gpu_bytes,
    )


def suggest_memory_gib(needed: float) -> int:
    """Return the GiB to request for an estimate in bytes."""
    return math.ceil(needed / resource_formulas.MAX_MEMORY_FRACTION / GIB)


def _check_memory_request(stage: str, needed: float, request: float | None, key: str) -> CheckResult:
    """Compare a stage's host memory with its request, which is also its limit unless `key` is a `memory_request`."""
    name, suggested = f"memory for {stage}", suggest_memory_gib(needed)
    unit = "G" if key.startswith("launcher.slurm") else "Gi"
    if request is None:
        found = f"{_format_gib(needed)}; {key} is not set, and the namespace's default applies"
        return check_result(name, False, found, f"Set {key} to {suggested}{unit} or more.", needed=False)
    found = f"{_format_gib(needed)} of {_format_gib(request)} requested"
    if needed > resource_formulas.MAX_MEMORY_FRACTION * request:
        effect = "a node may run out of memory" if key.endswith("_request") else "a pod above its limit is killed"
        hint = f"Set {key} to {suggested}{unit} or more; {effect}."
        return check_result(name, False, found, hint, needed=needed > MAX_ESTIMATE_RATIO * request)
    is_wasted = request > max(MAX_REQUEST_RATIO * needed, needed + MIN_REPORTED_BYTES)
    hint = f"Lower {key} towards {suggested}{unit} if the data does not require more: other pods cannot use the unused memory."
    return check_result(name, not is_wasted, found, hint, needed=False)


def _format_parts(demand: RunDemand) -> str:
    parts = {name: size for name, size in demand.plan.memory.items() if name != "total" and size}
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def _format_gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
