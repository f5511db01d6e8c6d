"""Bringing what the registry names into service, and keeping it so."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.errors import UsageError
from pipelines.cli.app import HERE, AsJson, TrackingUri, WorkdirOption, app, show, track, working

if TYPE_CHECKING:
    from components.triton_packaging.deployment.repository_api import Address
    from pipelines.deploying import Deployment


@app.command()
def deploy(
    name: Annotated[str, typer.Argument(help="The registered model's name.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow the alias wherever it is moved, until Ctrl-C.")] = False,
    alias: Annotated[str, typer.Option("--alias", help="The alias to serve.")] = "champion",
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks at the registry.")] = 5.0,
    served_as: Annotated[str, typer.Option("--as", help="The model's name in Triton; default: that of the first package.")] = "",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where packages and state are kept; default: serving/NAME in the workdir.")
    ] = None,
    url: Annotated[str, typer.Option("--url", help="A running Triton's HTTP address, whose model repository is FOLDER/repository.")] = "",
    grpc_url: Annotated[str, typer.Option("--grpc-url", help="The same server's gRPC address, HOST:PORT.")] = "",
    http_port: Annotated[int, typer.Option("--http-port", help="0: any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="0: any free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", help="0: any free one.")] = 8002,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds a version may take to load.")] = 300.0,
    tracking_uri: TrackingUri = "",
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Serve the version that an alias names, after promote's own checks; with --watch follow the alias without losing a request.

    Without --url it runs a Triton of its own until Ctrl-C. With --url it tells a running one (explicit mode) what to load; without
    --watch it then ends when the version is in service.
    """
    if bool(url) != bool(grpc_url):
        raise UsageError("--url and --grpc-url name one server together", hint="Give both, or none for a server of its own.")
    from pipelines import deploying

    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    with working("deploy", as_json, workdir, tracking_uri) as (reporter, work):
        track(work, write=False)
        home = (folder or deploying.serving_folder(work.root, name)).absolute()
        with deploying.opened(name, home, reporter, alias=alias, served_as=served_as, timeout=timeout) as deployment:
            if url:
                _elsewhere(deployment, _address(url, grpc_url), watch=watch, every=every, as_json=as_json)
                return
            ready = _once_told(deployment, as_json)
            deploying.serve_and_follow(deployment, deploying.OwnServer(ports, host, home / "triton.log", every, watch, ready))


def _address(url: str, grpc_url: str) -> Address:
    from components.triton_packaging.deployment.repository_api import Address

    return Address(url.rstrip("/"), grpc_url)


def _elsewhere(deployment: Deployment, server: Address, *, watch: bool, every: float, as_json: bool) -> None:
    """Tell a server that runs elsewhere what to load."""
    from components.triton_packaging.serve import until_signal
    from pipelines import deploying

    if not watch:
        deploying.once(deployment, server)
        _show(deployment, server.http_url, server.grpc_url, as_json)
        return
    told = False
    with until_signal():
        while True:
            deploying.look(deployment, server)
            if deployment.state.serving and not told:
                _show(deployment, server.http_url, server.grpc_url, as_json)
                told = True
            time.sleep(every)


def _once_told(deployment: Deployment, as_json: bool) -> Any:
    """What shows the result when a version is in service; a server that was started again is not shown again."""
    told: list[int] = []

    def ready(server: Any) -> None:
        if not told:
            _show(deployment, server.http_url, server.grpc_url, as_json, metrics=server.metrics_url)
        told.append(server.pid)

    return ready


def _show(deployment: Deployment, http: str, grpc: str, as_json: bool, **more: str) -> None:
    from components.common import progress

    progress.close(deployment.reporter)
    known = deployment.state
    assert known.serving is not None, "shown when something is in service"
    served = {key: getattr(known.serving, key) for key in ("version", "model_sha256", "repository_sha256")}
    result = {
        "name": deployment.name, "alias": deployment.alias, **served, "model": known.served_as,
        "http": http, "grpc": grpc, **more, "folder": str(deployment.folder), "pid": os.getpid(),
    }  # fmt: skip
    told = f"{deployment.name} version {known.serving.version} is in service as {known.served_as} on {http} (gRPC {grpc})"
    show(result, as_json, [told])
    sys.stdout.flush()
