"""Mounted file systems, and the warning about an SQLite database on one that several hosts share.

The kernel lists the mounts, with the options negotiated with a server, in /proc/self/mountinfo (proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "fuse.ceph")
BUCKET_FILESYSTEMS = (
    "fuse.s3fs", "fuse.goofys", "fuse.geesefs", "fuse.gcsfuse", "fuse.rclone", "fuse.mountpoint-s3", "fuse.blobfuse", "fuse.blobfuse2",
)  # fmt: skip
SQLITE_PREFIX = "sqlite:///"


@dataclass(frozen=True)
class Mount:
    """A mount, from a line of mountinfo."""

    point: str
    kind: str
    source: str
    options: dict[str, str] = field(default_factory=dict)  # of the mount and of its file system; "" for a flag

    @property
    def is_nfs(self) -> bool:
        """Whether this is NFS of any version."""
        return self.kind in ("nfs", "nfs4")


def find_mount(path: Path, mountinfo: str) -> Mount:
    """Find the mount of a path in the text of mountinfo: the last mount at the longest matching mount point."""
    resolved = path.resolve()
    best = Mount("/", "unknown", "unknown")
    for line in mountinfo.splitlines():
        head, separator, tail = line.partition(" - ")
        first, last = head.split(), tail.split()
        if not separator or len(first) < 6 or len(last) < 2:
            continue
        point = _unescape(first[4])
        if resolved.is_relative_to(point) and len(point) >= len(best.point):
            parts = ",".join([first[5], *last[2:3]]).split(",")
            options = {name: value for name, _, value in (part.partition("=") for part in parts)}
            best = Mount(point, last[0], _unescape(last[1]), options)
    return best


def _unescape(text: str) -> str:
    """Decode the octal escapes of spaces, tabs and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def format_database_warning(tracking_uri: str, mountinfo: str | None = None) -> str:
    """Return a warning if the tracking database is an SQLite file on a network file system, else "".

    SQLite's documentation advises against it: locks of many network file systems do not exclude other hosts, and two
    writers then damage the database (https://sqlite.org/howtocorrupt.html, section 2.1).

    Args:
        tracking_uri: URI of the MLflow server or database.
        mountinfo: text of /proc/self/mountinfo; None: of this process.
    """
    if not tracking_uri.startswith(SQLITE_PREFIX):
        return ""
    path = Path(tracking_uri.removeprefix(SQLITE_PREFIX))
    if mountinfo is None:
        mountinfo = MOUNTINFO.read_text(encoding="utf-8", errors="replace") if MOUNTINFO.exists() else ""
    mount = find_mount(path, mountinfo)
    if mount.kind not in NETWORK_FILESYSTEMS + BUCKET_FILESYSTEMS:
        return ""
    return (
        f"the MLflow database {path} is an SQLite file on {mount.kind} ({mount.source}). Two hosts that use the "
        "database at the same time can damage it. Use an MLflow server (--tracking-uri, or mlflow.tracking_uri in "
        "platform.yaml), or a workdir on a local disk"
    )
