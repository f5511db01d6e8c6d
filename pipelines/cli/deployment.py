"""`tuneline deploy`: serve the version of a registry alias."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.errors import UsageError
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    GrpcPortOption,
    HostOption,
    HttpPortOption,
    JsonOption,
    MetricsPortOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.triton_packaging.triton_server import Server, ServerAddress
    from pipelines.deployment.watcher import Deployment


@app.command()
def deploy(
    name: Annotated[str, typer.Argument(help="Name of the registered model.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow the alias until Ctrl-C.")] = False,
    alias: Annotated[str, typer.Option("--alias", help="Alias to serve.")] = "champion",
    every: Annotated[float, typer.Option("--every", min=0.1, help="Poll interval of the registry in seconds.")] = 5.0,
    served_as: Annotated[
        str, typer.Option("--as", help="Name of the model in Triton. Default: the name in the first package.")
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Folder of packages and state. Default: serving/NAME in the workdir."),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            "--url",
            help="HTTP address of a running Triton, whose model repository is FOLDER/repository. "
            "Default: start a Triton server.",
        ),
    ] = "",
    grpc_url: Annotated[
        str, typer.Option("--grpc-url", help="gRPC address of the same server, HOST:PORT. Required with --url.")
    ] = "",
    http_port: HttpPortOption = 8000,
    grpc_port: GrpcPortOption = 8001,
    metrics_port: MetricsPortOption = 8002,
    host: HostOption = "127.0.0.1",
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Timeout for loading a version, in seconds.")
    ] = 300.0,
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Serve the version of an alias after the checks of `promote`.

    With --watch, follow the alias without losing a request.

    Without --url, start a Triton server and run until Ctrl-C. With --url, load the version into a running server
    (explicit mode); without --watch, exit when the version is served.
    """
    if bool(url) != bool(grpc_url):
        raise UsageError(
            f"found only {'--url' if url else '--grpc-url'}; --url and --grpc-url describe one server",
            hint="Give both options, or omit both options to start a server.",
        )
    from components.common.runtime.process_control import until_signal
    from components.triton_packaging.triton_server import Ports, ServerAddress
    from pipelines.deployment import watcher

    with open_workdir("deploy", as_json, workdir, tracking_uri) as (reporter, work):
        home = (folder or watcher.get_serving_folder(work.root, name)).absolute()
        with watcher.open_deployment(
            name, home, reporter, alias=alias, served_as=served_as, timeout=timeout
        ) as deployment:
            printed = False

            def print_once(server: Server | ServerAddress) -> None:
                """Print the result of the first server or version only, not of restarts."""
                nonlocal printed
                if not printed:
                    _print_deployment(deployment, server, as_json)
                printed = True

            if not url:
                ports = Ports(http_port, grpc_port, metrics_port)
                options = watcher.ServerOptions(ports, host, home / "triton.log", every, watch, print_once)
                watcher.serve_and_follow(deployment, options)
                return
            address = ServerAddress(url.rstrip("/"), grpc_url)
            if not watch:
                watcher.deploy_once(deployment, address)
                print_once(address)
                return
            with until_signal():
                while True:
                    watcher.poll(deployment, address)
                    if deployment.state.serving:
                        print_once(address)
                    time.sleep(every)


def _print_deployment(deployment: Deployment, server: Server | ServerAddress, as_json: bool) -> None:
    from components.common.runtime import reporters
    from components.triton_packaging.triton_server import Server

    reporters.close_reporter(deployment.reporter)
    state = deployment.state
    assert state.serving is not None, "called only after a version is served"
    served = {key: getattr(state.serving, key) for key in ("version", "model_sha256", "repository_sha256")}
    metrics = {"metrics": server.metrics_url} if isinstance(server, Server) else {}
    result = {
        "name": deployment.name, "alias": deployment.alias, **served, "model": state.served_as,
        "http": server.http_url, "grpc": server.grpc_url, **metrics,
        "folder": str(deployment.folder), "pid": os.getpid(),
    }  # fmt: skip
    version = f"{deployment.name} version {state.serving.version}"
    addresses = f"{server.http_url} (gRPC {server.grpc_url})"
    print_result(result, as_json, [f"{version} is served as {state.served_as} on {addresses}"])
    sys.stdout.flush()
