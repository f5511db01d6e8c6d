"""Options of `tuneline size` and of `tuneline.size`, and the request that they form with a customization's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.runtime.errors import ConfigurationError, UsageError
from components.common.runtime.reporters import Reporter
from components.common.runtime.validation_errors import describe_validation_error
from pipelines.config.customization_config import Customization
from pipelines.planning import cluster_size, sizing, sizing_input
from pipelines.planning.cluster_size import ClusterRequest
from pipelines.planning.serving_size import ServingRequest
from pipelines.planning.sizing import SizingRequest
from pipelines.planning.storage_size import StorageRequest

CLUSTER_OPTIONS = ("nodes", "teams", "read_rate", "storage_node", "storage_node_rate")


class SizeOptions(BaseModel):
    """Options with the names, defaults and limits of `tuneline size --help`. None and "" stand for the default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    gpu: str = "h200"
    model: str = ""
    precision: str = "bf16"
    stack: str = "standard"
    adaptation: str = ""
    rank: int | None = Field(None, ge=1)
    objective: str = ""
    dataset: Path | None = None
    tokens: float | None = Field(None, ge=1, le=1e18)
    rows: int | None = Field(None, ge=1, le=10**15)
    mean_length: float | None = Field(None, ge=1, le=1e9)
    epochs: float | None = Field(None, ge=0.001, le=1e6)
    length: int | None = Field(None, ge=8, le=10**9)
    packing: bool | None = None
    micro_batch: int | None = Field(None, ge=1)
    global_batch: int | None = Field(None, ge=1)
    recomputation: str = ""
    zero_stage: int | None = Field(None, ge=0, le=3)
    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    offload: str = ""
    generation_share: float = Field(0.7, ge=0, le=0.99)
    deadline_hours: float | None = Field(None, ge=0.01, le=1e6)
    models: int = Field(1, ge=1)
    concurrency: int | None = Field(None, ge=1, le=10**9)
    input_tokens: int = Field(1024, ge=1)
    output_tokens: int = Field(256, ge=1)
    weights_precision: str = "bf16"
    cache_precision: str = "bf16"
    raw: str = ""
    versions: int = Field(3, ge=1)
    checkpoints: int = Field(2, ge=1)
    checkpoint_minutes: float = Field(30.0, ge=1, le=1e6)
    stall_budget: float = Field(0.05, ge=0.001, le=0.5)
    write_rate: str = ""
    gpu_hour_price: float | None = Field(None, ge=0, le=1e9)
    kwh_price: float | None = Field(None, ge=0, le=1e9)
    pue: float = Field(1.0, ge=1, le=10)
    demand: list[str] = []
    nodes: int | None = Field(None, ge=1, le=512)
    max_wait_hours: float = Field(24.0, ge=0, le=1e4)
    teams: int = Field(0, ge=0, le=1000)
    queue: str = "BestEffortFIFO"
    read_rate: str = ""
    storage_node: str = ""
    storage_node_rate: str = ""
    seed: int = Field(42, ge=0)


def parse_options(values: Mapping[str, Any]) -> SizeOptions:
    """Return the options of keyword arguments.

    Raises:
        ConfigurationError: an option does not exist, or its value is outside the limits.
    """
    try:
        return SizeOptions.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(describe_validation_error(error, "size", SizeOptions)) from None


def build_request(
    customization: Customization, options: SizeOptions, reporter: Reporter
) -> SizingRequest | ClusterRequest:
    """Return the training to size or, with a demand, the cluster.

    Args:
        customization: its recipe supplies what the options leave open.
        options: the options.
        reporter: reports the progress of counting a dataset's tokens.

    Raises:
        UsageError: options contradict each other, or a value is unknown.
    """
    if options.demand and options.model:
        raise UsageError(
            "--demand and --model cannot be combined", hint="Specify the models in --demand, as COUNTxMODEL."
        )
    if not options.demand and (given := [name for name in CLUSTER_OPTIONS if getattr(options, name)]):
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{option} requires --demand", hint="Add --demand COUNTxMODEL, such as 20x8b.")
    if options.adaptation:
        customization.set("fine_tuning.adaptation", options.adaptation)
    if options.rank:
        customization.set("fine_tuning.lora.rank", options.rank)
    if options.dataset and (options.tokens or options.rows):
        raise UsageError(
            "--dataset cannot be combined with --tokens or --rows", hint="Omit --dataset, or omit --tokens and --rows."
        )
    if options.dataset:
        recipe = customization.fine_tuning
        longest = options.length or recipe.max_length or sizing.DEFAULT_LENGTH
        tokens, mean = sizing_input.count_dataset_tokens(options.dataset, recipe.base_model, longest, reporter)
        options = options.model_copy(update={"tokens": tokens, "mean_length": mean})
    if not options.demand:
        return _build_training(customization, options, options.model)
    counts = cluster_size.parse_demands(options.demand)
    fractions = customization.data_curation.fractions
    return ClusterRequest(
        tuple((count, _build_training(customization, options, name)) for name, count in counts.items()),
        nodes=options.nodes,
        teams=options.teams,
        max_wait_hours=options.max_wait_hours,
        queue=options.queue,
        read_rate=sizing_input.parse_bytes("--read-rate", options.read_rate),
        write_rate=sizing_input.parse_bytes("--write-rate", options.write_rate),
        held_out_share=fractions.test / fractions.train,
        storage_node=options.storage_node,
        storage_node_rate=sizing_input.parse_bytes("--storage-node-rate", options.storage_node_rate),
        seed=options.seed,
    )


def _build_training(customization: Customization, options: SizeOptions, model: str) -> SizingRequest:
    device, gpus = sizing_input.parse_gpu(options.gpu)
    sizing_input.check_precision(device, options.precision)
    sizing_input.check_choices(
        {
            "--stack": options.stack,
            "--objective": options.objective,
            "--recomputation": options.recomputation,
            "--offload": options.offload,
            "--weights-precision": options.weights_precision,
            "--cache-precision": options.cache_precision,
        }
    )
    storage = StorageRequest(
        sizing_input.parse_bytes("--raw", options.raw) or 0.0,
        options.versions,
        options.checkpoints,
        options.checkpoint_minutes,
        options.stall_budget,
        sizing_input.parse_bytes("--write-rate", options.write_rate),
    )
    serving = ServingRequest(
        options.concurrency or 1,
        options.input_tokens,
        options.output_tokens,
        options.weights_precision,
        options.cache_precision,
    )
    return sizing_input.build_request(
        customization.fine_tuning,
        device,
        gpus,
        model,
        precision=options.precision,
        stack=options.stack,
        objective=options.objective or None,
        rows=options.rows,
        tokens=options.tokens,
        mean_length=options.mean_length,
        epochs=options.epochs,
        length=options.length,
        packing=options.packing,
        micro_batch=options.micro_batch,
        global_batch=options.global_batch,
        recomputation=options.recomputation or None,
        stage=options.zero_stage,
        tensor=options.tensor,
        pipeline=options.pipeline,
        context=options.context,
        offload=options.offload,
        generation_share=options.generation_share,
        deadline_hours=options.deadline_hours,
        models=options.models,
        storage=storage,
        serving=serving if options.concurrency else None,
        gpu_hour_price=options.gpu_hour_price,
        kwh_price=options.kwh_price,
        pue=options.pue,
    )
