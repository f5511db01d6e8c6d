"""A second node of a test cluster: a containerd and a kubelet with their own folders, beside those of the only node that the kit starts.

Both nodes have the address, the pod network, the kube-proxy and the DNS of the machine. Their volumes of host folders are the same.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from tests.engines.cluster import TIMEOUT_SECONDS, Cluster

FIRST_NODE, SECOND_NODE = "tuneline-node", "tuneline-second"
CGROUPS = Path("/sys/fs/cgroup")
# A folder of the first kubelet, which ignores it, because its name does not begin with "pod"; `down` removes it.
KUBELET_SETTINGS = "port: 10260\ncgroupRoot: /kubepods/second\n"


@contextmanager
def running_second_node(cluster: Cluster) -> Iterator[Cluster]:
    """Start the node and stop it. Yields the cluster with two nodes."""
    first, folder = cluster.folder, cluster.folder / "second"
    for name in ("logs", "volumes", "manifests"):
        (folder / name).mkdir(parents=True)
    for name in ("pki", "cni", "resolv.conf", "admin.kubeconfig"):
        (folder / name).symlink_to(first / name)
    (folder / "node.state").touch()  # the kit's record of kernel settings, which the first node restores
    (folder / "node.kubeconfig").symlink_to(first / "admin.kubeconfig")  # the kit issues the certificate of one node
    for name in ("containerd.toml", "kubelet.yaml"):
        text = (first / name).read_text(encoding="utf-8").replace(f"{first}/", f"{folder}/")
        (folder / name).write_text(text + (KUBELET_SETTINGS if name == "kubelet.yaml" else ""), encoding="utf-8")
    for path in [*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")]:
        (path / "second").mkdir(exist_ok=True)
    try:
        _start(first, folder, "containerd")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        socket = str(folder / "containerd.sock")
        while subprocess.run(["ctr", "-a", socket, "version"], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, (folder / "logs" / "containerd.log").read_text()
            time.sleep(0.1)
        images, archive = ("tuneline.test/pause:1", "tuneline.test/busybox:1"), str(folder / "images.tar")
        for address, arguments in (
            (str(first / "containerd.sock"), ("export", archive, *images)),
            (socket, ("import", archive)),
        ):
            command = ["ctr", "-a", address, "-n", "k8s.io", "images", *arguments]
            subprocess.run(command, capture_output=True, check=True)
        _start(first, folder, "kubelet")
        cluster.kubectl("wait", "--for=create", "--timeout=60s", f"node/{SECOND_NODE}")
        cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", f"node/{SECOND_NODE}")
        yield replace(cluster, second_folder=folder)
    finally:
        subprocess.run([cluster.kit / "node", folder, "stop"], timeout=TIMEOUT_SECONDS, check=False)


def kill_second_node(cluster: Cluster) -> None:
    """Kill the kubelet and all containers of the second node, as a power failure does."""
    assert cluster.second_folder
    psutil.Process(int((cluster.second_folder / "kubelet.pid").read_text())).kill()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if "kubepods/second" in Path(f"/proc/{process.pid}/cgroup").read_text():
                process.kill()


def _start(first: Path, folder: Path, name: str) -> None:
    """Start the program with the command line of the first node's."""
    pid = (first / f"{name}.pid").read_text().strip()
    command = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace(f"{first}/", f"{folder}/")
    command = command.replace(FIRST_NODE, SECOND_NODE)
    with (folder / "logs" / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command.split("\0"), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (folder / f"{name}.pid").write_text(str(process.pid))
