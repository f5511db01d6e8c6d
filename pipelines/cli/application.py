"""Definitions that the commands share: the application, common options, and the output of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from components.common.runtime.terminal import escape_controls
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import DEFAULT_WORKDIR, Workdir

if TYPE_CHECKING:
    from components.common.launch.launcher_settings import LauncherSettings
    from components.common.reporting.check_findings import CheckResult
    from components.common.runtime.reporters import Reporter
    from pipelines.config.customization_config import Customization

CUSTOMIZATION_FILENAME = "customization.yaml"  # written by `tuneline init`
app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Customize a large language model on your own text and deploy it.",
)
data_app = typer.Typer(no_args_is_help=True, help="Dataset versions in the data repository.")
app.add_typer(data_app, name="data")

# `readable=False`: the loader reports unreadable files, with a hint.
ConfigOption = Annotated[
    Path | None,
    typer.Option("-c", "--config", readable=False, help="customization.yaml. Default: the built-in defaults."),
]
ConfigsOption = Annotated[
    list[Path],
    typer.Option(
        "-c",
        "--config",
        readable=False,
        help="customization.yaml. Default: the demo's data and, with `tuneline run`, its settings. Repeatable: the "
        "customizations run in sequence, and each customization tunes the model of the previous customization unless "
        "its file sets fine_tuning.base_model.",
    ),
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the configuration. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on standard output.")]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="Output folder.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing artifact in the output folder.")
]
WorkdirOption = Annotated[
    Path,
    typer.Option(
        "--workdir", envvar="TUNELINE_WORKDIR", help="Folder with the artifact store, state, tracking data and runs."
    ),
]
TrackingUriOption = Annotated[
    str,
    typer.Option(
        "--tracking-uri",
        help="URI of the MLflow tracking server. Default: MLFLOW_TRACKING_URI, or a local store in the workdir.",
    ),
]
FailOnRefusalOption = Annotated[
    bool, typer.Option("--fail-on-refusal", help="Exit with status 3 if the gate refuses the candidate.")
]
PlatformOption = Annotated[
    Path | None,
    typer.Option(
        "-p",
        "--platform",
        readable=False,
        help="platform.yaml with the launcher of the training job and, except for `finetune`, prices, power and team "
        "budgets. Default: the launcher settings in TUNELINE_LAUNCHER; no prices or budgets.",
    ),
]
LauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="Launcher of the training job. Default: `launcher.kind` of platform.yaml or TUNELINE_LAUNCHER.",
    ),
]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint", envvar=["KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"], help="Address of the Kubeflow Pipelines API."
    ),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        envvar="KFP_NAMESPACE",
        help="Namespace of the Kubeflow profile. Required in multi-user Kubeflow.",
    ),
]
CaCertOption = Annotated[
    Path | None,
    typer.Option(
        "--ca-cert",
        help="PEM file of the certificate authority that signed the server certificate. Default: the public certificate authorities.",
    ),
]
ReferenceArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME[@ALIAS]", help="Model version: NAME@ALIAS, NAME@3 or NAME/3. Default alias: champion."
    ),
]
HttpPortOption = Annotated[int, typer.Option("--http-port", help="HTTP port; 0 for any free port.")]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        help="File of API keys. See `tuneline keys create`. Required unless --host is a loopback address.",
    ),
]
RoutesOption = Annotated[
    Path | None,
    typer.Option("--routes", help="Routing file for canaries and shadow traffic. See `tuneline routes set`."),
]
CaptureOption = Annotated[
    Path | None,
    typer.Option(
        "--capture",
        help="Capture file, which selects the requests to store and sets the storage location. Default: no requests are stored.",
    ),
]
DrainOption = Annotated[
    float,
    typer.Option(
        "--drain-seconds", min=0.0, help="Maximum time in seconds to finish answers in progress after a stop signal."
    ),
]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
DEFAULT_WORKDIR_PATH = Path(DEFAULT_WORKDIR)


def print_result(
    result: Mapping[str, object], as_json: bool, lines: Sequence[str] | Callable[[], Sequence[str]]
) -> None:
    """Print a result as one JSON object or as lines of text."""
    if as_json:
        print(json.dumps(result, default=str))
    else:
        print_text("\n".join(lines() if callable(lines) else lines))


def print_text(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text that may contain names or texts of models and datasets; control characters are escaped."""
    print(escape_controls(text), end=end, file=file, flush=True)


def format_check(result: CheckResult) -> str:
    """Format a check result as text, with its hint on a second line."""
    mark = "ok     " if result["ok"] else "MISSING" if result["needed"] else "warning"
    hint = f"\n         {result['hint']}" if result["hint"] else ""
    return f"{mark}  {result['name']}: {result['found']}{hint}"


def load_config(config: Path | None, sets: list[str]) -> Customization:
    """Load the configuration file (default: the built-in defaults) and apply the overrides."""
    from pipelines.config.customization_config import load_customization

    if not config:
        warn_of_unused_file()
    return load_customization(config, sets)


def warn_of_unused_file() -> None:
    """Warn on standard error if the current folder has a customization.yaml that a command without -c ignores."""
    if Path(CUSTOMIZATION_FILENAME).is_file():
        print(
            f"tuneline: {CUSTOMIZATION_FILENAME} in this folder is not used; to use it, add -c {CUSTOMIZATION_FILENAME}",
            file=sys.stderr,
        )


def load_launcher(platform: Path | None, launcher: str) -> LauncherSettings:
    """Load the launcher of platform.yaml (default: TUNELINE_LAUNCHER); `launcher` replaces its kind."""
    from components.common.launch import launcher_settings
    from pipelines.config.platform_config import load_platform

    settings = load_platform(platform).launcher if platform else launcher_settings.load_settings()
    return launcher_settings.replace_kind(settings, launcher) if launcher else settings


@contextmanager
def open_reporter(prefix: str, as_json: bool) -> Iterator[Reporter]:
    """Provide a reporter on standard error; close it before a result or an error is printed."""
    from components.common.runtime import reporters

    reporter = reporters.create_console_reporter(quiet=as_json, prefix=f"{prefix}: " if prefix else "")
    try:
        yield reporter
    finally:
        reporters.close_reporter(reporter)


@contextmanager
def open_workdir(
    name: str, as_json: bool, workdir: Path, tracking_uri: str | None = None, *, writes: bool = False
) -> Iterator[tuple[Reporter, Workdir]]:
    """Provide the reporter and the workdir of a command that runs a stage or reads artifacts.

    Args:
        name: prefix of the reporter's lines.
        as_json: report errors only.
        workdir: folder with the artifact store, state, tracking data and runs.
        tracking_uri: URI of the MLflow server. "": the workdir's tracking URI. None: the command does not use MLflow.
        writes: create the workdir, for a command that writes to MLflow.
    """
    work = artifact_store.enter_workdir(workdir, tracking_uri)
    if writes:
        work.root.mkdir(parents=True, exist_ok=True)
    with open_reporter(name, as_json) as reporter:
        yield reporter, work


def _print_version(requested: bool) -> None:
    if requested:
        from components.common.artifacts.artifact_folder import collect_provenance

        print(f"tuneline {collect_provenance()['tuneline']}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define the global options."""
