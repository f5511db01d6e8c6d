"""`tuneline gateway`: the OpenAI-compatible server in front of a running Triton; `tuneline keys`: its API keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.application import (
    CaptureOption,
    DrainOption,
    HostOption,
    HttpPortOption,
    JsonOption,
    KeysOption,
    RoutesOption,
    app,
    print_result,
)

FeedbackOption = Annotated[
    Path | None,
    typer.Option("--feedback", help="File to which feedback on answers is appended. Default: feedback is rejected."),
]
FeedbackLimitOption = Annotated[
    int,
    typer.Option(
        "--feedback-max-mib", min=1, help="Size in MiB at which the gateway stops writing to the feedback file."
    ),
]
KeyFileOption = Annotated[Path, typer.Option("--keys", help="File of API keys.")]

keys_app = typer.Typer(no_args_is_help=True, help="Create, list and revoke the API keys of the gateway.")
app.add_typer(keys_app, name="keys")


@app.command()
def gateway(
    grpc_url: Annotated[str, typer.Option("--grpc-url", help="gRPC address of Triton: HOST:PORT or unix:PATH.")],
    host: HostOption = "127.0.0.1",
    http_port: HttpPortOption = 8000,
    keys: KeysOption = None,
    routes: RoutesOption = None,
    usage: Annotated[
        Path | None,
        typer.Option("--usage", help="File for the keys' daily token counts. Default: a restart resets the counts."),
    ] = None,
    metrics_socket: Annotated[
        Path | None,
        typer.Option("--metrics-socket", help="Unix socket of Triton's metrics, which the gateway adds to /metrics."),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option("--repository", help="Triton's model repository, for the chat templates of vLLM packages."),
    ] = None,
    max_body_mib: Annotated[
        int, typer.Option("--max-body-mib", min=1, max=15, help="Maximum size of a request in MiB.")
    ] = 4,
    request_seconds: Annotated[
        float, typer.Option("--request-seconds", min=1.0, help="Timeout for one answer, in seconds.")
    ] = 600.0,
    feedback: FeedbackOption = None,
    feedback_max_mib: FeedbackLimitOption = 1024,
    capture: CaptureOption = None,
    drain_seconds: DrainOption = 60.0,
    shutdown_delay_seconds: Annotated[
        float,
        typer.Option(
            "--shutdown-delay-seconds",
            min=0.0,
            help="Time in seconds between a stop signal and the drain. Meanwhile, the gateway is not ready, but "
            "answers requests and closes their connections, so that load balancers and clients move to other servers.",
        ),
    ] = 0.0,
    log: Annotated[
        Path | None, typer.Option("--log", help="File for the request log, rotated at 64 MiB. Default: standard error.")
    ] = None,
    listener: Annotated[
        int, typer.Option("--listener", hidden=True, help="File descriptor of a listening socket.")
    ] = -1,
    as_json: JsonOption = False,
) -> None:
    """Serve the models of a running Triton through the OpenAI API until Ctrl-C."""
    import socket

    from pipelines.capture.settings import load_settings
    from pipelines.gateway import addresses
    from pipelines.gateway.api_keys import KeyRing
    from pipelines.gateway.application import Gateway
    from pipelines.gateway.feedback import FeedbackFile
    from pipelines.gateway.server import run_gateway
    from pipelines.gateway.tracing import configure_tracing
    from pipelines.gateway.triton_models import TritonModels

    addresses.require_keys(host, keys)
    configure_tracing()
    ring = KeyRing(keys, usage)
    feedback_file = FeedbackFile(feedback, feedback_max_mib << 20) if feedback else None
    capture_settings = load_settings(capture) if capture else None
    sock = socket.socket(fileno=listener) if listener >= 0 else addresses.listen(host, http_port)
    url = addresses.get_url(sock)

    def print_ready() -> None:
        result = {"openai_url": f"{url}/v1", "chat": f"{url}/chat", "http": url, "grpc": grpc_url}
        result["metrics"] = f"{url}/metrics"
        print_result(result, as_json, [f"OpenAI API: {url}/v1", f"chat page: {url}/chat"])
        sys.stdout.flush()

    run_gateway(
        lambda: Gateway(
            TritonModels(grpc_url, repository),
            ring,
            max_body_mib << 20,
            request_seconds,
            metrics_socket,
            feedback_file,
            routes,
            capture_settings,
        ),
        sock,
        drain_seconds=drain_seconds,
        shutdown_delay_seconds=shutdown_delay_seconds,
        log=log,
        on_ready=print_ready,
    )


@keys_app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Name of the key in metrics and logs.")],
    keys: KeyFileOption = Path("keys.yaml"),
    scopes: Annotated[
        list[str],
        typer.Option(
            "--scope", help="Scope of the key: inference, metrics or traffic. Repeatable. Default: inference."
        ),
    ] = [],  # noqa: B006
    models: Annotated[
        list[str], typer.Option("--model", help="Model that the key may use. Repeatable. Default: all models.")
    ] = [],  # noqa: B006
    requests_per_minute: Annotated[
        int, typer.Option("--requests-per-minute", help="Maximum requests per minute. 0: no limit.")
    ] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option("--tokens-per-minute", help="Maximum tokens per minute. 0: no limit.")
    ] = 0,
    tokens_per_day: Annotated[
        int, typer.Option("--tokens-per-day", help="Maximum tokens per day (UTC). 0: no limit.")
    ] = 0,
    concurrent_requests: Annotated[
        int, typer.Option("--concurrent-requests", help="Maximum concurrent requests. 0: no limit.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Add an API key to a file, and print the key.

    The file stores the digest of the key, not the key. The gateway reloads a changed file within two seconds.
    """
    from pipelines.gateway import api_keys

    settings = {
        "scopes": scopes or ["inference"],
        "models": models,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
        "concurrent_requests": concurrent_requests,
    }
    secret = api_keys.create_key(keys, name, settings)
    print_result({"name": name, "key": secret, "file": str(keys)}, as_json, [secret])


@keys_app.command("list")
def list_keys(keys: KeyFileOption = Path("keys.yaml"), as_json: JsonOption = False) -> None:
    """List the keys of a file with their scopes and limits."""
    from pipelines.gateway import api_keys

    found = [key.model_dump(exclude={"sha256"}) for key in api_keys.read_keys(keys).values()]
    print_result({"keys": found}, as_json, [json.dumps(key) for key in found])


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    keys: KeyFileOption = Path("keys.yaml"),
    as_json: JsonOption = False,
) -> None:
    """Remove a key from a file."""
    from pipelines.gateway import api_keys

    api_keys.revoke_key(keys, name)
    print_result({"name": name, "file": str(keys)}, as_json, [f"{name} is revoked"])
