"""One stage at a time, from folder to folder, and serving what came out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from components.common.errors import EXIT_REFUSED
from pipelines.cli.app import (
    HERE,
    AsJson,
    Config,
    LauncherOption,
    Output,
    Overwrite,
    PlatformOption,
    RefusalFails,
    Sets,
    WorkdirOption,
    app,
    load_config,
    show,
    where,
    working,
)


@app.command()
def curate(
    sources: Annotated[list[str], typer.Argument(help="Files, globs or folders of raw text; demo:python-docs is the demo dataset.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Clean, deduplicate and split raw text into a dataset."""
    customization = load_config(config, sets)
    from components.data_curation.stage import curate as stage
    from pipelines import material
    from pipelines.summary import unreadable

    settings = customization.data_curation
    settings.sources = sources
    with working("curate", as_json, workdir) as (reporter, work):
        found = material.look_at(customization, work, reporter)
        before = material.fetch_earlier(customization, found.earlier, work, reporter)
        made = stage(
            found.sources,
            output,
            settings,
            seed=customization.seed,
            reporter=reporter,
            overwrite=overwrite,
            benchmarks=found.benchmarks,
            earlier=before,
        )
    rows, splits = made.manifest.summary["rows"], made.manifest.summary["splits"]
    result = {"dataset": str(output), "sha256": made.sha256, "rows": rows, "splits": splits}
    dropped = ", ".join(f"{n} {reason}" for reason, n in rows["rejected"].items()) or "none"
    lines = [f"{rows['kept']} of {rows['in']} rows kept; dropped: {dropped}; unreadable: {rows['quarantined']}"]
    lines += unreadable(output)
    show(result, as_json, [*lines, f"splits: {splits}", f"report: {output / 'report.html'}"])


@app.command()
def finetune(
    dataset: Annotated[Path, typer.Argument(help="A curated dataset's folder.")],
    output: Output,
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    platform: PlatformOption = None,
    launcher: LauncherOption = "",
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Tune the base model on a dataset. Killed and started again, it goes on from the last checkpoint."""
    customization, place = load_config(config, sets), where(platform, launcher)
    from components.common import artifacts, places
    from components.fine_tuning.sweep import tune as stage

    with working("finetune", as_json, workdir) as (reporter, work), places.using(dataset, customization.fine_tuning.base_model):
        found = artifacts.read(dataset, "dataset")
        options: dict[str, Any] = {"seed": customization.seed, "state": work.state, "reporter": reporter, "overwrite": overwrite}
        made = stage(found, output.absolute(), customization.fine_tuning, dataset_uri=str(dataset), where=place, **options)
    names = ("steps", "tokens", "train_loss", "validation_loss", "tokens_per_second", "resumed_from")
    result = {"model": str(output), "sha256": made.sha256} | {name: made.manifest.summary[name] for name in names}
    told = [f"{result['steps']} steps, {result['tokens']} tokens, training loss {result['train_loss']:.4f}"]
    if sweep := made.manifest.summary.get("sweep"):
        result["sweep"] = sweep["recipes"]
        best = ", ".join(f"{key}={value}" for key, value in sweep["recipes"][0]["recipe"].items())
        told.insert(0, f"the best of {len(sweep['recipes'])} recipes: {best}")
    show(result, as_json, [*told, f"report: {output / 'report.html'}"])


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A tuned model's folder, or a base model's source.")],
    dataset: Annotated[Path, typer.Option("--dataset", help="The dataset whose test split is measured.")],
    output: Output,
    incumbent: Annotated[str, typer.Option("--incumbent", help="The model in service, to compare with as well.")] = "",
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    fail_on_refusal: RefusalFails = False,
    as_json: AsJson = False,
) -> int:
    """Measure a model against its base and the model in service, and give the verdict with its reasons."""
    customization = load_config(config, sets)
    from components.common import artifacts, models, places
    from components.evaluation.stage import evaluate as stage

    with working("evaluate", as_json, workdir) as (reporter, work), places.using(model, dataset, *([incumbent] if incumbent else [])):
        opened = models.open_model(model, reporter)
        other = models.open_model(incumbent, reporter) if incumbent else None
        found = artifacts.read(dataset, "dataset")
        options: dict[str, Any] = {"seed": customization.seed, "state": work.state, "reporter": reporter, "overwrite": overwrite}
        made = stage(opened, found, output, customization.evaluation, incumbent=other, **options)
    summary = made.manifest.summary
    result = {"evaluation": str(output), "sha256": made.sha256} | {n: summary[n] for n in ("verdict", "reasons", "metrics")}
    show(result, as_json, [f"verdict: {summary['verdict']}", *summary["reasons"], f"report: {output / 'report.html'}"])
    return EXIT_REFUSED if fail_on_refusal and summary["verdict"] == "refused" else 0


@app.command()
def package(
    model: Annotated[str, typer.Argument(help="A tuned model's folder, or a base model's source.")],
    output: Output,
    adapter: Annotated[
        list[str], typer.Option("--adapter", metavar="NAME=MODEL_DIR", help="A further adapter over the same base, for vllm. Repeatable.")
    ] = [],  # noqa: B006
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    overwrite: Overwrite = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Make a Triton model repository and prove it in a real server."""
    customization = load_config(config, sets)
    from components.common import models, places
    from components.triton_packaging import form
    from components.triton_packaging.stage import package as stage

    named = form.named(adapter)
    with working("package", as_json, workdir) as (reporter, _), places.using(model, *named.values()):
        opened = models.open_model(model, reporter)
        others = {name: models.open_model(folder, reporter) for name, folder in named.items()}
        options: dict[str, Any] = {"seed": customization.seed, "reporter": reporter, "overwrite": overwrite, "adapters": others}
        made = stage(opened, output, customization.triton_packaging, **options)
    names = ("model_name", "backend", "proof")
    result = {"repository": str(output), "sha256": made.sha256} | {name: made.manifest.summary[name] for name in names}
    proof = result["proof"]
    told = (
        f"{proof['matched']} of {proof['golden_prompts']} golden prompts answered alike"
        if proof
        else f"unproven: {made.manifest.summary['unproven_because']}"
    )
    show(result, as_json, [told, f"talk to it: tuneline serve {output}"])


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="A packaged Triton repository's folder.")],
    http_port: Annotated[int, typer.Option("--http-port", help="0: any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="0: any free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", help="0: any free one.")] = 8002,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Serve a packaged model with a real Triton until Ctrl-C."""
    from components.common import places, progress
    from components.triton_packaging.serve import serve as stage

    with working("serve", as_json, HERE) as (reporter, _), places.using(repository):

        def ready(server: Any) -> None:
            progress.close(reporter)
            name = server.models[0] if server.models else "MODEL"
            told = f'curl -s {server.http_url}/v2/models/{name}/generate -d \'{{"text_input": "What does os.path.join do?"}}\''
            result = {
                "http": server.http_url,
                "grpc": server.grpc_url,
                "metrics": server.metrics_url,
                "models": server.models,
                "pid": os.getpid(),
            }
            show(result, as_json, [f"ready on {server.http_url} (gRPC {server.grpc_url}); Ctrl-C ends it", told])
            sys.stdout.flush()

        stage(repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, host=host, on_ready=ready, reporter=reporter)
