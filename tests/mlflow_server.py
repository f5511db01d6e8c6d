"""A real MLflow server for tests, with one worker and its own port and folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_TIMEOUT_SECONDS = 240.0  # a busy machine takes more than a minute


@contextmanager
def mlflow_server(folder: Path, backend: str = "") -> Iterator[str]:
    """Run a server with its data in `folder`, or its database in `backend` if given; yields its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        backend or f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # job execution would start a dozen unused processes
    with run_server(command, address, folder, environment):
        yield address


@contextmanager
def run_server(
    command: Sequence[str | Path], address: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Run the command of a server until the end of the block; its log is `folder`/server.log."""
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_ready(server, address, folder / "server.log")
        yield
    finally:
        with suppress(ProcessLookupError):  # the server exited already
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"the MLflow server did not start:\n{log.read_text(errors='replace')[-3000:]}")
