"""Several processes on this machine, started by torchrun (torch.distributed.run): a whole job, or one node's part of one."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from components.common import cores, process
from components.common.launch import Command, Seen

LOGS = "logs"
PATIENCE = 10.0  # seconds for a cancelled job to end by itself


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of several nodes meet: the first node's address and port, and which node this is."""

    node: int
    address: str
    port: int


@dataclass
class LocalJob:
    """torchrun, which leads a session of its own, and its processes. They end when this process does, however that ends."""

    torchrun: subprocess.Popen[bytes]
    guard: subprocess.Popen[bytes]
    folder: Path
    ending: signal.Signals = signal.SIGTERM
    name: str = ""

    def look(self) -> Seen:
        """Whether it runs, and how it ended."""
        code = self.torchrun.poll()
        return Seen("running" if code is None else "succeeded" if code == 0 else "failed")

    def stop(self) -> None:
        """Ask every process to save its work; torchrun itself would give them half a minute and then kill them. Before they are there,
        there is nothing to save."""
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(self.torchrun.pid).children()
            for one in workers or [psutil.Process(self.torchrun.pid)]:
                one.send_signal(signal.SIGTERM)

    def cancel(self) -> None:
        """End it now."""
        if self.torchrun.poll() is None:
            self.torchrun.send_signal(self.ending)
            with suppress(subprocess.TimeoutExpired):
                self.torchrun.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self.torchrun.pid, signal.SIGKILL)
        self.torchrun.wait()
        self.guard.wait()

    def logs(self) -> list[Path]:
        """What each process wrote to standard error, in the order of their ranks; torchrun's own first."""
        return [self.folder / "torchrun.log", *sorted((self.folder / LOGS).rglob("stderr.log"), key=lambda log: int(log.parent.name))]


@dataclass(frozen=True)
class TorchRun:
    """The local launcher. Its jobs end with who watches them, so there is never one to find again.

    `deaf`: a SIGTERM to all processes is for those that train. torchrun would kill them half a minute later, while they still save.
    `environment`: variables for the processes, such as those that say which accelerators are theirs.
    """

    meeting: Rendezvous | None = None
    deaf: bool = False
    looks_every: float = 0.2
    resumes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, command: Command, folder: Path) -> LocalJob:
        """Start the command's processes on this node, which share this process's cores among them."""
        shutil.rmtree(folder / LOGS, ignore_errors=True)  # of an earlier job
        job = secrets.token_hex(8)
        arguments = [*self._nodes(command), f"--nproc-per-node={command.processes}", "--max-restarts=0"]
        arguments += [f"--log-dir={folder / LOGS}", "--redirects=3", "-m", command.module, *command.arguments]
        threads = os.environ.get("TUNELINE_JOB_THREADS") or str(max(1, cores.threads() // command.processes))
        environment = process.python_environment(
            TUNELINE_THREADS=threads, OMP_NUM_THREADS=threads, PYTHONPATH=import_path(), TUNELINE_JOB=job, **self.environment
        )
        if self.deaf:
            arguments.insert(0, "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT")
        with (folder / "torchrun.log").open("wb") as log:
            torchrun = subprocess.Popen(
                process.module_command("torch.distributed.run", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_deaf if self.deaf else process.die_with_parent,
            )
        guard = process.guard_job(torchrun.pid, f"TUNELINE_JOB={job}")
        return LocalJob(torchrun, guard, folder, signal.SIGINT if self.deaf else signal.SIGTERM)

    def find(self, folder: Path) -> None:
        """There is none."""

    def _nodes(self, command: Command) -> list[str]:
        if self.meeting is None:
            return ["--standalone", "--nnodes=1"]
        there = [f"--master-addr={self.meeting.address}", f"--master-port={self.meeting.port}"]
        return [f"--nnodes={command.nodes}", f"--node-rank={self.meeting.node}", *there]


def _deaf() -> None:
    """For torchrun; its workers inherit it until they say otherwise."""
    process.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def import_path() -> str:
    """Where our packages are imported from, for processes that are not allowed to look into their working directory."""
    from components.common import hashing

    return os.pathsep.join([str(hashing.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
