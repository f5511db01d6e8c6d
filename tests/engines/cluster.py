"""A real Kubernetes cluster of one node, started by a kit: a folder with the programs up, down, image and mkimage.

`up DIR` starts the cluster in a folder and writes DIR/admin.kubeconfig, `down DIR` stops it, `mkimage FOLDER NAME FILE`
makes an image from a folder, and `image DIR FILE` loads it into the node.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pytest

KIT_VARIABLE = "TUNELINE_CLUSTER_KIT"
REQUIRED_PROGRAMS = ("containerd", "runc", "iptables", "conntrack", "socat", "busybox", "openssl", "curl", "xz", "jq", "less", "kubectl")  # fmt: skip
DEBIAN_PACKAGES = (
    "containerd, runc, containernetworking-plugins, iptables, conntrack, socat, busybox-static, xz-utils, jq and less"
)
TIMEOUT_SECONDS = 300  # of a busy machine
DNS_ADDRESS = "10.96.0.10"  # of a cluster with a node
# A mark of the tests, which skips them before any fixture is built. The kit is no package, so it is never required.
REQUIRED = pytest.mark.skipif(
    not os.environ.get(KIT_VARIABLE) or (os.geteuid() != 0 and os.environ.get("TUNELINE_ENGINES") != "required"),
    reason=f"{KIT_VARIABLE} is not set to the folder of a kit that starts a Kubernetes cluster, or this user is not root",
)


@dataclass(frozen=True)
class Cluster:
    """A running cluster; its state is in `folder`, and that of its second node, if any, in `second_folder`."""

    kit: Path
    folder: Path
    second_folder: Path | None = None

    def kubectl(self, *arguments: str, text: str = "") -> str:
        """Run kubectl as the administrator, with `text` as its input, and return its output."""
        kubectl = shutil.which("kubectl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        return _run(str(kubectl), f"--kubeconfig={self.folder / 'admin.kubeconfig'}", *arguments, text=text)

    def start_controllers(self, *names: str) -> None:
        """Start controllers with their resource kinds and webhooks.

        KubeRay calls services by name, so the controllers run in a mount namespace whose /etc/resolv.conf names the
        cluster's DNS.
        """
        resolver = self.folder / "controllers-resolv.conf"  # the kit uses resolv.conf for the kubelet
        resolver.write_text(f"nameserver {DNS_ADDRESS}\n")
        mount = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        command = [str(self.kit / "controllers"), str(self.folder), "on", *names]
        if (self.folder / "kubelet.pid").exists():  # a cluster without a node has no DNS
            command = ["unshare", "--mount", "bash", "-c", mount, str(resolver), *command]
        _run(*command)

    def add_image(self, root: Path, name: str, **settings: Any) -> None:
        """Load an image into the nodes whose files are those of a folder.

        Args:
            root: The folder.
            name: The name with its tag.
            settings: Fields of the image's configuration, such as User="1000" and Env=["PATH=/bin"].
        """
        archive = self.folder / "image.tar"
        _run(str(self.kit / "mkimage"), str(root), name, str(archive))
        if settings:
            _configure(archive, settings)
        self.load_image(archive, name)
        archive.unlink()

    def load_image(self, archive: Path, name: str) -> None:
        """Load the image of an OCI archive into the nodes, with this name."""
        for folder in (self.folder, self.second_folder):
            if folder:
                _run(str(self.kit / "image"), str(folder), str(archive), name)


@contextmanager
def running_cluster(kit: Path, *, node: bool = True) -> Iterator[Cluster]:
    """Start a cluster, and stop it. A machine runs one of them with a node at a time; without a node, pods stay pending."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))  # sockets require a short path
    try:
        _run(str(kit / "up"), str(folder), NODE="1" if node else "")
        yield Cluster(kit, folder)
    finally:
        subprocess.run([kit / "down", folder], timeout=TIMEOUT_SECONDS, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(archive: Path, settings: dict[str, Any]) -> None:
    """Set fields of the configuration of the only image in an OCI archive."""
    with tarfile.open(archive) as opened:
        files = {
            member.name: cast(IO[bytes], opened.extractfile(member)).read() for member in opened if member.isfile()
        }

    def replace(descriptor: dict[str, Any], blob: dict[str, Any]) -> None:
        """Store a changed blob under its digest and change the descriptor that refers to it."""
        data = json.dumps(blob).encode()
        descriptor |= {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
        files[read_name(descriptor)] = data

    def read_name(descriptor: dict[str, Any]) -> str:
        return f"blobs/{descriptor['digest'].replace(':', '/')}"

    index = json.loads(files["index.json"])
    (image,) = index["manifests"]
    manifest = json.loads(files[read_name(image)])
    config = json.loads(files[read_name(manifest["config"])])
    config["config"] |= settings
    replace(manifest["config"], config)
    replace(image, manifest)
    files["index.json"] = json.dumps(index).encode()
    with tarfile.open(archive, "w") as opened:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            opened.addfile(member, io.BytesIO(data))


def _run(*command: str, text: str = "", **variables: str) -> str:
    result = subprocess.run(
        command,
        input=text,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout
