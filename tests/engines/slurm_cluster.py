"""A real Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd."""

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

REST_PROGRAMS = ("slurmrestd",)
JWT_PLUGIN = "slurm-wlm/auth_jwt.so"  # Debian's package slurm-wlm-jwt-plugin
REQUIRED_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel")
START_TIMEOUT_SECONDS = 60.0
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

# For slurmrestd: tokens and an accelerator that jobs can request.
TOKEN_CONFIGURATION = """
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/jwt.key
GresTypes=fake
"""
API_VERSION = "v0.0.38"  # without slurmdbd, slurmrestd does not start with the accounting plugins


@dataclass
class Cluster:
    """A cluster's folder and its processes by name."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def configuration_file(self) -> Path:
        """The path for SLURM_CONF."""
        return self.folder / "slurm.conf"

    def run(self, *command: str) -> str:
        """Run a Slurm program and return its standard output."""
        environment = {**os.environ, "SLURM_CONF": str(self.configuration_file)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    def start(self, name: str, *command: str, **variables: str) -> None:
        """Start a daemon in the foreground mode, in a separate session."""
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        environment = {"PATH": path, "HOME": "/root", "SLURM_CONF": str(self.configuration_file), **variables}
        with (self.folder / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.processes[name] = process

    def start_controller(self, *options: str) -> None:
        """Start slurmctld; the option -c clears its saved state."""
        self.start("slurmctld", "slurmctld", "-D", *options)

    def start_node(self, name: str) -> None:
        """Start one slurmd."""
        self.start(name, "slurmd", "-D", "-N", name)

    def start_rest(self, port: int, version: str = API_VERSION) -> None:
        """Start slurmrestd with token authentication."""
        # Without disable_user_check, slurmrestd refuses to run as root or as SlurmUser.
        variables = {"SLURM_JWT": "daemon", "SLURMRESTD_SECURITY": "disable_user_check"}
        self.start(
            "slurmrestd",
            "slurmrestd",
            "-a",
            "rest_auth/jwt",
            "-s",
            f"openapi/{version}",
            f"127.0.0.1:{port}",
            **variables,
        )

    def create_token(self, seconds: int) -> str:
        """Create a token for the current user."""
        return self.run("scontrol", "token", f"lifespan={seconds}").strip().removeprefix("SLURM_JWT=")

    def stop(self, name: str, signal_number: int = signal.SIGTERM) -> None:
        """Stop a daemon, with SIGKILL if it ignores the signal. Processes of jobs are not affected."""
        process = self.processes.pop(name)
        process.send_signal(signal_number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill_controller(self, job: str) -> None:
        """Kill slurmctld once it has saved the job, which it does up to five seconds after a change of a job."""
        saved_jobs, changed = self.folder / "state" / "job_state", time.time()
        self.run("scontrol", "update", f"jobid={job}", "comment=saved")
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not saved_jobs.exists() or saved_jobs.stat().st_mtime < changed:
            assert time.monotonic() < deadline, f"slurmctld has not saved job {job}"
            time.sleep(0.1)
        self.stop("slurmctld", signal.SIGKILL)

    def resume_node(self, node: str) -> None:
        """Resume a node; a node that has already returned (ReturnToService) is not an error."""
        with suppress(subprocess.CalledProcessError):
            self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def wait_until_idle(self) -> None:
        """Wait until both nodes accept jobs."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            with suppress(subprocess.SubprocessError):
                if self.run("sinfo", "-h", "-N", "-o", "%T").split()[:2] == ["idle", "idle"]:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "slurmctld.log").read_text()[-3000:])
            time.sleep(0.2)

    def get_state(self, job: str) -> str:
        """Return the state of a job from scontrol, "" for an unknown job."""
        with suppress(subprocess.CalledProcessError):
            match = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
            return match[1] if match else ""
        return ""

    def wait_for_state(self, job: str, *states: str, seconds: float = 120.0) -> str:
        """Wait until a job is in one of these states and return the state."""
        deadline = time.monotonic() + seconds
        while (state := self.get_state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}"
            time.sleep(0.2)
        return state

    def list_jobs(self) -> list[str]:
        """Return the ids of pending and running jobs."""
        return self.run("squeue", "-h", "-o", "%A").split()


@contextmanager
def run_cluster(*, tokens: bool = False) -> Iterator[Cluster]:
    """Run a cluster and stop it with all its jobs. With `tokens`, it accepts tokens and its nodes have accelerators."""
    # A socket path is limited to 107 bytes; a path below the test's folder would be longer.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as short:
        cluster = Cluster(Path(short))
        _configure(cluster)
        if tokens:
            _enable_tokens(cluster)
        try:
            _start_processes(cluster)
            yield cluster
        finally:
            _stop_processes(cluster)


def _configure(cluster: Cluster) -> None:
    first_port = find_free_ports()
    user = getpass.getuser()
    configuration = CONFIGURATION.format(
        user=user,
        host=socket.gethostname().split(".")[0],
        folder=cluster.folder,
        controller=first_port,
        first=first_port + 1,
        second=first_port + 2,
    )
    cluster.configuration_file.write_text(configuration)
    for name in ("state", "spool"):
        (cluster.folder / name).mkdir()
    key = cluster.folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster.folder.chmod(0o755)


def _enable_tokens(cluster: Cluster) -> None:
    text = cluster.configuration_file.read_text().replace(
        "NodeName=n[1-2]", "NodeName=n[1-2] Gres=fake:2 Features=ib,fast"
    )
    cluster.configuration_file.write_text(text + TOKEN_CONFIGURATION.format(folder=cluster.folder))
    (cluster.folder / "gres.conf").write_text("Name=fake Count=2\n")
    key = cluster.folder / "jwt.key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)


def _start_processes(cluster: Cluster) -> None:
    folder = cluster.folder
    files = [
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log",
    ]
    cluster.start("munged", "munged", "--foreground", "--force", *files, f"--seed-file={folder}/munge.seed")
    cluster.start_controller("-c")
    for name in ("n1", "n2"):
        cluster.start_node(name)
    cluster.wait_until_idle()


def _stop_processes(cluster: Cluster) -> None:
    with suppress(subprocess.SubprocessError):
        for job in cluster.list_jobs():
            cluster.run("scancel", job)
        deadline = time.monotonic() + 15
        while cluster.list_jobs() and time.monotonic() < deadline:
            time.sleep(0.2)
    for name in [*cluster.processes][::-1]:
        cluster.stop(name)


def has_jwt_plugin() -> bool:
    """Return whether Slurm's JWT plugin is installed."""
    return any(Path("/usr/lib").glob(f"*/{JWT_PLUGIN}"))


def find_free_ports() -> int:
    """Return the first of three consecutive free ports."""
    for first in range(21000 + os.getpid() % 5000, 60000, 7):
        with suppress(OSError):
            for port in range(first, first + 3):
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
            return first
    raise OSError("no ports are free")


if __name__ == "__main__":
    with run_cluster() as cluster:
        print(f"SLURM_CONF={cluster.configuration_file}", flush=True)
        sys.stdin.read()
