"""The whole pipeline on this machine, its configuration, and what this machine can do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.errors import EXIT_REFUSED
from components.common.launch import settings
from components.common.places import Workdir
from pipelines.cli.app import (
    HERE,
    AsJson,
    Config,
    LauncherOption,
    PlatformOption,
    RefusalFails,
    Sets,
    TrackingUri,
    WorkdirOption,
    app,
    load_config,
    show,
    track,
    where,
    working,
)

if TYPE_CHECKING:
    from pipelines.config import Customization


@app.command()
def run(
    config: Config = None,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody writes it
    workdir: WorkdirOption = HERE,
    tracking_uri: TrackingUri = "",
    platform: PlatformOption = None,
    launcher: LauncherOption = "",
    fail_on_refusal: RefusalFails = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show rows, tokens, steps, memory, disk and time to expect, and do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run the whole pipeline on this machine: curate, version, fine-tune, evaluate, package, register, promote."""
    customization, place = load_config(config, sets), where(platform, launcher)
    _check(customization, here=place.kind == "process")
    if dry_run:
        os.environ.update(settings.as_environment(place))
        return _estimate(customization, workdir, tracking_uri, as_json)
    from pipelines import local, summary

    result = local.run(customization, Workdir(workdir.absolute()), quiet=as_json, uri=tracking_uri or None, where=place)
    show(result, as_json, summary.run(result, str(workdir)))
    return EXIT_REFUSED if fail_on_refusal and result["verdict"] == "refused" else 0


def _check(customization: Customization, *, here: bool) -> None:
    """Refuse what the pipeline, or this machine, cannot do before anything is started. torch is asked only where the recipe names more
    than what is always there, and the training is `here`."""
    from components.fine_tuning import acceleration
    from pipelines.config import check_whole

    check_whole(customization)
    for recipe in customization.fine_tuning.recipes.values():
        if here and acceleration.asks_for_more(recipe):
            acceleration.check(recipe)


def _estimate(customization: Customization, workdir: Path, tracking_uri: str, as_json: bool) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from pipelines.estimate import estimate, lines

    with working("dry run", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        result = estimate(customization, work, reporter)
    show(result, as_json, [] if as_json else lines(result))
    return 0


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to write into.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a commented customization.yaml and platform.yaml: every key with its default and its effect."""
    from pipelines.reference import write

    path, platform = write(folder)
    lines = [f"wrote {path}; run it with: tuneline run -c {path}", f"wrote {platform}: a Kubeflow cluster, for tuneline compile and submit"]
    show({"customization": str(path), "platform": str(platform)}, as_json, lines)
