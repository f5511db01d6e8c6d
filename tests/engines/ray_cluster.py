"""A real Ray cluster of two nodes on this machine; each node is a process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from components.common.runtime import process_control

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_SECONDS = 120.0  # per node
START_ATTEMPTS = 3  # on a busy machine, a node takes longer than the 30 s that Ray waits for it
RAY_START_TIMEOUT = "The current node timed out during startup"
OBJECT_STORE_BYTES = str(200 * 1024 * 1024)  # per node
OPENED_FILES_VARIABLE = "TUNELINE_TEST_NODE"  # path of the log of opened files, for the processes of a node
# Detect a lost node within seconds instead of half a minute, and run workers at the priority of other tests.
RAY_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# Every Python process of a node loads this as sitecustomize.py.
AUDIT_HOOK = f"""
import os, sys

def note(event, arguments, log=os.open(os.environ["{OPENED_FILES_VARIABLE}"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        os.write(log, os.fsencode(arguments[0]) + b"\\n")

sys.addaudithook(note)
"""


@dataclass(frozen=True)
class Cluster:
    """The cluster's address, dashboard URL ("" without a dashboard), nodes and, per node, the log of opened files."""

    address: str
    logs: tuple[Path, ...]
    dashboard: str
    folder: Path
    nodes: list[subprocess.Popen[bytes]]

    def list_opened_files(self, folder: Path, pattern: str) -> list[set[str]]:
        """Return, per node, the names of the files in `folder` matching `pattern` that its processes opened."""
        paths = [{Path(line) for line in log.read_text().splitlines()} for log in self.logs]
        return [
            {path.name for path in opened if path.parent == folder and fnmatch(path.name, pattern)} for opened in paths
        ]

    def kill_node(self, number: int) -> None:
        """Kill a node and all its processes, as a power loss does."""
        with suppress(ProcessLookupError):
            os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def restart_node(self, number: int) -> None:
        """Restart a killed node."""
        self.nodes[number] = _start_node(self.folder, number, [f"--address={self.address}"])


@contextmanager
def run_cluster(folder: Path, *, dashboard: bool = False) -> Iterator[Cluster]:
    """Start a head and a worker with one CPU each; jobs need the dashboard."""
    # A socket path is limited to 107 bytes; a path below the test's folder would be longer.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short_folder:
        yield from _run_nodes(folder, short_folder, dashboard)


def _run_nodes(folder: Path, short_folder: str, dashboard: bool) -> Iterator[Cluster]:
    port, dashboard_port = _free_port(), _free_port()
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", f"--temp-dir={short_folder}", "--ray-client-server-port", str(_free_port())]
    head += [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={dashboard_port}"]
    url = f"http://127.0.0.1:{dashboard_port}" if dashboard else ""
    cluster = Cluster(address, tuple(_opened_files_log(folder, number) for number in range(2)), url, folder, [])
    try:
        for number, arguments in enumerate((head, [f"--address={address}"])):
            cluster.nodes.append(_start_node(folder, number, arguments))
            attempts = 1
            while not _wait_for_nodes(address, number + 1, cluster.nodes[-1], folder / f"node{number}.log"):
                attempts += 1
                assert attempts <= START_ATTEMPTS
                cluster.kill_node(number)
                cluster.nodes[-1] = _start_node(folder, number, arguments)
        yield cluster
    finally:
        for number in range(len(cluster.nodes)):
            cluster.kill_node(number)  # a node needs 20 s to end by itself


def _build_environment() -> dict[str, str]:
    """Return an environment in which workers import this checkout with this Python; authentication is off, since no token is shared."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **RAY_SETTINGS,
    }


def _opened_files_log(folder: Path, number: int) -> Path:
    return folder / f"node{number}.opened"


def _build_node_environment(folder: Path, number: int) -> dict[str, str]:
    """Return the environment of a node whose processes log the files they open."""
    (folder / "audit_hook").mkdir(parents=True, exist_ok=True)
    (folder / "audit_hook" / "sitecustomize.py").write_text(AUDIT_HOOK)
    return {
        **_build_environment(),
        "PYTHONPATH": f"{folder / 'audit_hook'}{os.pathsep}{ROOT}",
        OPENED_FILES_VARIABLE: str(_opened_files_log(folder, number)),
    }


def _start_node(folder: Path, number: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = _build_node_environment(folder, number)
    ray = Path(sys.executable).parent / "ray"
    command = [
        str(ray),
        "start",
        "--block",
        "--num-cpus=1",
        "--node-ip-address=127.0.0.1",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]
    command += [f"--dashboard-agent-listen-port={_free_port()}", *arguments]
    with (folder / f"node{number}.log").open("wb") as log:
        node = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=process_control.die_with_parent,
        )
    process_control.start_group_guard(node.pid)  # stops the node's processes if the tests are killed
    return node


def _wait_for_nodes(address: str, node_count: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until the cluster has `node_count` live nodes; return False if Ray gave up the start after its 30 s."""
    script = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert RAY_START_TIMEOUT in log.read_text(), log.read_text()
            return False
        result = subprocess.run(
            [sys.executable, "-c", script, address],
            capture_output=True,
            text=True,
            env=_build_environment(),
            check=False,
        )
        if result.stdout.strip().endswith(str(node_count)):
            return True
        time.sleep(0.5)
    raise AssertionError(f"{node_count} nodes were not up after {START_TIMEOUT_SECONDS:.0f} s: {log.read_text()}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
