"""Starts a Triton server process, waits until its models are ready, and stops it with its stub processes."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from components.common.runtime import process_control
from components.common.runtime.errors import EXIT_USAGE, EngineMissingError, TunelineError
from components.common.runtime.reporters import Reporter, SilentReporter
from components.common.workspace.job_folders import private_folder
from components.triton_packaging import triton_installation
from components.triton_packaging.triton_config import CONFIG_FILENAME, read_backend

SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - the kernel's folder of POSIX shared memory
SHM_PREFIX = "tuneline"
# Below the kernel's range for outgoing connections, so that a free port is still free when the server binds it.
FREE_PORTS = range(20_000, 32_000)
STOP_GRACE_SECONDS = 60.0
SHELL_SAFE_PATH = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")  # a path that a shell parses as one word
# Words of Triton's error levels and of Python tracebacks.
RELEVANT_LOG_WORDS = ("E1", "E0", "error", "Error", "failed", "Failed")


class ModelLoadError(TunelineError):
    """The server runs, but a model of its repository was not loaded."""

    kind = "model_load"


class PortInUseError(EngineMissingError):
    """Another process listens on a requested port."""

    kind = "port_in_use"
    exit_code = EXIT_USAGE


class Ports(NamedTuple):
    """Ports of a server's services; 0 stands for any free port."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0


ANY_FREE_PORTS = Ports()


@dataclass(frozen=True)
class ServerAddress:
    """Addresses of a server: a URL such as http://127.0.0.1:8000 for HTTP, HOST:PORT for gRPC."""

    http_url: str
    grpc_url: str


@dataclass(frozen=True)
class Server(ServerAddress):
    """A running server: its addresses, models and version, and the seconds until it was ready."""

    metrics_url: str
    ports: Ports
    models: list[str]
    version: str
    ready_seconds: float
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Process ID of tritonserver."""
        return self.process.pid

    def check_alive(self) -> None:
        """Raise EngineMissingError with the end of the log if the server has exited."""
        if self.process.poll() is not None:
            raise _server_exit_error(self.process, self.log)


@contextmanager
def running_server(
    repository: Path,
    *,
    log: Path,
    models: Sequence[str] | None = None,
    ports: Ports = ANY_FREE_PORTS,
    host: str = "127.0.0.1",
    ready_timeout: float = 300.0,
    reporter: Reporter | None = None,
) -> Iterator[Server]:
    """Start a server with models of the repository, yield it when they are ready, and stop it at the end of the block.

    The server is also killed if the thread that started it ends.

    Args:
        log: file for the server's output.
        models: names of the models; None for all.
        ready_timeout: timeout in seconds until all models are ready.

    Raises:
        EngineMissingError: Triton cannot run on this machine, a port is in use, or the server exits.
        ModelLoadError: a model does not load or is not ready in time.
    """
    if reason := triton_installation.unavailable_reason():
        raise EngineMissingError(reason, hint=triton_installation.installation_hint())
    names = (
        list(models) if models is not None else sorted(p.parent.name for p in repository.glob(f"*/{CONFIG_FILENAME}"))
    )
    ports = _choose_ports(host, ports)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    url_host = f"[{reachable}]" if ":" in reachable else reachable
    http_url = f"http://{url_host}:{ports.http}"
    _remove_abandoned_shared_memory()
    prefix = f"{SHM_PREFIX}_{os.getpid()}_{secrets.token_hex(4)}_"
    # The files of a vLLM model contain paths relative to the repository.
    has_vllm = any(read_backend(repository / name) == "vllm" for name in names)
    with private_folder(Path(tempfile.gettempdir()), "tuneline-triton", mode=0o700) as work:
        location = repository.absolute()
        if not SHELL_SAFE_PATH.fullmatch(str(location)):  # Triton starts python models through a shell, without quoting
            location = work / "repository"
            location.symlink_to(repository.absolute(), target_is_directory=True)
        command = [
            str(triton_installation.get_triton_home() / "bin" / "tritonserver"),
            f"--model-repository={location}",
            f"--backend-directory={triton_installation.create_backend_folder(work / 'backends')}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            *(f"--{service}-address={host}" for service in Ports._fields),
            *(f"--{service}-port={port}" for service, port in ports._asdict().items()),
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in names),
            "--exit-on-error=false",
            # Auto-complete starts every python model twice; the vLLM backend needs it to add inputs and outputs.
            *([] if has_vllm else ["--disable-auto-complete-config"]),
        ]
        began = time.monotonic()
        child = _start(command, repository if has_vllm else work, log)
        guard = process_control.start_group_guard(child.pid)
        try:
            version = _wait_ready(child, http_url, names, log, ready_timeout, reporter or SilentReporter())
            yield Server(
                http_url,
                f"{url_host}:{ports.grpc}",
                f"http://{url_host}:{ports.metrics}/metrics",
                ports,
                names,
                version,
                time.monotonic() - began,
                log,
                child,
            )
        finally:
            _stop(child)
            guard.wait()
            for region in SHARED_MEMORY_FOLDER.glob(f"{prefix}*"):
                region.unlink(missing_ok=True)
            process_control.append_to_step_log(log)


def get_resident_mib(pid: int) -> int:
    """Return the resident memory of a process, in MiB."""
    return int(psutil.Process(pid).memory_info().rss) >> 20


def get_child_pids(pid: int) -> list[int]:
    """Return the process IDs of a server's stubs, one per model."""
    return [child.pid for child in psutil.Process(pid).children()]


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the server in `folder`, in a separate session: Ctrl-C reaches only tuneline, which stops the server."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=triton_installation.build_server_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=process_control.die_with_parent,
        )


def _wait_ready(
    child: subprocess.Popen[bytes], url: str, models: Sequence[str], log: Path, timeout: float, reporter: Reporter
) -> str:
    """Wait until every model is ready, and return the server's version."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < timeout:
        if child.poll() is not None:
            raise _server_exit_error(child, log)
        with suppress(OSError, ValueError):  # the server opens its ports after the first load
            index = get_json(f"{url}/v2/repository/index", method="POST")
            states = {model["name"]: (model.get("state", ""), model.get("reason", "")) for model in index}
            for name in models:
                state, reason = states.get(name, ("UNAVAILABLE", "the model is not in the repository"))
                if state == "UNAVAILABLE" and reason not in ("", "unloaded"):
                    raise ModelLoadError(
                        f"Triton did not load {name}: {reason}{_log_excerpt(log)}",
                        hint="Fix the error in the log lines above.",
                    )
                if state == "":
                    raise ModelLoadError(
                        f"Triton did not load {name}: it rejected config.pbtxt{_log_excerpt(log)}",
                        hint="Package the model again.",
                    )
            if all(states[name][0] == "READY" for name in models):
                return str(get_json(f"{url}/v2")["version"])
        reporter.progress(int(seconds), None, "seconds")
        time.sleep(0.1)
    raise ModelLoadError(
        f"Triton did not load {', '.join(models)}: not ready after {timeout:.0f} seconds{_log_excerpt(log)}",
        hint="Raise triton_packaging.ready_timeout_seconds, or check the machine's free memory and cores.",
    )


def get_json(url: str, *, method: str = "GET", body: Mapping[str, object] | None = None, timeout: float = 60.0) -> Any:
    """Return the server's JSON response; `timeout` in seconds.

    Raises:
        OSError: the server does not respond, or responds with an HTTP error.
        ValueError: the response is not JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)  # noqa: S310
    with URL_OPENER.open(request, timeout=timeout) as answer:
        return json.loads(answer.read())


# Without the environment's proxy: the server is on this machine.
URL_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _choose_ports(host: str, requested: Ports) -> Ports:
    """Return the requested ports, with a free port for each 0. Raises PortInUseError if a port is in use."""
    chosen: list[int] = []
    for service, port in zip(("HTTP", "gRPC", "metrics"), requested, strict=True):
        if port and (port in chosen or not _is_free(host, port)):
            option = f"--{service.lower()}-port"
            raise PortInUseError(
                f"the {service} port {port} on {host} is already in use",
                hint=f"Stop the process that listens on this port, or choose another port with {option} (0: any free "
                "port).",
            )
        shuffled = random.SystemRandom().sample(FREE_PORTS, k=len(FREE_PORTS))
        taken = {*chosen, *requested}
        chosen.append(port or next(free for free in shuffled if free not in taken and _is_free(host, free)))
    return Ports(*chosen)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, which lets answers in progress finish; after a grace period SIGKILL to the whole session."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_GRACE_SECONDS)
    with suppress(ProcessLookupError):  # no process of the session is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _remove_abandoned_shared_memory() -> None:
    """Remove shared memory of killed tuneline processes, whose IDs are in the names of the regions."""
    for region in SHARED_MEMORY_FOLDER.glob(f"{SHM_PREFIX}_*"):
        owner = region.name.split("_")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with suppress(PermissionError):  # the region belongs to another user
                region.unlink(missing_ok=True)


def _server_exit_error(child: subprocess.Popen[bytes], log: Path) -> EngineMissingError:
    return EngineMissingError(
        f"the Triton server exited with status {child.returncode}{_log_excerpt(log)}",
        hint="Fix the error in the log lines above, or check the requirements of Triton with `tuneline doctor`.",
    )


def _log_excerpt(log: Path) -> str:
    """Return the last 12 error lines of the server's log, as the end of a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    relevant = [line for line in lines if any(word in line for word in RELEVANT_LOG_WORDS)] or lines
    return "".join(f"\n  {line[:400]}" for line in relevant[-12:])
