"""`tuneline deploy`: serve the version of a registry alias."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    CaptureOption,
    DrainOption,
    HostOption,
    HttpPortOption,
    JsonOption,
    KeysOption,
    RoutesOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.triton_packaging.triton_server import ServerAddress
    from pipelines.deployment.watcher import Deployment
    from pipelines.gateway.process import GatewayProcess

RegisteredModelArgument = Annotated[str, typer.Argument(help="Name of the registered model.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Follow the alias until Ctrl-C.")]
ServedAliasOption = Annotated[str, typer.Option("--alias", help="Alias of the version to serve.")]
PollIntervalOption = Annotated[
    float, typer.Option("--every", min=0.1, help="Poll interval of the registry in seconds.")
]
ServedAsOption = Annotated[
    str, typer.Option("--as", help="Name of the model in Triton. Default: the name in the first package served.")
]
CanaryAliasOption = Annotated[
    str,
    typer.Option(
        "--canary-alias",
        help="Alias of a second version to serve, as the model MODEL-ALIAS. --routes sets which requests this model "
        "receives. Requires --watch, and cannot be combined with --grpc-url.",
    ),
]
CanaryOption = Annotated[
    bool,
    typer.Option(
        "--canary",
        help="Serve the version next to another deployment, by default as MODEL-ALIAS. Requires --grpc-url.",
    ),
]
ServingFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="Folder of packages and state. Default: serving/NAME in the workdir or, with --canary, "
        "serving/NAME@ALIAS.",
    ),
]
GrpcUrlOption = Annotated[
    str,
    typer.Option(
        "--grpc-url",
        help="gRPC address (HOST:PORT) of a running Triton server whose model repository is "
        "FOLDER/repository; FOLDER is the value of --folder. Default: start a Triton server.",
    ),
]
LoadTimeoutOption = Annotated[
    float, typer.Option("--timeout", min=1.0, help="Timeout for loading a version, in seconds.")
]


@app.command()
def deploy(
    name: RegisteredModelArgument,
    watch: WatchOption = False,
    alias: ServedAliasOption = "champion",
    every: PollIntervalOption = 5.0,
    served_as: ServedAsOption = "",
    canary_alias: CanaryAliasOption = "",
    is_canary: CanaryOption = False,
    folder: ServingFolderOption = None,
    grpc_url: GrpcUrlOption = "",
    http_port: HttpPortOption = 8000,
    host: HostOption = "127.0.0.1",
    keys: KeysOption = None,
    routes: RoutesOption = None,
    capture: CaptureOption = None,
    drain_seconds: DrainOption = 60.0,
    timeout: LoadTimeoutOption = 300.0,
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Serve the version of an alias after the same checks as `promote`.

    With --watch, follow the alias. A switch loses no requests, except for vLLM packages with a gpu_memory_utilization
    above 0.5 (default: 0.9).

    Without --grpc-url, start a Triton server behind the OpenAI-compatible gateway and run until Ctrl-C. With --grpc-url, load the version into a running
    server (in explicit model control mode); without --watch, exit when the version is served.
    """
    from components.triton_packaging.triton_server import ServerAddress, get_socket_addresses, open_socket_folder
    from pipelines.capture.traffic_bucket import check_capture_file
    from pipelines.deployment import canary_process, watcher
    from pipelines.gateway import addresses
    from pipelines.gateway.process import GatewayOptions, running_gateway

    addresses.require_keys(host, keys)
    if capture:
        check_capture_file(capture)
    _check_canary(alias, canary_alias, is_canary=is_canary, is_watching=watch, is_remote=bool(grpc_url))
    with open_workdir("deploy", as_json, workdir, tracking_uri) as (reporter, work):
        home = (folder or watcher.get_serving_folder(work.root, name)).absolute()
        if is_canary and folder is None:
            home = canary_process.get_canary_folder(home, alias)
        with watcher.open_deployment(
            name, home, reporter, alias=alias, served_as=served_as, timeout=timeout, is_canary=is_canary
        ) as deployment:
            printed = False

            def print_once(server: ServerAddress, gateway: GatewayProcess | None = None) -> None:
                """Print the result of the first server or version only, not of restarts."""
                nonlocal printed
                if not printed:
                    _print_deployment(deployment, server, gateway, as_json)
                printed = True

            if grpc_url:
                _deploy_to_server(deployment, ServerAddress(grpc_url), every if watch else None, print_once)
                return
            gateway_options = GatewayOptions(
                keys,
                home / "usage.json",
                home / "feedback.jsonl",
                routes,
                capture,
                log=home / "gateway.log",
                drain_seconds=drain_seconds,
            )
            repository = watcher.get_model_repository(home)
            model = served_as or deployment.state.served_as
            options = {
                "--as": f"{model}-{canary_alias}" if model else "",
                "--every": every,
                "--timeout": timeout,
                "--workdir": workdir,
                "--tracking-uri": tracking_uri,
            }
            with (
                addresses.listen(host, http_port) as listener,
                open_socket_folder() as sockets,
                canary_process.prepare_canary(
                    name, canary_alias, home, get_socket_addresses(sockets)[0], options
                ) as canary,
                running_gateway(listener, *get_socket_addresses(sockets), repository, gateway_options) as gateway,
            ):
                on_ready = partial(print_once, gateway=gateway)
                watcher.serve_and_follow(
                    deployment,
                    watcher.ServerOptions(home / "triton.log", sockets, every, watch, on_ready, gateway, canary),
                )


def _deploy_to_server(
    deployment: Deployment,
    server: ServerAddress,
    poll_interval: float | None,
    print_once: Callable[[ServerAddress], None],
) -> None:
    """Serve the alias on a running server: once, or with a poll interval in seconds until SIGINT or SIGTERM."""
    from components.common.runtime.process_control import until_signal
    from pipelines.deployment import watcher

    if poll_interval is None:
        watcher.deploy_once(deployment, server)
        print_once(server)
        return
    with until_signal():
        while True:
            watcher.poll(deployment, server)
            if deployment.state.serving:
                print_once(server)
            time.sleep(poll_interval)


def _check_canary(alias: str, canary_alias: str, *, is_canary: bool, is_watching: bool, is_remote: bool) -> None:
    from components.common.runtime.errors import UsageError

    if canary_alias and (not is_watching or is_remote):
        raise UsageError(
            "--canary-alias requires --watch, and a server that this command starts",
            hint="Add --watch. With --grpc-url, run a second `tuneline deploy NAME --canary --alias ALIAS --watch` "
            "instead.",
        )
    if canary_alias == alias:
        raise UsageError(
            f"--canary-alias and --alias are both {alias}", hint="Choose another alias, such as candidate."
        )
    if is_canary and not is_remote:
        raise UsageError("--canary requires --grpc-url", hint="Use --canary-alias to start one server for two aliases.")


def _print_deployment(
    deployment: Deployment, server: ServerAddress, gateway: GatewayProcess | None, as_json: bool
) -> None:
    from components.common.runtime import reporters

    reporters.close_reporter(deployment.reporter)
    state = deployment.state
    assert state.serving is not None, "called only after a version is served"
    served = {key: getattr(state.serving, key) for key in ("version", "model_sha256", "repository_sha256")}
    urls = (
        {"openai_url": gateway.openai_url, "http": gateway.url, "metrics": f"{gateway.url}/metrics"} if gateway else {}
    )
    result = {
        "name": deployment.name, "alias": deployment.alias, **served, "model": state.served_as,
        **urls, "grpc": server.grpc_url, "folder": str(deployment.folder), "pid": os.getpid(),
    }  # fmt: skip
    version = f"{deployment.name} version {state.serving.version}"
    address = gateway.openai_url if gateway else f"{server.grpc_url} (gRPC)"
    page = [f"chat page: {gateway.url}/chat"] if gateway else []
    print_result(result, as_json, [f"{version} is served as {state.served_as} on {address}", *page])
    sys.stdout.flush()
