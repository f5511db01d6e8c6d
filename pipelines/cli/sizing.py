"""`tuneline size`: requirements of customizations, estimated before hardware is bought or reserved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.application import JsonOption, SetOption, app, load_config, open_reporter, print_result

DATA, PLACE, SERVING, STORAGE, MONEY = "Data", "Layout", "Serving", "Storage", "Cost and energy"
SHARED = "Shared cluster"

GpuOption = Annotated[
    str,
    typer.Option(
        "--gpu",
        help="GPU type, or TYPE:COUNT. Default COUNT: the recipe's processes if more than one, otherwise the smallest "
        "number that has enough memory and meets --deadline-hours.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="Name of a public model, path of a config.json, or number of parameters. Default: fine_tuning.base_model.",
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option("-c", "--config", "--from", readable=False, help="customization.yaml with the recipe."),
]
PrecisionOption = Annotated[str, typer.Option("--precision", help="Compute precision: bf16 or fp8.")]
StackOption = Annotated[
    str,
    typer.Option(
        "--stack", help="Training software. standard: FSDP or DeepSpeed, as in tuneline. tuned: Megatron-LM and NeMo."
    ),
]
AdaptationOption = Annotated[
    str,
    typer.Option(
        "--adaptation",
        help="Adaptation: full, lora, qlora, ia3, p_tuning or prompt_tuning. Default: the adaptation of the recipe.",
    ),
]
RankOption = Annotated[int | None, typer.Option("--rank", min=1, help="LoRA rank. Default: the rank in the recipe.")]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help="Objective: sft, dpo, kto, orpo, simpo, grpo or rloo. Default: the objective of the recipe.",
    ),
]
DatasetOption = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        help="Dataset artifact that determines the number of tokens and the mean length.",
        rich_help_panel=DATA,
    ),
]
TokensOption = Annotated[
    float | None, typer.Option("--tokens", min=1, max=1e18, help="Number of tokens per epoch.", rich_help_panel=DATA)
]
RowsOption = Annotated[
    int | None, typer.Option("--rows", min=1, max=10**15, help="Number of training rows.", rich_help_panel=DATA)
]
MeanLengthOption = Annotated[
    float | None,
    typer.Option(
        "--mean-length",
        min=1,
        max=1e9,
        help="Mean number of tokens per row or, for preference pairs, per answer including its prompt. Default: the value of --length.",
        rich_help_panel=DATA,
    ),
]
EpochsOption = Annotated[
    float | None,
    typer.Option(
        "--epochs",
        min=0.001,
        max=1e6,
        help="Number of epochs. Default: the number in the recipe.",
        rich_help_panel=DATA,
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=8,
        max=10**9,
        help="Length of the longest row in tokens. Default: the length in the recipe, or 2048.",
        rich_help_panel=DATA,
    ),
]
PackingOption = Annotated[
    bool | None,
    typer.Option(
        "--packing/--no-packing",
        help="Pack rows into sequences of --length tokens. Default: the setting in the recipe.",
        rich_help_panel=DATA,
    ),
]
MicroBatchOption = Annotated[
    int | None,
    typer.Option(
        "--micro-batch",
        min=1,
        help="Rows per GPU in one forward pass. Default: the number in the recipe, or the largest number that fits.",
        rich_help_panel=PLACE,
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        help="Rows per optimizer step. Default: the batch size of the recipe.",
        rich_help_panel=PLACE,
    ),
]
RecomputationOption = Annotated[
    str,
    typer.Option(
        "--recomputation",
        help="Recomputation of activations: auto, on or off. Default: the setting in the recipe.",
        rich_help_panel=PLACE,
    ),
]
StageOption = Annotated[
    int | None,
    typer.Option(
        "--zero-stage",
        min=0,
        max=3,
        help="ZeRO stage (FSDP: 3). Default: the stage of the recipe's strategy. For a recipe with strategy ddp and one "
        "process: 0 if the model fits, 3 if it does not.",
        rich_help_panel=PLACE,
    ),
]
TensorOption = Annotated[
    int, typer.Option("--tensor", min=1, help="Degree of tensor parallelism.", rich_help_panel=PLACE)
]
PipelineOption = Annotated[
    int, typer.Option("--pipeline", min=1, help="Degree of pipeline parallelism.", rich_help_panel=PLACE)
]
ContextOption = Annotated[
    int, typer.Option("--context", min=1, help="Degree of context parallelism.", rich_help_panel=PLACE)
]
OffloadOption = Annotated[
    str,
    typer.Option(
        "--offload", help="State to offload to the host: optimizer or all. Default: no offload.", rich_help_panel=PLACE
    ),
]
GenerationShareOption = Annotated[
    float,
    typer.Option(
        "--generation-share",
        min=0,
        max=0.99,
        help="Share of the training time that grpo, rloo and distill spend on generating answers.",
        rich_help_panel=PLACE,
    ),
]
DeadlineHoursOption = Annotated[
    float | None,
    typer.Option(
        "--deadline-hours",
        min=0.01,
        max=1e6,
        help="Maximum training time in the typical case, in hours.",
        rich_help_panel=PLACE,
    ),
]
ModelsOption = Annotated[
    int, typer.Option("--models", min=1, help="Number of models trained at the same time.", rich_help_panel=PLACE)
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=10**9,
        help="Number of concurrent requests that the serving GPUs must handle.",
        rich_help_panel=SERVING,
    ),
]
InputTokensOption = Annotated[
    int, typer.Option("--input-tokens", min=1, help="Tokens per prompt.", rich_help_panel=SERVING)
]
OutputTokensOption = Annotated[
    int, typer.Option("--output-tokens", min=1, help="Tokens per answer.", rich_help_panel=SERVING)
]
WeightsPrecisionOption = Annotated[
    str,
    typer.Option(
        "--weights-precision", help="Precision of the served weights: bf16, fp8 or int4.", rich_help_panel=SERVING
    ),
]
CachePrecisionOption = Annotated[
    str, typer.Option("--cache-precision", help="Precision of the KV cache: bf16 or fp8.", rich_help_panel=SERVING)
]
RawOption = Annotated[
    str, typer.Option("--raw", help="Size of the raw data of one model, such as 200GB.", rich_help_panel=STORAGE)
]
VersionsOption = Annotated[
    int,
    typer.Option("--versions", min=1, help="Number of dataset and model versions to keep.", rich_help_panel=STORAGE),
]
CheckpointsOption = Annotated[
    int,
    typer.Option(
        "--checkpoints", min=1, help="Number of checkpoints to keep per training run.", rich_help_panel=STORAGE
    ),
]
CheckpointMinutesOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-minutes", min=1, max=1e6, help="Checkpoint interval in minutes.", rich_help_panel=STORAGE
    ),
]
StallBudgetOption = Annotated[
    float,
    typer.Option(
        "--stall-budget",
        min=0.001,
        max=0.5,
        help="Maximum share of the training time spent on checkpoints.",
        rich_help_panel=STORAGE,
    ),
]
WriteRateOption = Annotated[
    str,
    typer.Option(
        "--write-rate",
        help="Storage write rate in bytes per second, such as 2GB. Default: the required rate.",
        rich_help_panel=STORAGE,
    ),
]
GpuHourPriceOption = Annotated[
    float | None, typer.Option("--gpu-hour-price", min=0, max=1e9, help="Price of a GPU-hour.", rich_help_panel=MONEY)
]
KwhPriceOption = Annotated[
    float | None, typer.Option("--kwh-price", min=0, max=1e9, help="Price of a kWh.", rich_help_panel=MONEY)
]
PueOption = Annotated[
    float,
    typer.Option("--pue", min=1, max=10, help="Power usage effectiveness of the data center.", rich_help_panel=MONEY),
]
DemandOption = Annotated[
    list[str],
    typer.Option(
        "--demand",
        metavar="COUNTxMODEL",
        help="Customizations of a model per month, such as 20x8b, for a cluster that all models share. Repeatable.",
        rich_help_panel=SHARED,
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        max=512,
        help="Number of nodes. Default: the smallest number that meets --max-wait-hours.",
        rich_help_panel=SHARED,
    ),
]
MaxWaitHoursOption = Annotated[
    float,
    typer.Option(
        "--max-wait-hours",
        min=0,
        max=1e4,
        help="Maximum wait for GPUs in hours, for 90% of the customizations.",
        rich_help_panel=SHARED,
    ),
]
TeamsOption = Annotated[
    int,
    typer.Option(
        "--teams",
        min=0,
        max=1000,
        help="Number of teams for estimating the weekly capacity; each team always has one customization in progress. 0: enough teams to use every GPU.",
        rich_help_panel=SHARED,
    ),
]
QueueOption = Annotated[
    str,
    typer.Option("--queue", help="Kueue's queueing strategy: BestEffortFIFO or StrictFIFO.", rich_help_panel=SHARED),
]
ReadRateOption = Annotated[
    str,
    typer.Option(
        "--read-rate",
        help="Storage read rate in bytes per second, such as 4GB. Default: the required rate.",
        rich_help_panel=SHARED,
    ),
]
StorageNodeOption = Annotated[
    str,
    typer.Option(
        "--storage-node",
        help="Type of PowerScale node: f210. Estimate the required number of these storage nodes.",
        rich_help_panel=SHARED,
    ),
]
StorageNodeRateOption = Annotated[
    str,
    typer.Option(
        "--storage-node-rate",
        help="Measured rate of a storage node in bytes per second, such as 2GB. Default: the rate of its ports.",
        rich_help_panel=SHARED,
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of the simulated arrivals and durations.", rich_help_panel=SHARED)
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", help="HTML page to write, with plots, formulas and assumptions."),
]


@app.command("size")
def size_customizations(
    gpu: GpuOption = "h200",
    model: ModelOption = "",
    config: RecipeOption = None,
    sets: SetOption = [],  # noqa: B006
    precision: PrecisionOption = "bf16",
    stack: StackOption = "standard",
    adaptation: AdaptationOption = "",
    rank: RankOption = None,
    objective: ObjectiveOption = "",
    dataset: DatasetOption = None,
    tokens: TokensOption = None,
    rows: RowsOption = None,
    mean_length: MeanLengthOption = None,
    epochs: EpochsOption = None,
    length: LengthOption = None,
    packing: PackingOption = None,
    micro_batch: MicroBatchOption = None,
    global_batch: GlobalBatchOption = None,
    recomputation: RecomputationOption = "",
    stage: StageOption = None,
    tensor: TensorOption = 1,
    pipeline: PipelineOption = 1,
    context: ContextOption = 1,
    offload: OffloadOption = "",
    generation_share: GenerationShareOption = 0.7,
    deadline_hours: DeadlineHoursOption = None,
    models: ModelsOption = 1,
    concurrency: ConcurrencyOption = None,
    input_tokens: InputTokensOption = 1024,
    output_tokens: OutputTokensOption = 256,
    weights_precision: WeightsPrecisionOption = "bf16",
    cache_precision: CachePrecisionOption = "bf16",
    raw: RawOption = "",
    versions: VersionsOption = 3,
    checkpoints: CheckpointsOption = 2,
    checkpoint_minutes: CheckpointMinutesOption = 30.0,
    stall_budget: StallBudgetOption = 0.05,
    write_rate: WriteRateOption = "",
    gpu_hour_price: GpuHourPriceOption = None,
    kwh_price: KwhPriceOption = None,
    pue: PueOption = 1.0,
    demand: DemandOption = [],  # noqa: B006
    nodes: NodesOption = None,
    max_wait_hours: MaxWaitHoursOption = 24.0,
    teams: TeamsOption = 0,
    queue: QueueOption = "BestEffortFIFO",
    read_rate: ReadRateOption = "",
    storage_node: StorageNodeOption = "",
    storage_node_rate: StorageNodeRateOption = "",
    seed: SeedOption = 42,
    report: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate GPUs, memory, time, storage, energy and cost of a customization, without data, weights or torch.

    With --demand, size a cluster that several models share, from a simulation of its queue and storage.
    """
    from components.common.artifacts import output_paths
    from pipelines.planning import size_results
    from pipelines.planning.size_options import SizeOptions

    options = SizeOptions(
        gpu=gpu, model=model, precision=precision, stack=stack, adaptation=adaptation, rank=rank, objective=objective,
        dataset=dataset, tokens=tokens, rows=rows, mean_length=mean_length, epochs=epochs, length=length,
        packing=packing,
        micro_batch=micro_batch, global_batch=global_batch, recomputation=recomputation, zero_stage=stage,
        tensor=tensor, pipeline=pipeline, context=context, offload=offload, generation_share=generation_share,
        deadline_hours=deadline_hours, models=models,
        concurrency=concurrency, input_tokens=input_tokens, output_tokens=output_tokens,
        weights_precision=weights_precision, cache_precision=cache_precision,
        raw=raw, versions=versions, checkpoints=checkpoints, checkpoint_minutes=checkpoint_minutes,
        stall_budget=stall_budget, write_rate=write_rate,
        gpu_hour_price=gpu_hour_price, kwh_price=kwh_price, pue=pue,
        demand=demand, nodes=nodes, max_wait_hours=max_wait_hours, teams=teams, queue=queue, read_rate=read_rate,
        storage_node=storage_node, storage_node_rate=storage_node_rate, seed=seed,
    )  # fmt: skip
    if report:
        output_paths.check_file(report, inputs=[config] if config else [], example="size.html")
    with open_reporter("size", as_json) as reporter:
        result = size_results.size(load_config(config, sets), options, reporter)
    if report:
        output_paths.write_file(report, result.render_page())
    print_result(result.as_dict(), as_json, result.format_lines)
