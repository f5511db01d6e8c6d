"""Kubeflow: compile the pipeline, submit it, follow the run."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from components.common.errors import UsageError
from pipelines.cli.app import AsJson, Config, Sets, app, reporting, show

PlatformFile = Annotated[Path | None, typer.Option("-p", "--platform", help="platform.yaml: the cluster's images, volume, queue, secrets.")]
Which = Annotated[
    Literal["customization", "promotion", "data_curation", "fine_tuning", "evaluation", "triton_packaging"],
    typer.Option("--pipeline", help="customization: from text to a model. promotion: from a version into service. Or one stage alone."),
]


@app.command("compile")
def compile_(
    output: Annotated[Path, typer.Option("-o", "--output", help="The YAML file to write.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    platform: PlatformFile = None,
    pipeline: Which = "customization",
    as_json: AsJson = False,
) -> None:
    """Compile the pipeline to the YAML that Kubeflow Pipelines runs. The same input gives the same bytes."""
    warnings = _compile(config, sets, platform, output, as_json, pipeline)
    sha256 = hashlib.sha256(output.read_bytes()).hexdigest()
    hint = f"run it: tuneline submit -f {output} --endpoint URL --experiment NAME, or upload it in the Kubeflow UI"
    show({"pipeline": str(output), "sha256": sha256, "warnings": warnings}, as_json, [f"wrote {output}; {hint}"])


@app.command()
def submit(
    endpoint: Annotated[
        str, typer.Option("--endpoint", envvar=["KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"], help="Address of the Kubeflow Pipelines API.")
    ],
    experiment: Annotated[str, typer.Option("--experiment", help="The experiment the run belongs to; made where there is none.")],
    config: Config = None,
    sets: Sets = [],  # noqa: B006
    platform: PlatformFile = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="A compiled pipeline, instead of -c, --set and -p.")] = None,
    which: Which = "customization",
    param: Annotated[list[str], typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the pipeline. Repeatable.")] = [],  # noqa: B006
    namespace: Annotated[
        str, typer.Option("--namespace", envvar="KFP_NAMESPACE", help="The profile's namespace, where Kubeflow has several users.")
    ] = "",
    run_name: Annotated[str, typer.Option("--run-name", help="Default: the pipeline's name and the time.")] = "",
    service_account: Annotated[str, typer.Option("--service-account", help="The Kubernetes service account the pods run as.")] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File with the bearer token; or set KF_PIPELINES_TOKEN. A pod's projected token is found by itself."
        ),
    ] = None,
    ca_cert: Annotated[
        Path | None, typer.Option("--ca-cert", help="PEM file of the authority that signed the server's certificate.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; exit 1 unless it succeeds.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait at most, then exit 75; the run goes on. 0: no limit.")
    ] = 0.0,
    poll: Annotated[float, typer.Option("--poll", min=0.05, help="Seconds between two looks at the run.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline on Kubeflow; --wait follows it to its true end."""
    if file and (config or sets or platform):
        raise UsageError("-f is compiled already: -c, --set and -p cannot change it", hint="Leave them out, or give --param name=value.")
    from pipelines import submitting

    server = submitting.Server(endpoint, namespace, token_file, ca_cert)
    account = service_account or _service_account(platform)
    with tempfile.TemporaryDirectory() as folder:
        pipeline = file or Path(folder) / "pipeline.yaml"
        warnings = [] if file else _compile(config, sets, platform, pipeline, as_json, which)
        run = submitting.submit(server, pipeline, experiment, run_name=run_name, service_account=account, parameters=param)
    if wait:
        with reporting("", as_json) as reporter:
            reporter.note(f"submitted {run.run_name}: {run.url}")
            submitting.wait(run, reporter, timeout=timeout, interval=poll)
    show({**run.as_dict(), "warnings": warnings}, as_json, [f"{run.run_name}: {run.state}", f"see it: {run.url}"])


def _service_account(platform: Path | None) -> str:
    """A compiled pipeline cannot hold it, so it goes along with each run."""
    from pipelines import platform as platforms

    return platforms.load(platform).run.service_account if platform else ""


def _compile(config: Path | None, sets: list[str], platform: Path | None, output: Path, quiet: bool, pipeline: str) -> list[str]:
    """Compile for the cluster, where paths are those of the pods; say on standard error what deserves a look."""
    from pipelines import compiling
    from pipelines import platform as platforms
    from pipelines.config import load

    cluster = platforms.load(platform) if platform else None
    inputs = [path for path in (config, platform) if path]
    warnings = compiling.write(load(config, sets, here=False), cluster, output, inputs=inputs, pipeline=pipeline)
    for warning in [] if quiet else warnings:
        print(f"tuneline: {warning}", file=sys.stderr)
    return warnings
