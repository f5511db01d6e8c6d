"""`tuneline run` and `tuneline init`: the whole pipeline on this machine, and its configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from components.common.launch import launcher_settings
from components.common.runtime.errors import EXIT_REFUSED
from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigOption,
    FailOnRefusalOption,
    JsonOption,
    LauncherOption,
    PlatformOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_config,
    load_launcher,
    open_workdir,
    print_result,
)


@app.command()
def run(
    config: ConfigOption = None,
    sets: SetOption = [],  # noqa: B006 - typer never modifies it
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    tracking_uri: TrackingUriOption = "",
    platform: PlatformOption = None,
    launcher: LauncherOption = "",
    fail_on_refusal: FailOnRefusalOption = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate rows, tokens, steps, memory, disk and time; run nothing."),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Run the whole pipeline on this machine: curate, version, fine-tune, evaluate, package, register, promote.

    Without a configuration file and without data_curation.sources, run the demo with its own small settings.
    """
    customization, settings = load_config(config, sets, or_demo=True), load_launcher(platform, launcher)
    from components.fine_tuning import acceleration
    from pipelines.config.customization_config import check_consistency

    check_consistency(customization)
    if settings.entry.uses_this_machine:  # torch is imported only for recipes with requirements
        for recipe in filter(acceleration.has_machine_requirements, customization.fine_tuning.recipes.values()):
            acceleration.check_machine(recipe)
    if dry_run:
        os.environ.update(launcher_settings.to_environment(settings), TOKENIZERS_PARALLELISM="false")
        from pipelines.planning.dry_run import estimate_run, format_estimate

        with open_workdir("dry run", as_json, workdir, tracking_uri) as (reporter, work):
            estimate = estimate_run(customization, work, reporter)
        print_result(estimate, as_json, lambda: format_estimate(estimate))
        return 0
    from pipelines.runs import local_runner, run_summary

    work = Workdir(workdir.absolute())
    result = local_runner.run(customization, work, quiet=as_json, tracking_uri=tracking_uri or None, launcher=settings)
    print_result(result, as_json, run_summary.format_run(result))
    return EXIT_REFUSED if fail_on_refusal and result["verdict"] == "refused" else 0


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write a commented customization.yaml and platform.yaml: every key with its default and its effect."""
    from pipelines.config.config_templates import write_templates

    customization, platform = write_templates(folder)
    lines = [
        f"wrote {customization}; run it with: tuneline run -c {customization}",
        f"wrote {platform}: a Kubeflow cluster, for tuneline compile and submit",
    ]
    print_result({"customization": str(customization), "platform": str(platform)}, as_json, lines)
