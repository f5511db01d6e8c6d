"""A real Ray cluster of two nodes on this machine, ended by its own process groups."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from components.common import process

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds until a node is up
MEMORY = str(200 * 1024 * 1024)  # bytes of each node's object store
NODE = "TUNELINE_TEST_NODE"  # tells the processes of a node where to write which files they open
# A lost node is noticed after seconds, not half a minute, and workers have as much of a busy machine as other tests.
SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# Python reads this as it starts, in every process of a node.
WITNESS = f"""
import os, sys

def note(event, arguments, log=os.open(os.environ["{NODE}"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        os.write(log, os.fsencode(arguments[0]) + b"\\n")

sys.addaudithook(note)
"""


@dataclass(frozen=True)
class Cluster:
    """Its address, that of its dashboard ("" without one), its nodes, and what each node's processes write down: the files they open."""

    address: str
    logs: tuple[Path, ...]
    dashboard: str
    folder: Path
    nodes: list[subprocess.Popen[bytes]]

    def opened(self, folder: Path, pattern: str) -> list[set[str]]:
        """By node, the files in a folder, with names of a pattern, that its processes opened."""
        paths = [{Path(line) for line in log.read_text().splitlines()} for log in self.logs]
        return [{path.name for path in some if path.parent == folder and fnmatch(path.name, pattern)} for some in paths]

    def lose(self, number: int) -> None:
        """Have a node vanish with all that it started, as by a loss of power."""
        os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def bring_back(self, number: int) -> None:
        """Start a node again that was lost."""
        self.nodes[number] = _start(self.folder, number, [f"--address={self.address}"])


@contextmanager
def two_nodes(folder: Path, *, dashboard: bool = False) -> Iterator[Cluster]:
    """Start a head and a worker, each with one CPU; with the dashboard it takes jobs."""
    # Ray's sockets lie below its own folder, and the path of a socket may have 107 bytes: fewer than a test's folder leaves.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        yield from _two_nodes(folder, short, dashboard)


def _two_nodes(folder: Path, short: str, dashboard: bool) -> Iterator[Cluster]:
    port, shown = _free_port(), _free_port()
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", f"--temp-dir={short}", "--ray-client-server-port", str(_free_port())]
    head += [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={shown}"]
    url = f"http://127.0.0.1:{shown}" if dashboard else ""
    cluster = Cluster(address, tuple(_opened(folder, number) for number in range(2)), url, folder, [])
    try:
        for number, arguments in enumerate((head, [f"--address={address}"])):
            cluster.nodes.append(_start(folder, number, arguments))
            _wait(address, number + 1, cluster.nodes[-1], folder / f"node{number}.log")
        yield cluster
    finally:
        for node in reversed(cluster.nodes):
            _end(node)


def _environment() -> dict[str, str]:
    """Ray's workers import the stages from this checkout, and `python` is the one that has what they need, as in an image; a token would
    have to be shared by hand."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **SETTINGS,
    }


def _opened(folder: Path, number: int) -> Path:
    return folder / f"node{number}.opened"


def _witnessed(folder: Path, number: int) -> dict[str, str]:
    """The environment of a node whose processes write down what they open."""
    (folder / "witness").mkdir(parents=True, exist_ok=True)
    (folder / "witness" / "sitecustomize.py").write_text(WITNESS)
    return {**_environment(), "PYTHONPATH": f"{folder / 'witness'}{os.pathsep}{ROOT}", NODE: str(_opened(folder, number))}


def _start(folder: Path, number: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = _witnessed(folder, number)
    ray = Path(sys.executable).parent / "ray"
    command = [str(ray), "start", "--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", f"--object-store-memory={MEMORY}"]
    command += [f"--dashboard-agent-listen-port={_free_port()}", *arguments]
    with (folder / f"node{number}.log").open("wb") as log:
        node = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=process.die_with_parent
        )
    process.guard_group(node.pid)  # where these tests are killed, the node's own processes go too
    return node


def _wait(address: str, nodes: int, started: subprocess.Popen[bytes], log: Path) -> None:
    """Until the cluster has so many living nodes."""
    count = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert started.poll() is None, log.read_text()
        done = subprocess.run([sys.executable, "-c", count, address], capture_output=True, text=True, env=_environment(), check=False)
        if done.stdout.strip().endswith(str(nodes)):
            return
        time.sleep(0.5)
    raise AssertionError(f"{nodes} nodes were not up after {PATIENCE:.0f} s: {log.read_text()}")


def _end(node: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the node's whole group, as Ctrl-C would; what is left is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(node.pid, number)
        except ProcessLookupError:
            break
        try:
            node.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
