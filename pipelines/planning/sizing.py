"""`tuneline size`: GPUs, memory, time, storage, energy and cost of customizations, before anything exists.

The estimate needs a model's shape, a recipe, the amount of data and an accelerator. It imports no torch and reads no rows.
Memory and work come from the formulas that the dry run uses; speed from bands of published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from components.common.models import resource_formulas
from components.common.models.accelerators import Accelerator
from components.common.models.model_shape import ModelShape
from components.common.models.resource_formulas import Offload, ParallelLayout
from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from pipelines.planning import throughput
from pipelines.planning.architectures import Architecture
from pipelines.planning.serving_size import ServingRequest, size_serving
from pipelines.planning.storage_size import StorageRequest, size_storage

GIB = 2**30
Json = dict[str, Any]
ADAPTATIONS = ("full", "lora", "qlora", "p_tuning")
OBJECTIVES = ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "rloo")
GENERATING_OBJECTIVES = ("grpo", "rloo", "distill")
REFERENCE_OBJECTIVES = ("dpo", "kto", "grpo", "rloo")  # the loss compares with the model before the training
DEFAULT_LENGTH = 2048
MICRO_BATCHES = (16, 8, 4, 2, 1)
GPU_COUNTS = (1, 2, 4, *range(8, 1025, 8))
NODE_POWER_FACTOR = 1.2  # of the GPUs' design power: 868 W per H100 and 1,197 W per B200 in MLPerf's power logs
Bound = Literal["memory", "deadline", "GPU count"]


@dataclass(frozen=True)
class SizingRequest:
    """What to size; sizes in tokens, bytes and hours. See `tuneline size --help` for the options.

    Attributes:
        gpus: GPUs of one training run. None: the smallest number that meets the limits.
        adapter: parameters of the adapter. None: all weights are trained.
        rows: training rows, which give the tokens if these are not set.
        tokens: tokens of one epoch. None: those of `rows`; without them the time is left out.
        mean_length: tokens of a row, or of each answer of a pair with its prompt. None: rows fill `length`.
        dropout: whether dropout precedes the update of LoRA.
        fused: whether layers are fused or compiled.
        masked_attention: whether attention has a mask of rows or padding. None: preference objectives have one.
        deepspeed: whether DeepSpeed shards, whose communication buffers count.
        micro_batch: rows per GPU and pass. None: the largest of MICRO_BATCHES that fits without recomputation.
        stage: ZeRO stage; FSDP is stage 3. None: 0 if that fits, otherwise 3.
        recomputation: activation checkpointing; auto enables it if the training does not fit without.
        models: models that are trained at the same time.
        precomputes_reference: whether the reference model has read the rows before the training, and is not in memory.
        on_gpu: whether a GPU trains. On a CPU, `device` is a process's share of the host.
    """

    architecture: Architecture
    device: Accelerator
    gpus: int | None = None
    adaptation: str = "lora"
    objective: str = "sft"
    adapter: int | None = 0
    precision: str = "bf16"
    optimizer_bytes: float = 8.0
    dropout: bool = False
    fused: bool = True
    masked_attention: bool | None = None
    deepspeed: bool = False
    stack: str = "standard"
    length: int = DEFAULT_LENGTH
    mean_length: float | None = None
    packing: bool = False
    micro_batch: int | None = None
    global_batch: int = 16
    rows: int | None = None
    tokens: float | None = None
    epochs: float = 1.0
    recomputation: str = "auto"
    stage: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    offload: Offload = ""
    generation_share: float = 0.7
    deadline_hours: float | None = None
    models: int = 1
    storage: StorageRequest = field(default_factory=StorageRequest)
    serving: ServingRequest | None = None
    gpu_hour_price: float | None = None
    kwh_price: float | None = None
    pue: float = 1.0
    precomputes_reference: bool = False
    on_gpu: bool = True
    assumptions: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The shape of the trained model."""
        return self.architecture.build_shape(adapter=self.adapter)

    @property
    def row_tokens(self) -> float:
        """Tokens of a row that the formulas of work count."""
        return min(self.mean_length or self.length, self.length)

    @property
    def epoch_tokens(self) -> float | None:
        """Tokens of one epoch; None if the amount of data is not known."""
        return self.rows * self.row_tokens * self.sequences if self.tokens is None and self.rows else self.tokens

    @property
    def sequences(self) -> int:
        """Sequences per row: a preference row has two answers, and KTO adds a completion of another row."""
        return 1 if self.objective in ("sft", *GENERATING_OBJECTIVES) else 2

    @property
    def has_reference(self) -> bool:
        """Whether a reference model reads the tokens too."""
        return self.objective in REFERENCE_OBJECTIVES


@dataclass(frozen=True)
class TrainingPlan:
    """A layout on GPUs with its micro-batch, the bytes per GPU by part, and whether activations are recomputed."""

    layout: ParallelLayout
    micro_batch: int
    recomputation: bool
    memory: dict[str, int]
    fits: bool

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.layout.gpus


def size(request: SizingRequest) -> Json:
    """Return the object that `tuneline size --json` prints.

    Raises:
        UsageError: the layout is impossible, or no number of GPUs meets the limits.
    """
    plan, bound, reason = choose_plan(request)
    band, rates = _estimate_rates(request, plan)
    hours = _estimate_hours(request, plan, rates)
    gpu_hours = {case: value * plan.gpus for case, value in hours.items()} if hours else None
    storage = size_storage(
        request.storage, request.architecture, _checkpoint_bytes(request), plan.gpus, request.models, rates
    )
    energy = _estimate_energy(request, plan, hours)
    per_node = max(1, request.device.node // plan.gpus)  # training runs that share a node
    nodes = math.ceil(plan.gpus / request.device.node) * math.ceil(request.models / per_node)
    total = {"gpus": plan.gpus * request.models, "nodes": nodes}
    return {
        "memory_gib_per_gpu": _to_gib(plan.memory["total"]),
        "usable_gib_per_gpu": _to_gib(resource_formulas.MAX_MEMORY_FRACTION * (request.device.memory_bytes or 0.0)),
        "memory": {name: _to_gib(size) for name, size in plan.memory.items() if name != "total"},
        "gpus": plan.gpus,
        "hours": _round_cases(hours),
        "tokens_per_second": _round_cases({case: rate * plan.gpus for case, rate in rates.items()} if rates else None),
        "storage": storage,
        "cost": _estimate_cost(request, gpu_hours, energy),
        "assumptions": [*_list_assumptions(request, plan), *request.assumptions],
        "binds": {"bound": bound, "reason": reason},
        "fits": plan.fits,
        "gpu": request.device.name,
        "model": {"name": request.architecture.name, "source": request.architecture.source,
                  "parameters": request.architecture.parameters, "trainable": request.shape.trainable},
        "layout": {"data": plan.layout.data, "tensor": plan.layout.tensor, "pipeline": plan.layout.pipeline,
                   "context": plan.layout.context, "zero_stage": plan.layout.stage, "micro_batch": plan.micro_batch, "recomputation": plan.recomputation},
        "parallel": {"models": request.models, **total},
        "flops": round(request.epoch_tokens * request.epochs * _count_flops(request, False)) if request.epoch_tokens else None,
        "gpu_hours": _round_cases(gpu_hours),
        "energy": energy,
        "serving": size_serving(request.serving, request.architecture, request.device) if request.serving else None,
        "formulas": _list_formulas(request, band),
    }  # fmt: skip


def _to_gib(size: float) -> float:
    return round(size / GIB, 2)


def _round_cases(values: dict[str, float] | None) -> dict[str, float] | None:
    return {case: float(f"{value:.3g}") for case, value in values.items()} if values else None


def choose_plan(request: SizingRequest) -> tuple[TrainingPlan, Bound, str]:
    """Return the layout of one training run, what limits it, and the reason.

    Raises:
        UsageError: the GPUs do not form the layout, or no number of GPUs is enough.
    """
    split = request.tensor * request.pipeline * request.context
    if request.deadline_hours is not None and request.epoch_tokens is None:
        raise UsageError(
            "--deadline-hours requires the amount of data",
            hint="Add --tokens, --dataset, or --rows and --mean-length.",
        )
    if request.device.memory_bytes is None:
        raise UsageError(
            f"the memory of --gpu {request.device.name} is not known", hint="Choose a GPU type whose memory is known."
        )
    if request.gpus is not None:
        if request.gpus % split:
            raise UsageError(
                f"--gpu: {request.gpus} GPUs cannot form groups of {split} (tensor × pipeline × context parallelism)",
                hint=f"Use a multiple of {split} GPUs.",
            )
        if request.gpus // split * (request.micro_batch or 1) > request.global_batch:
            raise UsageError(
                f"--global-batch {request.global_batch} is too small for {request.gpus // split} data-parallel processes",
                hint=f"Use --global-batch {request.gpus // split * (request.micro_batch or 1)} or more.",
            )
        plan = build_plan(request, request.gpus)
        used = (
            f"{_to_gib(plan.memory['total']):g} of {_to_gib(resource_formulas.MAX_MEMORY_FRACTION * request.device.memory_bytes):g} "
            "usable GiB per GPU"
        )
        return plan, "GPU count" if plan.fits else "memory", used if plan.fits else f"does not fit: {used}"
    smallest: TrainingPlan | None = None
    max_data = max(1, request.global_batch // (request.micro_batch or 1))
    for gpus in (count for count in GPU_COUNTS if count % split == 0 and count // split <= max_data):
        plan = build_plan(request, gpus)
        if not plan.fits:
            continue
        smallest = smallest or plan
        hours = _estimate_hours(request, plan, _estimate_rates(request, plan)[1])
        if request.deadline_hours is None or (hours and hours["typical"] <= request.deadline_hours):
            if plan.gpus > smallest.gpus:
                return (
                    plan,
                    "deadline",
                    f"the training run fits on {format_count(smallest.gpus, 'GPU')}, but would take more than {request.deadline_hours:g} hours",
                )
            return plan, "memory", "one GPU is enough" if gpus == 1 else "the smallest number of GPUs that fits"
    limit = (
        f"the rows of a global batch ({request.global_batch}) limit the number of data-parallel processes to {max_data}"
    )
    if smallest:
        raise UsageError(
            f"the run cannot finish in {request.deadline_hours:g} hours: {limit}",
            hint="Raise --global-batch or --deadline-hours, or choose a faster GPU.",
        )
    raise UsageError(
        f"the training run does not fit on {request.device.name}: {limit}",
        hint="Raise --global-batch, set --tensor, lower --length, or use --adaptation qlora or --offload optimizer.",
    )


def build_plan(request: SizingRequest, gpus: int) -> TrainingPlan:
    """Return the layout on a number of GPUs: the lowest ZeRO stage, and no recomputation, if that fits."""
    split = request.tensor * request.pipeline * request.context
    base = ParallelLayout(gpus // split, request.tensor, request.pipeline, request.context)
    buffers = resource_formulas.ZERO3_BUFFER_BYTES if request.deepspeed else 0
    stages = [request.stage] if request.stage is not None else [0, 3] if base.shards > 1 else [0]
    choices = {"auto": (False, True), "on": (True,), "off": (False,)}[request.recomputation]
    rows = max(1, request.global_batch // base.data)
    sizes = MICRO_BATCHES if request.pipeline == 1 else (1,)  # small micro-batches keep a pipeline busy
    batches = [request.micro_batch] if request.micro_batch else [count for count in sizes if count <= rows]
    plans = (
        _measure_plan(
            request, replace(base, stage=stage, buffer_bytes=buffers if stage == 3 else 0), micro_batch, recomputation
        )
        for stage in stages
        for recomputation in choices
        for micro_batch in batches
    )
    for plan in plans:
        if plan.fits:
            break
    return plan


def _measure_plan(
    request: SizingRequest, layout: ParallelLayout, micro_batch: int, recomputation: bool
) -> TrainingPlan:
    has_pairs = request.objective != "sft"
    memory = resource_formulas.estimate_training_memory(
        request.shape,
        rows=micro_batch * request.sequences,
        length=request.length,
        dropout=request.dropout,
        gpu=request.on_gpu,
        checkpointing=recomputation,
        optimizer_bytes=request.optimizer_bytes,
        four_bit=request.adaptation == "qlora",
        fused=request.fused,
        masked_attention=request.on_gpu
        and (has_pairs if request.masked_attention is None else request.masked_attention),
        whole_logits=has_pairs,
        logit_bytes=0.0 if request.objective == "reward" else None,  # one number for a row
        offload=request.offload,
        reference=request.has_reference and request.adapter is None and not request.precomputes_reference,
        layout=layout,
    )
    capacity = resource_formulas.MAX_MEMORY_FRACTION * (request.device.memory_bytes or 0.0)
    return TrainingPlan(layout, micro_batch, recomputation, memory, memory["total"] <= capacity)


def _count_flops(request: SizingRequest, recomputation: bool) -> float:
    """Return the FLOPs per token, with the forward pass of a reference model."""
    shape, length = request.shape, request.row_tokens
    flops = resource_formulas.estimate_training_flops(shape, length, checkpointing=recomputation)
    return flops + (resource_formulas.estimate_forward_flops(shape, length) if request.has_reference else 0.0)


def _estimate_rates(
    request: SizingRequest, plan: TrainingPlan
) -> tuple[throughput.EfficiencyBand, dict[str, float] | None]:
    """Return the band, and tokens per second and GPU by case."""
    stack = request.stack
    if request.architecture.experts and stack == "tuned":
        stack = "tuned-moe"
    elif request.offload:
        stack = "offload"
    band = throughput.select_band(throughput.load_efficiencies(), request.device.name, request.precision, stack)
    assert band is not None  # every stack has published runs
    work = throughput.MicroBatch(
        _count_flops(request, plan.recomputation),
        plan.micro_batch * request.sequences * (request.length if request.packing else request.row_tokens),
        request.architecture.L,
        request.adaptation == "qlora",
    )
    rates = throughput.estimate_rate(work, request.device, request.precision, band, stack)
    # 1F1B: p stages are idle for p − 1 of m + p − 1 micro-batches (Narayanan et al., arXiv 2104.04473).
    batches = max(1, request.global_batch // (plan.micro_batch * plan.layout.data))
    busy = batches / (batches + request.pipeline - 1)
    return band, {case: rate * busy for case, rate in rates.items()} if rates else None


def _estimate_hours(
    request: SizingRequest, plan: TrainingPlan, rates: dict[str, float] | None
) -> dict[str, float] | None:
    if rates is None or request.epoch_tokens is None:
        return None
    training_share = 1 - request.generation_share if request.objective in GENERATING_OBJECTIVES else 1.0
    tokens = request.epoch_tokens * request.epochs
    return {case: tokens / (rate * plan.gpus) / 3600 / training_share for case, rate in rates.items()}


def _checkpoint_bytes(request: SizingRequest) -> int:
    return resource_formulas.estimate_checkpoint_bytes(request.shape, full=request.adapter is None)


def _estimate_energy(request: SizingRequest, plan: TrainingPlan, hours: dict[str, float] | None) -> Json | None:
    """Return the power of one training run and its energy by case; None if the design power is not known."""
    if request.device.watts is None:
        return None
    kilowatts = NODE_POWER_FACTOR * plan.gpus * request.device.watts / 1000
    energy = {case: kilowatts * value * request.pue for case, value in hours.items()} if hours else None
    return {"kilowatts": round(kilowatts, 2), "pue": request.pue, "kwh": _round_cases(energy)}


def _estimate_cost(request: SizingRequest, gpu_hours: dict[str, float] | None, energy: Json | None) -> Json:
    """Return the cost of one training run by case; None for a part whose price or amount is not known."""
    priced = {
        "gpus": (gpu_hours, request.gpu_hour_price),
        "energy": (energy["kwh"] if energy else None, request.kwh_price),
    }
    parts = {
        name: {case: value * price for case, value in amounts.items()} if amounts and price is not None else None
        for name, (amounts, price) in priced.items()
    }
    known = [part for part in parts.values() if part]
    parts["total"] = {case: sum(part[case] for part in known) for case in throughput.CASES} if known else None
    return {name: _round_cases(values) for name, values in parts.items()}


def _list_assumptions(request: SizingRequest, plan: TrainingPlan) -> list[str]:
    """Return a sentence for each fact that the request does not contain."""
    assumptions = [
        f"a training run may use {resource_formulas.MAX_MEMORY_FRACTION:.0%} of a GPU's memory",
        "batches have no padding, and reading, evaluation and checkpoints overlap with training",
        "the network between GPUs and nodes is as fast as in the published runs",
    ]
    if request.architecture.source.startswith("a typical"):
        assumptions.append(f"the shape of the model is {request.architecture.source}")
    if request.mean_length is None:
        assumptions.append(f"rows have {request.length:,} tokens")
    if request.adapter is not None:
        assumptions.append("published models are stored merged, with all weights in 16 bits")
    if request.objective in GENERATING_OBJECTIVES:
        assumptions.append(
            f"generation takes {request.generation_share:.0%} of the time; the GPUs of a rollout engine are not included"
        )
    if request.sequences == 2:
        again = ", and the reference model reads them once more" if request.has_reference else ""
        assumptions.append(f"tokens are counted for both answers{again}")
    if request.epoch_tokens is None:
        assumptions.append("the amount of data is not given, so time, energy and cost are omitted")
    if request.kwh_price is not None and request.device.watts is None:
        assumptions.append(f"the design power of {request.device.name} is not known; the cost excludes energy")
    if not plan.fits:
        assumptions.append("the training run does not fit; time and cost are those of a GPU with enough memory")
    if request.architecture.experts:
        assumptions.append("experts are sharded like other weights; expert parallelism is not modelled")
        if request.stack == "standard":
            assumptions.append(
                "no speeds of mixture-of-experts models are published for this stack; the estimate uses those of dense models, which are faster"
            )
    return assumptions


def _list_formulas(request: SizingRequest, band: throughput.EfficiencyBand) -> list[Json]:
    """Return formula and source of each quantity."""
    efficiency = f"{band.low:.0%} – {band.typical:.0%} – {band.best:.0%}"
    launches = " – ".join(f"{1000 * throughput.LAUNCH_SECONDS[case]:g}" for case in throughput.CASES)
    serving = [
        {"quantity": "KV cache", "formula": "2·L·k values per token", "source": "docs/how-to/sizing.md"},
        {"quantity": "time per output token", "formula": "at least (weights + KV cache) ÷ bandwidth, and FLOPs ÷ peak FLOP/s",
         "source": "roofline model (Williams et al., 2009)"},
    ]  # fmt: skip
    return [
        {"quantity": "memory", "formula": "weights + gradients + optimizer + activations + logits + process",
         "source": "Korthikanti et al., arXiv 2205.05198; Rajbhandari et al., arXiv 1910.02054; docs/reference/sizing-validation.md"},
        {"quantity": "FLOPs per token", "formula": "full: 6(N−E) + 6·L·q·T; frozen weights: 4(N−E) + 4·L·q·T",
         "source": "docs/reference/sizing-validation.md"},
        {"quantity": "tokens per second", "formula": f"peak FLOP/s × {efficiency} ÷ FLOPs per token, reduced by the time to read "
         "the weights, which matters for small micro-batches" + ("" if request.stack == "tuned" else f"; a micro-batch takes at least {launches} ms per layer"),
         "source": band.basis},
        {"quantity": "energy", "formula": f"{NODE_POWER_FACTOR:g} × GPUs × design power × hours × PUE",
         "source": "MLPerf Training power logs, v4.0 and v5.0"},
        {"quantity": "checkpoint interval", "formula": "√(2 · write time · time between failures)", "source": "Daly, 2006; arXiv 2407.21783"},
        *(serving if request.serving else []),
    ]  # fmt: skip
