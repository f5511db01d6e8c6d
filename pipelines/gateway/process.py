"""Runs the gateway as a child process, so that loads and copies in the parent never delay an answer."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from components.common.runtime import process_control
from components.common.runtime.errors import EngineMissingError
from pipelines.gateway import addresses

READY_SECONDS = 60.0
STOP_MARGIN_SECONDS = 10.0
MAX_RESTARTS, RESTART_WINDOW_SECONDS = 5, 60.0


@dataclass(frozen=True)
class GatewayOptions:
    """Options of a gateway process.

    Attributes:
        keys: file of API keys, or None on a loopback address.
        usage: file that keeps the keys' token counts of the day, or None.
        feedback: file of the feedback on answers, or None.
        routes: the routing file, or None.
        capture: the capture file, or None: nothing is captured.
        log: file for the request log, or None: standard error.
        drain_seconds: time for answers in progress at the end.
    """

    keys: Path | None = None
    usage: Path | None = None
    feedback: Path | None = None
    routes: Path | None = None
    capture: Path | None = None
    log: Path | None = None
    drain_seconds: float = 60.0


@dataclass
class GatewayProcess:
    """A gateway that is started again if it exits. The parent keeps the listening socket, so that no connection is lost.

    Attributes:
        url: the gateway's root URL.
        openai_url: the base URL for OpenAI clients.
    """

    url: str
    openai_url: str
    _command: Sequence[str]
    _listener: socket.socket
    _options: GatewayOptions
    _child: subprocess.Popen[str] | None = None
    _starts: list[float] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Process ID of the gateway that runs now."""
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Start the process and wait until it accepts requests.

        Raises:
            EngineMissingError: the process exits, or is not ready in time.
        """
        self._starts = [*self._starts[-MAX_RESTARTS:], time.monotonic()]
        for is_last in (False, True):
            child = subprocess.Popen(
                self._command,
                env=process_control.build_python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent, which stops the gateway
                preexec_fn=process_control.die_with_parent,
            )
            self._child = child
            line = _read_line(child)
            if "openai_url" in line:
                return
            child.kill()
            # gRPC aborts the process if the machine cannot create a thread at the moment.
            if is_last or child.wait() != -signal.SIGABRT:
                reason = json.loads(line)["error"]["message"] if line else "see its messages above"
                raise EngineMissingError(f"the gateway did not start: {reason}", hint="Correct the gateway's options.")

    def check_alive(self) -> None:
        """Start the process again if it has exited.

        Raises:
            EngineMissingError: it exits repeatedly, or does not start.
        """
        if self._child is not None and self._child.poll() is None:
            return
        now = time.monotonic()
        if len([start for start in self._starts if start > now - RESTART_WINDOW_SECONDS]) > MAX_RESTARTS:
            raise EngineMissingError("the gateway exits repeatedly", hint="See the gateway's messages above.")
        self.start()

    def stop(self) -> None:
        """Let answers in progress finish, then end the process."""
        if self._child is None:
            return
        self._child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(self._options.drain_seconds + STOP_MARGIN_SECONDS)
        self._child.kill()
        self._child.wait()


def _read_line(child: subprocess.Popen[str]) -> str:
    """Return the first line of the child's output, or "" if it exits or writes none in time."""
    assert child.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(child.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(READY_SECONDS)
    return lines[0] if lines else ""


@contextmanager
def running_gateway(
    listener: socket.socket, grpc_url: str, metrics_socket: Path, repository: Path, options: GatewayOptions
) -> Iterator[GatewayProcess]:
    """Start a gateway for a Triton server, and stop it at the end of the block after answers in progress.

    Args:
        listener: the listening socket.
        grpc_url: gRPC address of Triton, which need not answer yet.
        metrics_socket: Unix socket of Triton's metrics.
        repository: Triton's model repository.
        options: keys, files and times.

    Raises:
        EngineMissingError: the gateway does not start.
    """
    values = {
        "--grpc-url": grpc_url,
        "--metrics-socket": metrics_socket,
        "--repository": repository,
        "--host": listener.getsockname()[0],
        "--listener": listener.fileno(),
        "--drain-seconds": options.drain_seconds,
        "--keys": options.keys,
        "--usage": options.usage,
        "--feedback": options.feedback,
        "--log": options.log,
        "--routes": options.routes,
        "--capture": options.capture,
    }
    arguments = [str(each) for pair in values.items() if pair[1] is not None for each in pair]
    command = process_control.build_module_command("pipelines.cli", "gateway", "--json", *arguments)
    url = addresses.get_url(listener)
    gateway = GatewayProcess(url, f"{url}/v1", command, listener, options)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
