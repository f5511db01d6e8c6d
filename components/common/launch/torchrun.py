"""Processes on this machine under torchrun (torch.distributed.run).

They are the whole job of the launcher `process`, or one node's part of a larger job.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from components.common.artifacts import code_digest
from components.common.launch import LOGS_FOLDER, Command, JobStatus, list_process_logs
from components.common.runtime import cpu_cores, process_control

CANCEL_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Rendezvous:
    """Rank of this node, and the rendezvous of the processes of all nodes: the address and port of node 0."""

    node: int
    address: str
    port: int


@dataclass
class TorchrunJob:
    """torchrun and its processes in a separate session. `guard` ends them if this process is killed."""

    torchrun: subprocess.Popen[bytes]
    guard: subprocess.Popen[bytes]
    folder: Path
    cancel_signal: signal.Signals = signal.SIGTERM
    name: str = ""

    def poll(self) -> JobStatus:
        """Return the status of torchrun."""
        code = self.torchrun.poll()
        return JobStatus("running" if code is None else "succeeded" if code == 0 else "failed")

    def request_stop(self) -> None:
        """Send SIGTERM to the workers, or to torchrun if it has no workers.

        After a SIGTERM to torchrun, torchrun would kill its workers within half a minute.
        """
        with suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(self.torchrun.pid)
            for process in torchrun.children() or [torchrun]:
                process.send_signal(signal.SIGTERM)

    def cancel(self) -> None:
        """Cancel the job immediately."""
        if self.torchrun.poll() is None:
            self.torchrun.send_signal(self.cancel_signal)
            with suppress(subprocess.TimeoutExpired):
                self.torchrun.wait(CANCEL_TIMEOUT_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.torchrun.pid, signal.SIGKILL)
        self.torchrun.wait()
        self.guard.wait()

    def list_logs(self) -> list[Path]:
        """Return the paths of torchrun's log and of each process's standard error, by rank."""
        return list_process_logs(self.folder)


@dataclass(frozen=True)
class TorchrunLauncher:
    """The launcher `process`. Its jobs end with the watching process, so `find` returns None.

    Attributes:
        rendezvous: rendezvous of a job with several nodes.
        ignores_sigterm: whether torchrun ignores SIGTERM; otherwise, torchrun kills its workers 30 s later.
        environment: further variables of the processes, such as those that select accelerators.
    """

    rendezvous: Rendezvous | None = None
    ignores_sigterm: bool = False
    poll_interval_seconds: float = 0.2
    max_resumes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, command: Command, folder: Path) -> TorchrunJob:
        """Start the command's processes on this node. The processes share the cores of this process."""
        shutil.rmtree(folder / LOGS_FOLDER, ignore_errors=True)  # of an earlier job
        job_id = secrets.token_hex(8)
        arguments = ["--standalone", "--nnodes=1"]
        if rendezvous := self.rendezvous:
            arguments = [f"--nnodes={command.nodes}", f"--node-rank={rendezvous.node}"]
            arguments += [f"--master-addr={rendezvous.address}", f"--master-port={rendezvous.port}"]
        arguments += [f"--nproc-per-node={command.processes}", "--max-restarts=0"]
        arguments += [f"--log-dir={folder / LOGS_FOLDER}", "--redirects=3", "-m", command.module, *command.arguments]
        if self.ignores_sigterm:
            arguments.insert(0, "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT")
        cores_per_process = max(1, cpu_cores.get_thread_count() // command.processes)
        threads = os.environ.get("TUNELINE_JOB_THREADS") or str(cores_per_process)
        environment = process_control.build_python_environment(
            TUNELINE_THREADS=threads,
            OMP_NUM_THREADS=threads,
            PYTHONPATH=build_import_path(),
            TUNELINE_JOB=job_id,
            **self.environment,
        )
        with (folder / "torchrun.log").open("wb") as log:
            torchrun = subprocess.Popen(
                process_control.build_module_command("torch.distributed.run", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_ignore_sigterm if self.ignores_sigterm else process_control.die_with_parent,
            )
        guard = process_control.start_job_guard(torchrun.pid, f"TUNELINE_JOB={job_id}")
        return TorchrunJob(torchrun, guard, folder, signal.SIGINT if self.ignores_sigterm else signal.SIGTERM)

    def with_environment(self, environment: Mapping[str, str]) -> TorchrunLauncher:
        """Return this launcher with additional variables."""
        return replace(self, environment={**self.environment, **environment})

    def find(self, folder: Path) -> None:
        """Return None: jobs do not outlive the watching process."""


def _ignore_sigterm() -> None:
    """Ignore SIGTERM in torchrun's process; its workers inherit this until they install a handler."""
    process_control.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_import_path() -> str:
    """Return a PYTHONPATH of the root of tuneline's packages and the current value, without the working directory."""
    return os.pathsep.join(filter(None, [str(code_digest.ROOT), os.environ.get("PYTHONPATH")]))
