"""`tuneline curate`, `finetune`, `evaluate`, `package` and `serve`: single stages that read and write folders."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime.errors import EXIT_REFUSED, UsageError
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    CaptureOption,
    ConfigOption,
    DrainOption,
    FailOnRefusalOption,
    HostOption,
    HttpPortOption,
    JsonOption,
    KeysOption,
    LauncherOption,
    OutputOption,
    OverwriteOption,
    PlatformOption,
    RoutesOption,
    SetOption,
    WorkdirOption,
    app,
    load_config,
    load_launcher,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.common.artifacts.artifact_folder import Artifact
    from pipelines.config.customization_config import Customization

POLL_SECONDS = 0.5  # between two checks that the servers run
ModelArgument = Annotated[str, typer.Argument(help="Folder of a tuned model, or source of a base model.")]


def _build_result(kind: str, output: Path, artifact: Artifact, *names: str) -> dict[str, Any]:
    """Build the JSON object of a stage: folder, digest, and fields of the artifact's summary."""
    summary = artifact.manifest.summary
    return {kind: str(output), "sha256": artifact.sha256, **{name: summary[name] for name in names}}


@app.command()
def curate(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, globs or folders of raw text; demo:python-docs for the demo dataset. Settings of data_curation.sources "
            "with the same path apply. Default: data_curation.sources of the configuration."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Output folder.")] = None,
    preview: Annotated[
        bool,
        typer.Option("--preview", help="Show the first rows of each source as they would be read, and write nothing."),
    ] = False,
    preview_rows: Annotated[
        int, typer.Option("--rows", min=1, help="Number of records of each source in the preview.")
    ] = 3,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    overwrite: OverwriteOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Clean, deduplicate and split raw text into a dataset."""
    customization = load_config(config, sets)
    if not sources and config is None and not sets:
        raise UsageError("Missing argument 'sources'", hint="Give files, globs or folders, or a configuration with -c.")
    if output is None and not preview:
        raise UsageError("Missing option '-o' / '--output'", hint="Give the output folder with -o, or --preview.")
    from components.data_curation.stage import curate as curate_dataset
    from pipelines.cli.source_preview import print_preview
    from pipelines.runs.run_summary import format_evaluation_sets, format_unreadable
    from pipelines.steps import curation_inputs

    if sources:
        _select_sources(customization, sources)
    with open_workdir("curate", as_json, workdir) as (reporter, work):
        if preview or output is None:
            base = config.parent if config else Path.cwd()
            print_preview(customization, base, work, reporter, preview_rows, as_json)
            return
        inputs = curation_inputs.list_inputs(customization, work, reporter)
        earlier = curation_inputs.fetch_earlier_revisions(customization, inputs.earlier_revisions, work, reporter)
        dataset = curate_dataset(
            inputs.sources,
            output,
            customization.data_curation,
            seed=customization.seed,
            reporter=reporter,
            overwrite=overwrite,
            benchmarks=inputs.benchmarks,
            earlier=earlier,
            scoring=inputs.scoring,
            state=work.state,
        )
    result = _build_result("dataset", output, dataset, "rows", "splits", "evaluation_sets")
    rows = result["rows"]
    rejected = ", ".join(f"{count} {reason}" for reason, count in rows["rejected"].items()) or "none"
    lines = [
        f"{rows['kept']} of {rows['in']} rows kept; rejected: {rejected}; unreadable: {rows['quarantined']}",
        *format_unreadable(output),
        *format_evaluation_sets(output),
        "splits: " + ", ".join(f"{split} {count:,}" for split, count in result["splits"].items()),
        f"report: {output / 'report.html'}",
    ]
    print_result(result, as_json, lines)


def _select_sources(customization: Customization, paths: list[str]) -> None:
    """Replace the sources by paths, each with the settings of all entries with this path."""
    from components.data_curation.reading.source_settings import SourceEntry

    stated = customization.data_curation.sources
    customization.data_curation.sources = [
        entry
        for path in paths
        for entry in [one for one in stated if one.path in (path, str(Path(path).absolute()))]
        or [SourceEntry(path=path)]
    ]


@app.command()
def finetune(
    dataset: Annotated[Path, typer.Argument(help="Folder of a curated dataset.")],
    output: OutputOption,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    platform: PlatformOption = None,
    launcher: LauncherOption = "",
    overwrite: OverwriteOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Tune the base model on a dataset. After an interruption, the same command resumes from the last checkpoint."""
    customization, settings = load_config(config, sets), load_launcher(platform, launcher)
    from components.common.artifacts import artifact_folder
    from components.common.workspace import artifact_store
    from components.fine_tuning.sweep import tune

    with (
        open_workdir("finetune", as_json, workdir) as (reporter, work),
        artifact_store.keep_paths_in_use(dataset, customization.fine_tuning.base_model),
    ):
        model = tune(
            artifact_folder.read(dataset, "dataset"),
            output.absolute(),
            customization.fine_tuning,
            dataset_uri=str(dataset),
            launcher_settings=settings,
            seed=customization.seed,
            state=work.state,
            reporter=reporter,
            overwrite=overwrite,
        )
    names = ("steps", "tokens", "train_loss", "validation_loss", "tokens_per_second", "resumed_from")
    result = _build_result("model", output, model, *names)
    lines = [f"{result['steps']} steps, {result['tokens']} tokens, training loss {result['train_loss']:.4f}"]
    if sweep := model.manifest.summary.get("sweep"):
        result["sweep"] = sweep["recipes"]
        best = ", ".join(f"{key}={value}" for key, value in sweep["recipes"][0]["recipe"].items())
        lines.insert(0, f"the best of {len(sweep['recipes'])} recipes: {best}")
    print_result(result, as_json, [*lines, f"report: {output / 'report.html'}"])


@app.command()
def evaluate(
    model: ModelArgument,
    dataset: Annotated[Path, typer.Option("--dataset", help="Dataset that contains the test split.")],
    output: OutputOption,
    incumbent: Annotated[
        str,
        typer.Option(
            "--incumbent", help="Folder of the deployed model, as a second baseline. Default: no second baseline."
        ),
    ] = "",
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    overwrite: OverwriteOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    fail_on_refusal: FailOnRefusalOption = False,
    as_json: JsonOption = False,
) -> int:
    """Compare a model with its base and the incumbent, and decide whether it may be promoted."""
    customization = load_config(config, sets)
    from components.common.artifacts import artifact_folder
    from components.common.models import model_loading
    from components.common.workspace import artifact_store
    from components.evaluation.stage import evaluate as evaluate_model

    with (
        open_workdir("evaluate", as_json, workdir) as (reporter, work),
        artifact_store.keep_paths_in_use(model, dataset, *([incumbent] if incumbent else [])),
    ):
        candidate = model_loading.open_model(model, reporter)
        incumbent_model = model_loading.open_model(incumbent, reporter) if incumbent else None
        evaluation = evaluate_model(
            candidate,
            artifact_folder.read(dataset, "dataset"),
            output,
            customization.evaluation,
            incumbent=incumbent_model,
            seed=customization.seed,
            state=work.state,
            reporter=reporter,
            overwrite=overwrite,
        )
    result = _build_result("evaluation", output, evaluation, "verdict", "reasons", "metrics")
    lines = [f"verdict: {result['verdict']}", *dict.fromkeys(result["reasons"]), f"report: {output / 'report.html'}"]
    print_result(result, as_json, lines)
    return EXIT_REFUSED if fail_on_refusal and result["verdict"] == "refused" else 0


@app.command()
def package(
    model: ModelArgument,
    output: OutputOption,
    adapter: Annotated[
        list[str],
        typer.Option(
            "--adapter",
            metavar="NAME=MODEL_DIR",
            help="Additional adapter of the same base model; vllm only. Repeatable.",
        ),
    ] = [],  # noqa: B006
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    overwrite: OverwriteOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Build a Triton model repository and test it in a Triton server."""
    customization = load_config(config, sets)
    from components.common.models import model_loading
    from components.common.workspace import artifact_store
    from components.triton_packaging import adapter_placement
    from components.triton_packaging.stage import package as package_model

    folders = adapter_placement.parse_adapter_options(adapter)
    with (
        open_workdir("package", as_json, workdir) as (reporter, _),
        artifact_store.keep_paths_in_use(model, *folders.values()),
    ):
        repository = package_model(
            model_loading.open_model(model, reporter),
            output,
            customization.triton_packaging,
            seed=customization.seed,
            reporter=reporter,
            overwrite=overwrite,
            adapters={name: model_loading.open_model(folder, reporter) for name, folder in folders.items()},
        )
    result = _build_result("repository", output, repository, "model_name", "backend", "proof")
    line = f"unproven: {repository.manifest.summary.get('unproven_because')}"
    if proof := result["proof"]:
        line = f"{proof['matched']} of {proof['golden_prompts']} golden prompts matched"
    print_result(result, as_json, [line, f"serve the model: tuneline serve {output}"])


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="Folder of a packaged Triton repository.")],
    http_port: HttpPortOption = 8000,
    host: HostOption = "127.0.0.1",
    keys: KeysOption = None,
    routes: RoutesOption = None,
    capture: CaptureOption = None,
    drain_seconds: DrainOption = 60.0,
    trust: Annotated[
        list[Path],
        typer.Option(
            "--trust",
            readable=False,
            help="Serve only a repository with a signature of this key: a file as in `tuneline verify`. Repeatable.",
        ),
    ] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Serve a packaged model through the OpenAI API until Ctrl-C: a Triton server behind the gateway."""
    from components.common.runtime import reporters
    from components.common.runtime.process_control import until_signal
    from components.common.workspace import artifact_store
    from components.triton_packaging.package_serving import served_package
    from pipelines.capture.settings import load_settings
    from pipelines.gateway import addresses
    from pipelines.gateway.process import GatewayOptions, running_gateway

    addresses.require_keys(host, keys)
    if capture:
        load_settings(capture)
    with (
        open_workdir("serve", as_json, DEFAULT_WORKDIR_PATH) as (reporter, work),
        artifact_store.keep_paths_in_use(repository),
        addresses.listen(host, http_port) as listener,
        until_signal(),
    ):
        if trust:
            from components.common.artifacts import artifact_folder
            from components.model_registry import signature_checks, trust_root

            pinned = trust_root.load_trust(trust)
            signature_checks.require_signature(artifact_folder.read(repository, "repository"), pinned)
        folder, name = work.root / "serving", repository.absolute().name
        options = GatewayOptions(
            keys,
            folder / f"{name}.usage.json",
            feedback=folder / f"{name}.feedback.jsonl",
            routes=routes,
            capture=capture,
            log=folder / f"{name}.gateway.log",
            drain_seconds=drain_seconds,
        )
        with (
            served_package(repository, folder / f"{name}.triton.log", reporter) as server,
            running_gateway(listener, server.grpc_url, server.metrics_socket, repository, options) as gateway,
        ):
            reporters.close_reporter(reporter)
            result = {
                "openai_url": gateway.openai_url,
                "http": gateway.url,
                "grpc": server.grpc_url,
                "metrics": f"{gateway.url}/metrics",
                "model": server.models[0],
                "models": server.models,
                "pid": os.getpid(),
            }
            lines = [
                f"ready on {gateway.openai_url} (model {server.models[0]}); stop it with Ctrl-C",
                f"chat page: {gateway.url}/chat",
            ]
            print_result(result, as_json, lines)
            sys.stdout.flush()
            while True:
                time.sleep(POLL_SECONDS)
                server.check_alive()
                gateway.check_alive()
