"""`tuneline run` and `tuneline init`: the whole pipeline on this machine, and its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.launch import launcher_settings
from components.common.runtime.errors import EXIT_REFUSED
from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    ConfigsOption,
    FailOnRefusalOption,
    JsonOption,
    LauncherOption,
    PlatformOption,
    SetOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    load_launcher,
    open_workdir,
    print_result,
    warn_of_unused_file,
)
from pipelines.config.customization_presets import list_presets

if TYPE_CHECKING:
    from components.common.cost.stage_cost import Cost
    from components.common.launch.launcher_settings import LauncherSettings
    from components.common.runtime.reporters import Reporter
    from pipelines.config.customization_chain import ChainedCustomization
    from pipelines.config.customization_config import Customization
    from pipelines.config.platform_config import Platform


@app.command()
def run(
    configs: ConfigsOption = [],  # noqa: B006 - typer never modifies it
    sets: SetOption = [],  # noqa: B006
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

    Without a configuration file and without data_curation.sources, run the demo with its own small settings. With several
    configurations, check all of them first, then run them in sequence until the gate refuses a model.
    """
    from pipelines.config.customization_chain import load_chain
    from pipelines.config.platform_config import Platform, load_platform

    if not configs:
        warn_of_unused_file()
    chain, settings = load_chain(configs, sets), load_launcher(platform, launcher)
    target = load_platform(platform) if platform else Platform()
    from components.fine_tuning import acceleration

    if settings.entry.uses_this_machine:  # torch is imported only for recipes with requirements
        recipes = [recipe for link in chain for recipe in link.customization.fine_tuning.recipes.values()]
        for recipe in filter(acceleration.has_machine_requirements, recipes):
            acceleration.check_machine(recipe)
    if dry_run:
        from pipelines.steps import chain_check

        os.environ.update(launcher_settings.to_environment(settings), TOKENIZERS_PARALLELISM="false")
        with open_workdir("dry run", as_json, workdir, tracking_uri) as (reporter, work):
            chain_check.check_tokenizers(chain)
            planned: dict[str, Cost] = {}
            results = [_estimate(link.customization, work, target, reporter, planned) for link in chain]
        _print_results(results, configs, as_json, _format_estimate)
        return 0
    from components.common.cost import stage_cost
    from pipelines.runs import run_costs, run_summary

    if len(chain) > 1:
        from pipelines.steps import chain_check

        with open_workdir("checks", as_json, workdir, tracking_uri) as (reporter, work):
            for link in chain[1:]:
                run_costs.build_meter(work, link.customization, target.cost_rates, target.team_budgets).check(
                    stage_cost.add_costs([])
                )
            chain_check.check_later_customizations(chain, work, reporter)
    results = _run_chain(chain, Workdir(workdir.absolute()), as_json, tracking_uri, settings, target)
    _print_results(results, configs, as_json, run_summary.format_run)
    return EXIT_REFUSED if fail_on_refusal and results[-1]["verdict"] == "refused" else 0


def _estimate(
    customization: Customization, work: Workdir, target: Platform, reporter: Reporter, planned: dict[str, Cost]
) -> dict[str, Any]:
    from pipelines.planning import cost_estimate, dry_run

    estimate = dry_run.estimate_run(customization, work, reporter)
    return cost_estimate.add_cost(estimate, customization, work, target, planned)


def _format_estimate(result: dict[str, Any]) -> list[str]:
    from pipelines.planning import cost_estimate, dry_run

    return [*dry_run.format_estimate(result), cost_estimate.format_cost(result["cost"])]


def _run_chain(
    chain: Sequence[ChainedCustomization],
    work: Workdir,
    as_json: bool,
    tracking_uri: str,
    settings: LauncherSettings,
    target: Platform,
) -> list[dict[str, Any]]:
    """Run the customizations in sequence until a gate refuses a model, and return the results of the runs."""
    from pipelines.config.customization_chain import insert_models
    from pipelines.runs import local_runner

    results: list[dict[str, Any]] = []
    for link in chain:
        models = [Path(result["artifacts"]["model"]).name for result in results]
        tuned, reward = ("" if i is None else models[i] for i in (link.tuned, link.rewarded_by))
        results.append(
            local_runner.run(
                insert_models(link, tuned, reward),
                work,
                quiet=as_json,
                tracking_uri=tracking_uri or None,
                launcher=settings,
                rates=target.cost_rates,
                team_budgets=target.team_budgets,
            )
        )
        if results[-1]["verdict"] == "refused":
            break
    return results


def _print_results(
    results: list[dict[str, Any]],
    configs: Sequence[Path],
    as_json: bool,
    format_result: Callable[[dict[str, Any]], list[str]],
) -> None:
    """Print the result of a run or estimate. For a chain, print the last result, with all results in `chain`."""
    if len(configs) < 2:
        print_result(results[-1], as_json, lambda: format_result(results[-1]))
        return
    lines = [
        line
        for path, result in zip(configs, results, strict=False)
        for line in [f"# {path}", *format_result(result), ""]
    ]
    remaining = [str(path) for path in configs[len(results) :]]
    notes = [f"not run, because the gate refused the model: {', '.join(remaining)}"] if remaining else []
    print_result({**results[-1], "chain": results}, as_json, [*lines[:-1], *notes])


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Output folder.")] = Path(),
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            help=f"Write the settings for a task instead of every key: {', '.join(list_presets())}.",
            autocompletion=list_presets,
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a commented customization.yaml and platform.yaml: every key with its default, or a preset for a task."""
    from pipelines.config.config_templates import write_templates
    from pipelines.config.customization_config import load_customization

    customization, platform = write_templates(folder, preset)
    sources = [entry.path for entry in load_customization(customization, resolve_paths=False).data_curation.sources]
    for name in sources if preset else []:
        if not Path(name).suffix and not (folder / name).exists():  # a folder of documents
            (folder / name).mkdir()
    data = [f"put your data in {' and '.join(str(folder / path) for path in sources)}, or change the sources"]
    lines = [
        f"wrote {customization}; {'' if preset else 'replace the demo in data_curation.sources with your data, then '}run it with: "
        f"tuneline run -c {customization}",
        *(data if preset else []),
        f"wrote {platform}: settings of a Kubeflow cluster for tuneline compile and submit",
    ]
    result = {"customization": str(customization), "platform": str(platform), "preset": preset or None}
    print_result(result | {"sources": sources}, as_json, lines)
