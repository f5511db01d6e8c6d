"""A real Slurm of two nodes on this machine: munge, slurmctld and two slurmd, ended by their own process ids."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NEEDED_FOR_REST = ("slurmrestd",)
JWT_PLUGIN = "slurm-wlm/auth_jwt.so"  # Debian's package slurm-wlm-jwt-plugin
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel")
PATIENCE = 60.0  # seconds until the nodes are idle
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldTimeout=30
SlurmdTimeout=20
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=2
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 \
ThreadsPerCore=1 RealMemory=8000
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=NO
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 OverSubscribe=NO
"""

# For slurmrestd: tokens, and an accelerator to ask for.
WITH_TOKENS = """
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/jwt.key
GresTypes=fake
"""
VERSION = "v0.0.38"  # of the API; without slurmdbd slurmrestd does not start with what asks the accounting


@dataclass
class Cluster:
    """Its configuration file, and its processes by name."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def configuration(self) -> Path:
        """What SLURM_CONF names."""
        return self.folder / "slurm.conf"

    def run(self, *command: str) -> str:
        """What one of Slurm's programs says."""
        environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    def start(self, name: str, *command: str, **variables: str) -> None:
        """Start one of its processes in the foreground, in a session of its own."""
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        environment = {"PATH": path, "HOME": "/root", "SLURM_CONF": str(self.configuration), **variables}
        with (self.folder / f"{name}.out").open("ab") as out:
            started = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.processes[name] = started

    def start_controller(self, *options: str) -> None:
        """slurmctld; -c forgets what was before."""
        self.start("slurmctld", "slurmctld", "-D", *options)

    def start_node(self, name: str) -> None:
        """One slurmd."""
        self.start(name, "slurmd", "-D", "-N", name)

    def start_rest(self, port: int, version: str = VERSION) -> None:
        """slurmrestd, which takes tokens."""
        # As root, or as Slurm's own user, it does not run unless it is told that this is meant.
        meant = {"SLURM_JWT": "daemon", "SLURMRESTD_SECURITY": "disable_user_check"}
        self.start("slurmrestd", "slurmrestd", "-a", "rest_auth/jwt", "-s", f"openapi/{version}", f"127.0.0.1:{port}", **meant)

    def token(self, seconds: int) -> str:
        """A token for whoever runs this."""
        return self.run("scontrol", "token", f"lifespan={seconds}").strip().removeprefix("SLURM_JWT=")

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one of its processes; where it is deaf, for good. What runs in a job is not touched."""
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def resume(self, node: str) -> None:
        """Give a node back; one that has come back by itself (ReturnToService) is no error."""
        with suppress(subprocess.CalledProcessError):
            self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def wait_idle(self) -> None:
        """Until both nodes take jobs."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with suppress(subprocess.SubprocessError):
                if self.run("sinfo", "-h", "-N", "-o", "%T").split()[:2] == ["idle", "idle"]:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "slurmctld.log").read_text()[-3000:])
            time.sleep(0.2)

    def state(self, job: str) -> str:
        """The state of a job as scontrol has it, "" for one it does not know."""
        with suppress(subprocess.CalledProcessError):
            found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
            return found[1] if found else ""
        return ""

    def wait_for(self, job: str, *states: str, seconds: float = 120.0) -> str:
        """Until a job is in one of these states."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}"
            time.sleep(0.2)
        return state

    def jobs(self) -> list[str]:
        """The jobs that wait or run, as ids."""
        return self.run("squeue", "-h", "-o", "%A").split()


@contextmanager
def two_nodes(*, tokens: bool = False) -> Iterator[Cluster]:
    """Start it, and end every process of it and of its jobs. With `tokens` it takes those, and its nodes have an accelerator."""
    # A socket's path may have 107 bytes: fewer than a test's own folder leaves.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as short:
        cluster = Cluster(Path(short))
        _configure(cluster)
        if tokens:
            _take_tokens(cluster)
        try:
            _start(cluster)
            yield cluster
        finally:
            _end(cluster)


def _configure(cluster: Cluster) -> None:
    first = free_ports()
    user = getpass.getuser()
    text = CONFIGURATION.format(
        user=user, host=socket.gethostname().split(".")[0], folder=cluster.folder, controller=first, first=first + 1, second=first + 2
    )
    cluster.configuration.write_text(text)
    for name in ("state", "spool"):
        (cluster.folder / name).mkdir()
    key = cluster.folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster.folder.chmod(0o755)


def _take_tokens(cluster: Cluster) -> None:
    text = cluster.configuration.read_text().replace("NodeName=n[1-2]", "NodeName=n[1-2] Gres=fake:2 Features=ib,fast")
    cluster.configuration.write_text(text + WITH_TOKENS.format(folder=cluster.folder))
    (cluster.folder / "gres.conf").write_text("Name=fake Count=2\n")
    key = cluster.folder / "jwt.key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)


def _start(cluster: Cluster) -> None:
    at = cluster.folder
    files = [f"--socket={at}/munge.socket", f"--key-file={at}/munge.key", f"--pid-file={at}/munge.pid", f"--log-file={at}/munge.log"]
    cluster.start("munged", "munged", "--foreground", "--force", *files, f"--seed-file={at}/munge.seed")
    cluster.start_controller("-c")
    for name in ("n1", "n2"):
        cluster.start_node(name)
    cluster.wait_idle()


def _end(cluster: Cluster) -> None:
    with suppress(subprocess.SubprocessError):
        for job in cluster.jobs():
            cluster.run("scancel", job)
        deadline = time.monotonic() + 15
        while cluster.jobs() and time.monotonic() < deadline:
            time.sleep(0.2)
    for name in [*cluster.processes][::-1]:
        cluster.end(name)


def has_tokens() -> bool:
    """Whether Slurm was installed with what checks tokens."""
    return any(Path("/usr/lib").glob(f"*/{JWT_PLUGIN}"))


def free_ports() -> int:
    """The first of three ports beside one another that nobody listens on."""
    for first in range(21000 + os.getpid() % 5000, 60000, 7):
        with suppress(OSError):
            for port in range(first, first + 3):
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
            return first
    raise OSError("no ports are free")


if __name__ == "__main__":
    with two_nodes() as there:
        print(f"SLURM_CONF={there.configuration}", flush=True)
        sys.stdin.read()
