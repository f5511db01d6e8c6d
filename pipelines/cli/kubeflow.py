"""`tuneline compile` and `tuneline submit`: the pipeline on Kubeflow."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from components.common.runtime.errors import UsageError
from pipelines.cli.application import (
    CaCertOption,
    ConfigsOption,
    EndpointOption,
    JsonOption,
    NamespaceOption,
    SetOption,
    app,
    open_reporter,
    print_result,
    print_text,
    warn_of_unused_file,
)

ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "-p",
        "--platform",
        help="platform.yaml with the cluster's images, volume, queue and "
        "secrets. Default: the default images, and no shared volume.",
    ),
]
PipelineOption = Annotated[
    Literal["customization", "promotion", "data_curation", "fine_tuning", "evaluation", "triton_packaging"],
    typer.Option(
        "--pipeline",
        help="Pipeline to compile: customization (all stages), promotion (promote and deploy a version), or one stage.",
    ),
]


@app.command("compile")
def compile_(
    output: Annotated[Path, typer.Option("-o", "--output", help="YAML file to write.")],
    configs: ConfigsOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    platform: ClusterOption = None,
    pipeline: PipelineOption = "customization",
    as_json: JsonOption = False,
) -> None:
    """Compile the pipeline to a YAML file for Kubeflow Pipelines. The same input always gives the same bytes."""
    warnings, requests = _compile(configs, sets, platform, output, as_json, pipeline)
    sha256 = hashlib.sha256(output.read_bytes()).hexdigest()
    hint = f"run it with: tuneline submit -f {output} --endpoint URL --experiment NAME, or upload it in the Kubeflow UI"
    result = {"pipeline": str(output), "sha256": sha256, "warnings": warnings, "requests": requests}
    print_result(result, as_json, [f"wrote {output}; {hint}"])


@app.command()
def submit(
    endpoint: EndpointOption,
    experiment: Annotated[
        str, typer.Option("--experiment", help="Experiment of the run; created if it does not exist.")
    ],
    configs: ConfigsOption = [],  # noqa: B006
    sets: SetOption = [],  # noqa: B006
    platform: ClusterOption = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Compiled pipeline to submit, instead of -c, --set and -p.")
    ] = None,
    pipeline_name: PipelineOption = "customization",
    param: Annotated[
        list[str], typer.Option("--param", metavar="NAME=VALUE", help="Parameter of the pipeline. Repeatable.")
    ] = [],  # noqa: B006
    namespace: NamespaceOption = "",
    run_name: Annotated[
        str, typer.Option("--run-name", help="Name of the run. Default: the pipeline's name and the time.")
    ] = "",
    service_account: Annotated[
        str,
        typer.Option(
            "--service-account",
            help="Kubernetes service account of the pods. Default: run.service_account of platform.yaml.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the bearer token. Default: KF_PIPELINES_TOKEN, KFP_EXISTING_TOKEN, or the pod's projected "
            "token.",
        ),
    ] = None,
    ca_cert: CaCertOption = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run; exit with status 1 if it ends without success.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0,
            help="Timeout of --wait in seconds, after which the command exits with status 75 and the run continues. 0: no limit.",
        ),
    ] = 0.0,
    poll: Annotated[float, typer.Option("--poll", min=0.05, help="Poll interval in seconds.")] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Submit a run of the pipeline to Kubeflow. --wait follows the run until it ends."""
    if file and (configs or sets or platform):
        raise UsageError(
            f"-f {file} is a compiled pipeline, which -c, --set and -p cannot change",
            hint="Omit -c, --set and -p. To set a pipeline parameter, use --param NAME=VALUE.",
        )
    from pipelines.config.platform_config import load_platform
    from pipelines.kubeflow import submission

    server = submission.KubeflowServer(endpoint, namespace, token_file, ca_cert)
    if platform and not service_account:  # a compiled pipeline cannot contain the account
        service_account = load_platform(platform).run.service_account
    with tempfile.TemporaryDirectory() as folder:
        pipeline = file or Path(folder) / "pipeline.yaml"
        warnings, requests = ([], {}) if file else _compile(configs, sets, platform, pipeline, as_json, pipeline_name)
        run = submission.submit(
            server, pipeline, experiment, run_name=run_name, service_account=service_account, parameters=param
        )
    if wait:
        with open_reporter("", as_json) as reporter:
            reporter.note(f"submitted {run.run_name}: {run.url}")
            submission.wait_for_run(run, reporter, timeout=timeout, interval=poll)
    lines = [f"{run.run_name}: {run.state}", f"details: {run.url}"]
    print_result({**run.as_dict(), "warnings": warnings, "requests": requests}, as_json, lines)


def _compile(
    configs: list[Path], sets: list[str], platform: Path | None, output: Path, quiet: bool, pipeline: str
) -> tuple[list[str], dict[str, str]]:
    """Compile the pipeline with the paths of the pods; print and return the warnings, and the requests that were filled in.

    Requests are filled in only with -c or --set: the default customization does not describe a real workload.
    """
    from pipelines.config.customization_chain import load_chain
    from pipelines.config.platform_config import load_platform
    from pipelines.definition import compilation
    from pipelines.definition.chain_steps import ChainStep, name_steps
    from pipelines.planning import fit_checks, resource_requests

    if len(configs) > 1 and pipeline != "customization":
        raise UsageError(
            f"--pipeline {pipeline} has {len(configs)} configurations; only --pipeline customization accepts several",
            hint="Pass one -c.",
        )
    cluster = load_platform(platform) if platform else None
    if not configs:
        warn_of_unused_file()
    chain = load_chain(configs, sets, resolve_paths=False, or_demo=False)
    steps, requests = [], dict[str, str]()
    for name, link in zip(name_steps(configs) or [""], chain, strict=True):
        requested = cluster
        if cluster and (configs or sets):
            requested, filled = resource_requests.fill_requests(link.customization, cluster)
            requests |= {f"{name}: {key}" if len(chain) > 1 else key: value for key, value in filled.items()}
        steps.append(ChainStep(name, link, requested))
    inputs = [*configs, *([platform] if platform else [])]
    if len(steps) > 1:
        warnings = compilation.write_chain(steps, output, inputs=inputs)
    else:
        customization = steps[0].link.customization
        warnings = compilation.write_pipeline(
            customization, steps[0].platform, output, inputs=inputs, pipeline=pipeline
        )
    for step in steps:
        if step.platform:
            found = fit_checks.list_warnings(step.link.customization, step.platform)
            warnings += [f"{step.name}: {warning}" for warning in found] if len(steps) > 1 else found
    notes = [
        f"{key} is not set; the pipeline requests {value}, the estimate of `tuneline size`"
        for key, value in requests.items()
    ]
    for sentence in [] if quiet else [*warnings, *notes]:
        print_text(f"tuneline: {sentence}", file=sys.stderr)
    return warnings, requests
