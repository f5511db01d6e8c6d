"""Whether this machine, or a cluster, can do what tuneline needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from components.common.errors import EXIT_FAILED, UsageError
from components.common.places import Workdir
from pipelines.cli.app import HERE, AsJson, WorkdirOption, app, finding_line, show


@app.command()
def doctor(
    platform: Annotated[
        Path | None, typer.Option("-p", "--platform", help="Look at the cluster of this platform.yaml instead of this machine.")
    ] = None,
    context: Annotated[str, typer.Option("--context", help="The context of the kubeconfig. Default: the current one.")] = "",
    namespace: Annotated[
        str,
        typer.Option("--namespace", envvar="KFP_NAMESPACE", help="The profile's namespace, where Kubeflow has several users."),
    ] = "",
    endpoint: Annotated[
        str, typer.Option("--endpoint", envvar=["KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"], help="Address of the Kubeflow Pipelines API.")
    ] = "",
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the token for it, as for `tuneline submit`.")] = None,
    ca_cert: Annotated[Path | None, typer.Option("--ca-cert", help="PEM file of the authority that signed its certificate.")] = None,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> int:
    """Say what works on this machine, or on a cluster (-p), what is missing, and how to get it."""
    from pipelines.findings import all_well

    if platform is None and (context or token_file or ca_cert):
        raise UsageError("--context, --token-file and --ca-cert are about a cluster", hint="Name it with -p platform.yaml.")
    findings = (
        _of_this_machine(workdir) if platform is None else _of_the_cluster(platform, context, namespace, endpoint, token_file, ca_cert)
    )
    show({"ok": all_well(findings), "findings": findings}, as_json, [finding_line(one) for one in findings])
    return 0 if all_well(findings) else EXIT_FAILED


def _of_this_machine(workdir: Path) -> list[dict[str, Any]]:
    from pipelines.doctor import examine

    return examine(Workdir(workdir.absolute()))


def _of_the_cluster(
    platform: Path, context: str, namespace: str, endpoint: str, token_file: Path | None, ca_cert: Path | None
) -> list[dict[str, Any]]:
    from pipelines import platform as platforms
    from pipelines.cluster.doctor import examine

    wanted = platforms.load(platform)
    return examine(wanted, context=context, named=namespace, endpoint=endpoint, token_file=token_file, ca_cert=ca_cert)
