"""What the commands share: the application, its common options, and how a result is shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.places import DEFAULT_WORKDIR, Workdir

if TYPE_CHECKING:
    from components.common.launch.settings import LauncherSettings
    from components.common.progress import Reporter
    from pipelines.config import Customization

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Customise a large language model on your own text and bring it into service.",
)
data_app = typer.Typer(no_args_is_help=True, help="Dataset versions in the data repository.")
app.add_typer(data_app, name="data")

Config = Annotated[  # whether it can be read is told by who reads it, with what to do
    Path | None, typer.Option("-c", "--config", readable=False, help="customization.yaml. Without one the defaults run the demo.")
]
Sets = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the configuration. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace another artifact in the output folder.")]
WorkdirOption = Annotated[
    Path, typer.Option("--workdir", envvar="TUNELINE_WORKDIR", help="Store, state, tracking and runs of a customization.")
]
TrackingUri = Annotated[
    str, typer.Option("--tracking-uri", help="The MLflow server. Default: MLFLOW_TRACKING_URI, or the workdir's own store.")
]
RefusalFails = Annotated[bool, typer.Option("--fail-on-refusal", help="Exit 3 when the gate refuses.")]
PlatformOption = Annotated[
    Path | None, typer.Option("-p", "--platform", readable=False, help="platform.yaml, whose `launcher` says where the training runs.")
]
LauncherOption = Annotated[
    str,
    typer.Option("--launcher", help="Where the training runs: process (here), slurm, trainjob, rayjob or ray. Default: platform.yaml's."),
]
HERE = Path(DEFAULT_WORKDIR)


def show(result: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    """Print a result: one JSON object, or lines for people."""
    print(json.dumps(result, default=str) if as_json else "\n".join(lines))


def finding_line(finding: dict[str, Any]) -> str:
    """A finding as a person reads it, with what mends it below."""
    mark = "ok     " if finding["ok"] else "MISSING" if finding["needed"] else "without"
    hint = f"\n         {finding['hint']}" if finding["hint"] else ""
    return f"{mark}  {finding['name']}: {finding['found']}{hint}"


def load_config(config: Path | None, sets: list[str]) -> Customization:
    """The configuration file with its overrides; defaults without one."""
    from pipelines.config import load

    return load(config, sets)


def where(platform: Path | None, launcher: str) -> LauncherSettings:
    """Where the training runs: as platform.yaml says, or TUNELINE_LAUNCHER where none is given; `launcher` replaces its kind."""
    from components.common.launch import settings
    from pipelines import platform as platforms

    found = platforms.load(platform).launcher if platform else settings.from_environment()
    return settings.of_kind(found, launcher) if launcher else found


@contextmanager
def reporting(prefix: str, as_json: bool) -> Iterator[Reporter]:
    """A reporter for the person at this command. The screen is given back at the end, before a result or an error is printed."""
    from components.common import progress

    reporter = progress.console(quiet=as_json, prefix=f"{prefix}: " if prefix else "")
    try:
        yield reporter
    finally:
        progress.close(reporter)


@contextmanager
def working(name: str, as_json: bool, workdir: Path, tracking_uri: str = "") -> Iterator[tuple[Reporter, Workdir]]:
    """What a command works with that runs a stage or reads what stages made: a reporter, and the places of the workdir."""
    os.environ["TUNELINE_WORKDIR"] = str(workdir.absolute())
    if tracking_uri:
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri
    with reporting(name, as_json) as reporter:
        yield reporter, Workdir.from_environment()


def track(work: Workdir, *, write: bool) -> None:
    """Point MLflow at the server that was named, or at the workdir's own store, which is made where it is to be written."""
    os.environ["MLFLOW_TRACKING_URI"] = work.tracking_uri
    if write:
        work.root.mkdir(parents=True, exist_ok=True)


def _version(asked: bool) -> None:
    if asked:
        from components.common.artifacts import produced_by

        print(f"tuneline {produced_by()['tuneline']}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of tuneline itself."""
