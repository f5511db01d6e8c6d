"""Several processes on this machine, started by torchrun (torch.distributed.run)."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from components.common import cores, process
from components.common.launch import Command, State

LOGS = "logs"
PATIENCE = 10.0  # seconds for a cancelled job to end by itself


@dataclass
class LocalJob:
    """torchrun, which leads a session of its own, and its processes. They end when this process does, however that ends."""

    torchrun: subprocess.Popen[bytes]
    guard: subprocess.Popen[bytes]
    folder: Path

    def state(self) -> State:
        """Whether it runs, and how it ended."""
        code = self.torchrun.poll()
        return "running" if code is None else "succeeded" if code == 0 else "failed"

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
            self.torchrun.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.torchrun.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self.torchrun.pid, signal.SIGKILL)
        self.torchrun.wait()
        self.guard.wait()

    def logs(self) -> list[Path]:
        """What each process wrote to standard error, in the order of their ranks; torchrun's own first."""
        return [self.folder / "torchrun.log", *sorted((self.folder / LOGS).rglob("stderr.log"), key=lambda log: int(log.parent.name))]


class TorchRun:
    """The local launcher."""

    def start(self, command: Command, folder: Path) -> LocalJob:
        """Start the command's processes, which share this process's cores among them."""
        shutil.rmtree(folder / LOGS, ignore_errors=True)  # of an earlier job
        job = secrets.token_hex(8)
        arguments = ["--standalone", "--nnodes=1", f"--nproc-per-node={command.processes}", "--max-restarts=0"]
        arguments += [f"--log-dir={folder / LOGS}", "--redirects=3", "-m", command.module, *command.arguments]
        threads = str(max(1, cores.threads() // command.processes))
        environment = process.python_environment(
            TUNELINE_THREADS=threads, OMP_NUM_THREADS=threads, PYTHONPATH=_import_path(), TUNELINE_JOB=job
        )
        with (folder / "torchrun.log").open("wb") as log:
            torchrun = subprocess.Popen(
                process.module_command("torch.distributed.run", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=process.die_with_parent,
            )
        return LocalJob(torchrun, process.guard_job(torchrun.pid, f"TUNELINE_JOB={job}"), folder)


def _import_path() -> str:
    """Where our packages are imported from, for processes that are not allowed to look into their working directory."""
    from components.common import hashing

    return os.pathsep.join([str(hashing.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
