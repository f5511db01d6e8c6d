"""Images that hold folders alone, and volumes of this machine's folders, so that no image of a gigabyte has to be built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]
NAMESPACE, USER = "team-a", 1000
PYTHON_FOLDERS = {"usr": "/usr", "python": sys.base_prefix, "packages": sys.prefix}  # by claim


def build_image_root(root: Path, *mounts: str) -> Path:
    """Return a folder with the mount points, the links into /usr and the user of the pods."""
    for path in ("/tmp", "/etc", *mounts):
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text(f"tuneline:x:{USER}:{USER}::/tmp:/bin/sh\n")
    return root


def build_volume(name: str, folder: Path | str, mode: str, namespace: str = NAMESPACE) -> list[Json]:
    """Return a volume of a folder of the host, and its claim."""
    size = {"storage": "1Gi"}
    common = {"accessModes": [mode], "storageClassName": ""}
    volume_name = f"{namespace}-{name}"
    volume = {"hostPath": {"path": str(folder)}, "capacity": size, **common}
    claim = {"resources": {"requests": size}, "volumeName": volume_name, **common}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume_name}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": claim,
        },
    ]


def make_accessible(folder: Path) -> None:
    """Let other users enter a temporary folder."""
    for path in (folder, *folder.parents):
        if path != Path("/tmp") and str(path).startswith("/tmp/"):
            path.chmod(0o755)
