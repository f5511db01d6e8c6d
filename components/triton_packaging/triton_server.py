"""Starts a Triton server process, waits until its models are ready, and stops it with its stub processes.

The server has no network port. It serves gRPC and its metrics on Unix sockets in a folder that only this user can open,
because a malformed request can end it.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from components.common.runtime import process_control
from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError, TunelineError
from components.common.runtime.reporters import Reporter, SilentReporter
from components.common.workspace.job_folders import private_folder
from components.triton_packaging import triton_installation
from components.triton_packaging.triton_config import CONFIG_FILENAME, read_backend

SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - the kernel's folder of POSIX shared memory
SHM_PREFIX = "tuneline"
GRPC_SOCKET, METRICS_SOCKET = "grpc:1", "metrics"  # Triton appends the port to the name of the gRPC socket
MAX_SOCKET_FOLDER_LENGTH = 90  # characters; the path of a socket has at most 107
STOP_GRACE_SECONDS = 60.0
PROBE_TIMEOUT_SECONDS = 60.0  # of a request that asks a starting server for the state of its models
SHELL_SAFE_PATH = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")  # a path that a shell parses as one word
# Words of Triton's error levels and of Python tracebacks.
RELEVANT_LOG_WORDS = ("E1", "E0", "error", "Error", "failed", "Failed")


class ModelLoadError(TunelineError):
    """The server runs, but a model of its repository was not loaded."""

    kind = "model_load"


@dataclass(frozen=True)
class ServerAddress:
    """gRPC address of a server: HOST:PORT, or unix:PATH."""

    grpc_url: str


@dataclass(frozen=True)
class Server(ServerAddress):
    """A running server: its sockets, models and version, and the seconds until it was ready.

    Attributes:
        metrics_socket: Unix socket that answers GET /metrics over HTTP.
    """

    metrics_socket: Path
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
def open_socket_folder() -> Iterator[Path]:
    """Create a folder for a server's sockets, with a short path, that only this user can open; remove it at the end."""
    parent = Path(tempfile.gettempdir())
    with private_folder(parent, "tuneline-sockets", mode=0o700, rescue=_remove_sockets) as job:
        is_short = len(str(parent)) < MAX_SOCKET_FOLDER_LENGTH - len("/tuneline-12345678")
        folder = Path(tempfile.mkdtemp(prefix="tuneline-", dir=parent if is_short else "/tmp"))  # noqa: S108 - mode 0700
        (job / "sockets").symlink_to(folder)
        yield folder


def get_socket_addresses(folder: Path) -> tuple[str, Path]:
    """Return the gRPC address and the metrics socket of a server whose sockets are in this folder."""
    return f"unix:{folder / GRPC_SOCKET}", folder / METRICS_SOCKET


def _remove_sockets(job: Path) -> None:
    """Remove the socket folder of a job. Deletes only files with known names: another user may have created the job."""
    with suppress(OSError):
        folder = (job / "sockets").readlink()
        for name in (GRPC_SOCKET, METRICS_SOCKET):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


@contextmanager
def running_server(
    repository: Path,
    *,
    log: Path,
    models: Sequence[str] | None = None,
    sockets: Path | None = None,
    other_repositories: Sequence[Path] = (),
    ready_timeout: float = 300.0,
    reporter: Reporter | None = None,
) -> Iterator[Server]:
    """Start a server with models of the repository, yield it when they are ready, and stop it at the end of the block.

    The server is also killed if the thread that started it ends.

    Args:
        log: file for the server's output.
        models: names of the models; None for all.
        sockets: folder of the server's sockets; a server that is started again in this folder has the same addresses.
            None: a new folder.
        other_repositories: further model repositories, whose models have other names.
        ready_timeout: timeout in seconds until all models are ready.

    Raises:
        EngineMissingError: Triton cannot run on this machine, or the server exits.
        ModelLoadError: a model does not load or is not ready in time.
    """
    if reason := triton_installation.unavailable_reason():
        raise EngineMissingError(reason, hint=triton_installation.installation_hint())
    names = (
        list(models) if models is not None else sorted(p.parent.name for p in repository.glob(f"*/{CONFIG_FILENAME}"))
    )
    _remove_abandoned_shared_memory()
    prefix = f"{SHM_PREFIX}_{os.getpid()}_{secrets.token_hex(4)}_"
    # The files of a vLLM model contain paths relative to the repository.
    has_vllm = any(read_backend(repository / name) == "vllm" for name in names)
    with (
        private_folder(Path(tempfile.gettempdir()), "tuneline-triton", mode=0o700) as work,
        nullcontext(sockets) if sockets else open_socket_folder() as folder,
    ):
        grpc_socket, metrics_socket = folder / GRPC_SOCKET, folder / METRICS_SOCKET
        repositories = [repository, *other_repositories]
        command = _build_command(_quote_locations(repositories, work), names, folder, work / "backends", prefix)
        if not has_vllm:  # auto-complete starts every python model twice; the vLLM backend needs it to add its tensors
            command.append("--disable-auto-complete-config")
        try:
            for is_last in (False, True):
                for path in (grpc_socket, metrics_socket):  # left by a killed server
                    path.unlink(missing_ok=True)
                began = time.monotonic()
                with _started(command, repository if has_vllm else work, log) as child:
                    try:
                        version = _wait_ready(
                            child, grpc_socket, names, log, ready_timeout, reporter or SilentReporter()
                        )
                    except EngineMissingError:
                        # Triton 2.51 crashed in 1 of 100 starts, while it started the processes of two models.
                        if is_last or child.returncode not in (-signal.SIGSEGV, -signal.SIGABRT):
                            raise
                        kept = keep_log(log)
                        (reporter or SilentReporter()).note(
                            f"Triton exited with status {child.returncode} during startup; restarting it. Its log: {kept}"
                        )
                        continue
                    seconds = time.monotonic() - began
                    yield Server(f"unix:{grpc_socket}", metrics_socket, names, version, seconds, log, child)
                    break
        finally:
            for region in SHARED_MEMORY_FOLDER.glob(f"{prefix}*"):
                region.unlink(missing_ok=True)
            process_control.append_to_step_log(log)


def keep_log(log: Path) -> Path:
    """Rename the log of an ended server, which the next server would overwrite; return its new path."""
    kept = log.with_name(f"{log.stem}.previous{log.suffix}")
    with suppress(OSError):  # the server did not start, or the disk is full
        log.replace(kept)
    return kept


def get_resident_mib(pid: int) -> int:
    """Return the resident memory of a process, in MiB."""
    return int(psutil.Process(pid).memory_info().rss) >> 20


def get_child_pids(pid: int) -> list[int]:
    """Return the process IDs of a server's stubs, one per model."""
    return [child.pid for child in psutil.Process(pid).children()]


def _quote_locations(repositories: Sequence[Path], work: Path) -> list[Path]:
    """Return paths of the repositories that a shell parses as one word: Triton starts models through an unquoted shell."""
    locations = []
    for number, each in enumerate(repositories):
        location = each.absolute()
        if not SHELL_SAFE_PATH.fullmatch(str(location)):
            location = work / f"repository{number}"
            location.symlink_to(each.absolute(), target_is_directory=True)
        locations.append(location)
    return locations


def _build_command(
    locations: Sequence[Path], models: Sequence[str], sockets: Path, backends: Path, shared_memory_prefix: str
) -> list[str]:
    """Return the command of a server without a network port."""
    grpc_url, metrics_socket = get_socket_addresses(sockets)
    grpc_name, grpc_port = grpc_url.rsplit(":", 1)
    return [
        str(triton_installation.get_triton_home() / "bin" / "tritonserver"),
        *(f"--model-repository={location}" for location in locations),
        f"--backend-directory={triton_installation.create_backend_folder(backends)}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
        "--allow-http=false",
        f"--grpc-address={grpc_name}",
        f"--grpc-port={grpc_port}",
        f"--metrics-address=unix:{metrics_socket}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        "--exit-on-error=false",
    ]


@contextmanager
def _started(command: Sequence[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server with a guard that ends its model processes, and stop it at the end of the block."""
    child = _start(command, folder, log)
    guard = process_control.start_group_guard(child.pid)
    try:
        yield child
    finally:
        _stop(child)
        guard.wait()


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
    child: subprocess.Popen[bytes],
    grpc_socket: Path,
    models: Sequence[str],
    log: Path,
    timeout: float,
    reporter: Reporter,
) -> str:
    """Wait until every model is ready, and return the server's version."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    began = time.monotonic()
    while (seconds := time.monotonic() - began) < timeout:
        if child.poll() is not None:
            raise _server_exit_error(child, log)
        if grpc_socket.exists():  # the server creates its sockets after the first load
            with suppress(InferenceServerException), InferenceServerClient(f"unix:{grpc_socket}") as client:
                index = client.get_model_repository_index(client_timeout=PROBE_TIMEOUT_SECONDS).models
                _check_loads({model.name: (model.state, model.reason) for model in index}, models, log)
                if all(model.state == "READY" for model in index if model.name in models):
                    return str(client.get_server_metadata(client_timeout=PROBE_TIMEOUT_SECONDS).version)
        reporter.progress(int(seconds), None, "seconds")
        time.sleep(0.1)
    raise ModelLoadError(
        f"Triton did not load {', '.join(models)}: not ready after {format_count(round(timeout), 'second')}{_log_excerpt(log)}",
        hint="Raise triton_packaging.ready_timeout_seconds, or check the machine's free memory and cores.",
    )


def _check_loads(states: dict[str, tuple[str, str]], models: Sequence[str], log: Path) -> None:
    """Raise ModelLoadError if a model failed to load; `states` has the state and the reason of each model."""
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
        hint=f"Fix the error in the log lines above, or check the requirements of Triton with `tuneline doctor`. The "
        f"complete log is {log}.",
    )


def _log_excerpt(log: Path) -> str:
    """Return the last 12 error lines of the server's log, as the end of a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    relevant = [line for line in lines if any(word in line for word in RELEVANT_LOG_WORDS)] or lines
    return "".join(f"\n  {line[:400]}" for line in relevant[-12:])
