"""A Triton server process of our own: started on loopback, watched until it is ready, stopped without a trace."""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from components.common import process
from components.common.errors import EXIT_USAGE, EngineMissingError, TunelineError
from components.common.jobs import private_folder
from components.common.progress import Reporter, Silent
from components.triton_packaging import engine
from components.triton_packaging.pbtxt import CONFIG, backend_of

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel puts POSIX shared memory
SHM_PREFIX = "tuneline"
# Below the range the kernel hands out to outgoing connections, so that a port found free is still free when the server is ready for it.
FREE_PORTS = range(20_000, 32_000)
STOP_SECONDS = 60.0
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")  # a path that a shell takes for one word
# What a log line of interest holds: Triton's levels, and Python's tracebacks.
TELLING = ("E1", "E0", "error", "Error", "failed", "Failed")


class ModelLoadError(TunelineError):
    """The server runs and a model of its repository did not load."""

    kind = "model_load"


class PortInUseError(EngineMissingError):
    """Another process listens on a port that was asked for."""

    kind = "port_in_use"
    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Server:
    """A running server: its models, where it answers, which version it is, and how long it took to be ready."""

    models: list[str]
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    version: str
    ready_seconds: float
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def http_url(self) -> str:
        """For example http://127.0.0.1:8000."""
        return f"http://{_literal(self.host)}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """For example 127.0.0.1:8001, as gRPC clients want it."""
        return f"{_literal(self.host)}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Prometheus metrics."""
        return f"http://{_literal(self.host)}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """The process id of tritonserver."""
        return self.process.pid

    def check_alive(self) -> None:
        """Raise EngineMissingError, with the end of its log, when the server is gone."""
        if self.process.poll() is not None:
            raise _died(self.process, self.log)


@contextmanager
def running_server(
    repository: Path,
    *,
    log: Path,
    models: Sequence[str] | None = None,
    http_port: int = 0,
    grpc_port: int = 0,
    metrics_port: int = 0,
    host: str = "127.0.0.1",
    ready_timeout: float = 300.0,
    reporter: Reporter | None = None,
) -> Iterator[Server]:
    """A server with these models of the repository (None: all of them) loaded and ready; it is stopped on leaving the block.

    Port 0 is any free one. The server's output goes to `log`. It dies with the thread that started it, however that ends.
    Raises EngineMissingError when Triton cannot run here, a port is taken or the server dies; ModelLoadError, with the server's own
    words, when a model does not load or is not ready in `ready_timeout` seconds.
    """
    reason = engine.availability()
    if reason:
        raise EngineMissingError(reason, hint=engine.hint())
    names = list(models) if models is not None else sorted(p.parent.name for p in repository.glob(f"*/{CONFIG}"))
    ports = _ports(host, {"HTTP": http_port, "gRPC": grpc_port, "metrics": metrics_port})
    _remove_abandoned_shared_memory()
    prefix = f"{SHM_PREFIX}_{os.getpid()}_{secrets.token_hex(4)}_"
    with private_folder(Path(tempfile.gettempdir()), "tuneline-triton", mode=0o700) as work:
        command = _command(_plainly_named(repository, work), engine.make_backend_folder(work / "backends"), names, host, ports, prefix)
        began = time.monotonic()
        child = _start(command, repository if _has_vllm(repository, names) else work, log)
        guard = process.guard_group(child.pid)
        try:
            version = _wait_ready(child, f"http://{_literal(host)}:{ports[0]}", names, log, ready_timeout, reporter or Silent())
            yield Server(names, host, *ports, version, time.monotonic() - began, log, child)
        finally:
            _stop(child)
            guard.wait()
            _remove_shared_memory(prefix)
            process.keep_in_step_log(log)


def memory(pid: int) -> int:
    """What a process holds in memory, in MiB."""
    return int(psutil.Process(pid).memory_info().rss) >> 20


def children(pid: int) -> list[int]:
    """The processes that a server started: one stub a model."""
    return [child.pid for child in psutil.Process(pid).children()]


def _plainly_named(repository: Path, work: Path) -> Path:
    """The repository by a name that a shell takes for one word: Triton starts the processes of Python models by a shell, unquoted."""
    if PLAIN.fullmatch(str(repository.absolute())):
        return repository
    (work / "repository").symlink_to(repository.absolute(), target_is_directory=True)
    return work / "repository"


def _command(repository: Path, backends: Path, models: Sequence[str], host: str, ports: tuple[int, int, int], prefix: str) -> list[str]:
    return [
        str(engine.home() / "bin" / "tritonserver"),
        f"--model-repository={repository.absolute()}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        *(f"--{kind}-address={host}" for kind in ("http", "grpc", "metrics")),
        *(f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        "--exit-on-error=false",
        # Auto-complete starts every python model twice; the vLLM backend fills in inputs and outputs by it.
        *([] if _has_vllm(repository, models) else ["--disable-auto-complete-config"]),
    ]


def _has_vllm(repository: Path, models: Sequence[str]) -> bool:
    """Whether a model is for the vLLM backend, whose files may name paths that count from the repository."""
    return any(backend_of(repository / name) == "vllm" for name in models)


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Started in `folder`, in a session of its own: Ctrl-C reaches us, and we stop the server."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=engine.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=process.die_with_parent,
        )


def _wait_ready(child: subprocess.Popen[bytes], url: str, models: Sequence[str], log: Path, timeout: float, reporter: Reporter) -> str:
    """Wait until every model is ready. Returns the server's version."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < timeout:
        if child.poll() is not None:
            raise _died(child, log)
        states = _states(url)
        if states is not None:
            _refuse_failed(states, models, log)
            if all(states.get(name, ("", ""))[0] == "READY" for name in models):
                return str(get_json(f"{url}/v2")["version"])
        reporter.progress(int(seconds), None, "seconds")
        time.sleep(0.1)
    raise ModelLoadError(
        f"{', '.join(models)} was not ready after {timeout:.0f} seconds{_quoted(log)}",
        hint="Raise triton_packaging.ready_timeout_seconds, or see whether the machine has memory and cores to spare.",
    )


def _states(url: str) -> dict[str, tuple[str, str]] | None:
    """Each model's state and reason, or None while the server does not answer: it opens its ports after the first load."""
    try:
        index = get_json(f"{url}/v2/repository/index", method="POST")
    except (OSError, ValueError):
        return None
    return {model["name"]: (model.get("state", ""), model.get("reason", "")) for model in index}


def _refuse_failed(states: dict[str, tuple[str, str]], models: Sequence[str], log: Path) -> None:
    for name in models:
        state, reason = states.get(name, ("UNAVAILABLE", "the repository has no such model"))
        if state == "UNAVAILABLE" and reason not in ("", "unloaded"):
            raise ModelLoadError(
                f"Triton did not load {name}: {reason}{_quoted(log)}", hint="The log lines above name the cause; package the model again."
            )
        if state == "":
            raise ModelLoadError(f"Triton did not load {name}{_quoted(log)}", hint="Its config.pbtxt was refused; package the model again.")


def get_json(url: str, *, method: str = "GET", body: Any = None, timeout: float = 60.0) -> Any:
    """A JSON answer of the server. Raises OSError (HTTPError for a refusal) and ValueError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})  # noqa: S310
    with DIRECT.open(request, timeout=timeout) as answer:
        return json.loads(answer.read())


# Never through a proxy of the environment: the server is on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _ports(host: str, wanted: dict[str, int]) -> tuple[int, int, int]:
    """The ports to listen on, each free now. Raises EngineMissingError naming the first that is taken."""
    chosen: list[int] = []
    for service, port in wanted.items():
        if port and (port in chosen or not _free(host, port)):
            option = f"--{service.lower()}-port"
            raise PortInUseError(
                f"the {service} port {port} on {host} is already in use",
                hint=f"Stop what listens there, or choose another with {option} ({option} 0 takes any free one).",
            )
        chosen.append(port or next(p for p in _shuffled() if p not in chosen and p not in wanted.values() and _free(host, p)))
    return chosen[0], chosen[1], chosen[2]


def _shuffled() -> list[int]:
    return random.SystemRandom().sample(FREE_PORTS, k=len(FREE_PORTS))


def _free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _literal(host: str) -> str:
    """The host for a URL; a wildcard address is reached on loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _stop(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which lets answers under way finish; SIGKILL to the whole session when that takes too long."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):  # no stub outlived its server
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _remove_shared_memory(prefix: str) -> None:
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _remove_abandoned_shared_memory() -> None:
    """Regions of a tuneline that was killed: their name holds its process id."""
    for region in SHARED_MEMORY.glob(f"{SHM_PREFIX}_*"):
        owner = region.name.split("_")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with suppress(PermissionError):  # another user's
                region.unlink(missing_ok=True)


def _died(child: subprocess.Popen[bytes], log: Path) -> EngineMissingError:
    return EngineMissingError(
        f"the Triton server ended with exit status {child.returncode}{_quoted(log)}",
        hint="The log lines above name the cause. `tuneline doctor` checks what Triton needs.",
    )


def _quoted(log: Path, lines: int = 12) -> str:
    """The telling lines at the end of the server's log, as the end of a message."""
    everything = log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in everything if any(word in line for word in TELLING)] or everything
    return "".join(f"\n  {line[:400]}" for line in telling[-lines:])
