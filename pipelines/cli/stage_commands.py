"""`tuneline curate`, `finetune`, `evaluate`, `package` and `serve`: single stages that read and write folders."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from components.common.runtime.counts import format_count
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

POLL_SECONDS = 0.5  # between two checks that the servers run
ModelArgument = Annotated[str, typer.Argument(help="Folder of a tuned model, or source of a base model.")]


@app.command()
def curate(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, globs or folders of raw text, or demo:python-docs for the demo dataset. Settings in "
            "data_curation.sources for the same path apply. Default: data_curation.sources of the configuration."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Output folder.")] = None,
    preview: Annotated[
        bool,
        typer.Option("--preview", help="Show the first rows of each source as curation reads them, and write nothing."),
    ] = False,
    preview_rows: Annotated[
        int, typer.Option("--rows", min=1, help="Maximum number of rows per source in the preview.")
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
        raise UsageError(
            "Missing argument 'sources'", hint="Specify files, globs or folders, or a configuration with -c."
        )
    if output is None and not preview:
        raise UsageError(
            "Missing option '-o' / '--output'", hint="Specify the output folder with -o, or add --preview."
        )
    if preview and output is not None:
        raise UsageError("--preview writes nothing, but -o is set", hint="Omit --preview or -o.")
    from pipelines.cli.source_preview import print_preview
    from pipelines.runs import single_stages
    from pipelines.runs.run_summary import format_evaluation_sets, format_unreadable

    if sources:
        single_stages.select_sources(customization, sources)
    with open_workdir("curate", as_json, workdir) as (reporter, work):
        if output is None:
            base = config.parent if config else Path.cwd()
            print_preview(customization, base, work, reporter, preview_rows, as_json)
            return
        result = single_stages.curate_sources(customization, output, work, reporter, overwrite=overwrite)
    rows = result.rows
    rejected = ", ".join(f"{count} {reason}" for reason, count in rows["rejected"].items()) or "none"
    lines = [
        f"{rows['kept']} of {rows['in']} rows kept; rejected: {rejected}; quarantined: {rows['quarantined']}",
        *format_unreadable(output),
        *format_evaluation_sets(output),
        "splits: " + ", ".join(f"{split} {count:,}" for split, count in result.splits.items()),
        f"report: {output / 'report.html'}",
    ]
    print_result(result.as_dict(), as_json, lines)


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
    """Tune the base model on a dataset. After an interruption, run the same command again to resume from the last checkpoint."""
    customization, settings = load_config(config, sets), load_launcher(platform, launcher)
    from pipelines.runs import single_stages

    with open_workdir("finetune", as_json, workdir) as (reporter, work):
        result = single_stages.finetune_dataset(
            dataset, output, customization, settings, work, reporter, overwrite=overwrite
        )
    lines = [
        f"{format_count(result.steps, 'step')}, {format_count(result.tokens, 'token')}, training loss of the last step {result.train_loss:.4f}"
    ]
    if result.sweep:
        best = ", ".join(f"{key}={value}" for key, value in result.sweep[0]["recipe"].items())
        lines.insert(0, f"the best of {format_count(len(result.sweep), 'recipe')}: {best}")
    print_result(result.as_dict(), as_json, [*lines, f"report: {output / 'report.html'}"])


@app.command()
def evaluate(
    model: ModelArgument,
    dataset: Annotated[Path, typer.Option("--dataset", help="Folder of the dataset with the test split.")],
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
    """Compare a model with its base model and the incumbent, and decide whether the model may be promoted."""
    customization = load_config(config, sets)
    from pipelines.runs import single_stages

    with open_workdir("evaluate", as_json, workdir) as (reporter, work):
        result = single_stages.evaluate_model(
            model, dataset, output, customization, work, reporter, incumbent=incumbent, overwrite=overwrite
        )
    lines = [f"verdict: {result.verdict}", *dict.fromkeys(result.reasons), f"report: {output / 'report.html'}"]
    print_result(result.as_dict(), as_json, lines)
    return EXIT_REFUSED if fail_on_refusal and result.verdict == "refused" else 0


@app.command()
def package(
    model: ModelArgument,
    output: OutputOption,
    adapter: Annotated[
        list[str],
        typer.Option(
            "--adapter",
            metavar="NAME=MODEL_DIR",
            help="Additional adapter of the same base model, for the vllm backend only. Repeatable.",
        ),
    ] = [],  # noqa: B006
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            help="Dataset on whose test split the loss of a quantized model is measured. Default: the dataset that the "
            "model was trained on.",
        ),
    ] = None,
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006
    overwrite: OverwriteOption = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Build a Triton model repository and test it in a Triton server."""
    customization = load_config(config, sets)
    from components.common.artifacts import artifact_folder
    from components.triton_packaging import adapter_placement
    from pipelines.runs import single_stages

    adapters = adapter_placement.parse_adapter_options(adapter)
    with open_workdir("package", as_json, workdir) as (reporter, work):
        result = single_stages.package_model(
            model, output, customization, work, reporter, adapters=adapters, dataset=dataset, overwrite=overwrite
        )
    summary = artifact_folder.read_manifest(output).summary
    lines = [f"unproven: {summary.get('unproven_because')}"]
    if proof := result.proof:
        lines = [f"{proof['matched']} of {proof['golden_prompts']} golden prompts matched"]
    if measured := summary.get("quantization"):
        lines.append(
            f"{measured['scheme']}: loss {measured['increase']:+.4f} nats per token, upper bound "
            f"{measured['increase_bound']:+.4f}; margin {measured['margin']:.4f}"
        )
    print_result(
        result.as_dict(),
        as_json,
        [*lines, f"chat with the model: tuneline chat {output}", f"serve the model: tuneline serve {output}"],
    )


@app.command()
def serve(
    repository: Annotated[
        Path, typer.Argument(help="Folder of a Triton model repository that `tuneline package` built.")
    ],
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
            help="File of trusted signers, one of whom must have signed the repository. Same formats as for "
            "`tuneline verify --trust`. Repeatable.",
        ),
    ] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Serve a packaged model through the OpenAI API until Ctrl-C, with a Triton server behind the gateway."""
    from components.common.runtime import reporters
    from components.common.runtime.process_control import until_signal
    from pipelines.runs.single_stages import serve_repository

    with (
        open_workdir("serve", as_json, DEFAULT_WORKDIR_PATH) as (reporter, work),
        until_signal(),
        serve_repository(
            repository,
            work,
            reporter,
            host=host,
            http_port=http_port,
            keys=keys,
            routes=routes,
            capture=capture,
            drain_seconds=drain_seconds,
            trust=trust,
        ) as served,
    ):
        reporters.close_reporter(reporter)
        lines = [
            f"ready at {served.openai_url} (model {served.models[0]}); press Ctrl-C to stop",
            f"chat page: {served.url}/chat",
        ]
        print_result(served.as_dict(), as_json, lines)
        sys.stdout.flush()
        while True:
            time.sleep(POLL_SECONDS)
            served.check_alive()
