"""`tuneline doctor`: check this machine or a cluster against the requirements of tuneline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from components.common.runtime.errors import EXIT_FAILED, UsageError
from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    CaCertOption,
    EndpointOption,
    JsonOption,
    NamespaceOption,
    SetOption,
    WorkdirOption,
    app,
    format_check,
    load_config,
    print_result,
)


@app.command()
def doctor(
    platform: Annotated[
        Path | None,
        typer.Option("-p", "--platform", help="Check the cluster of this platform.yaml instead of this machine."),
    ] = None,
    context: Annotated[str, typer.Option("--context", help="Kubeconfig context. Default: the current context.")] = "",
    namespace: NamespaceOption = "",
    endpoint: EndpointOption = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the bearer token of the Kubeflow Pipelines API. Default: KF_PIPELINES_TOKEN, "
            "KFP_EXISTING_TOKEN, or the pod's projected token.",
        ),
    ] = None,
    ca_cert: CaCertOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c",
            "--config",
            help="Also check that this customization.yaml fits the machine or, with -p, the resource requests of the platform.",
        ),
    ] = None,
    sets: SetOption = [],  # noqa: B006
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> int:
    """Check that this machine, or a cluster (-p), meets tuneline's requirements. Show a fix for each failure."""
    from components.common.reporting.check_findings import all_passed
    from pipelines.planning import fit_checks, resource_requests

    customization = load_config(config, sets) if config or sets else None
    if platform is None:
        if context or token_file or ca_cert:
            raise UsageError(
                "--context, --token-file and --ca-cert require -p",
                hint="Add -p platform.yaml, or omit these options.",
            )
        from pipelines.operations.machine_checks import check_machine

        results = check_machine(Workdir(workdir.absolute()))
        if customization:
            results += fit_checks.check_machine_fit(customization, Workdir(workdir.absolute()))
    else:
        from pipelines.config.platform_config import load_platform
        from pipelines.kubeflow.preflight.cluster_checks import check_cluster

        target = load_platform(platform)
        if customization:  # the pods are those of `compile -c`
            target, _ = resource_requests.fill_requests(customization, target)
        results = check_cluster(
            target,
            context=context,
            namespace=namespace,
            endpoint=endpoint,
            token_file=token_file,
            ca_cert=ca_cert,
            additional=fit_checks.build_cluster_checks(customization) if customization else None,
        )
        if customization and not all_passed([result for result in results if result["name"] == "cluster"]):
            results += fit_checks.check_platform_fit(customization, target)  # the cluster did not answer
    lines = [format_check(result) for result in results]
    print_result({"ok": all_passed(results), "findings": results}, as_json, lines)
    return 0 if all_passed(results) else EXIT_FAILED
