"""How a path is mounted, and which options are wrong for what tuneline does there.

Options as nfs(5) of nfs-utils describes them (https://man7.org/linux/man-pages/man5/nfs.5.html) and as the kernel shows them in
/proc/self/mountinfo (proc_pid_mountinfo(5)): what was settled with the server, and no option that has its default value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from components.common import jobs, liveness
from pipelines.findings import Finding, finding

MOUNTINFO = Path("/proc/self/mountinfo")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "fuse.ceph")
BUCKETS = (
    "fuse.s3fs",
    "fuse.goofys",
    "fuse.geesefs",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.mountpoint-s3",
    "fuse.blobfuse",
    "fuse.blobfuse2",
)
STALE = jobs.QUIET - 2 * liveness.BEAT  # seconds that a sign of life may be seen late before a living job is taken for dead
LONGEST_CACHE = 60  # seconds: the default of acregmax and acdirmax
SMALL_TRANSFER = 1 << 17  # bytes; servers of today settle on 2**20


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo."""

    point: str
    kind: str
    source: str
    options: dict[str, str] = field(default_factory=dict)  # of the mount and of its file system; "" for a flag

    @property
    def is_nfs(self) -> bool:
        """Any version."""
        return self.kind in ("nfs", "nfs4")

    def number(self, name: str, default: int) -> int:
        """An option's value in seconds, bytes or pieces."""
        value = self.options.get(name, "")
        return int(value) if value.isdigit() else default

    def as_dict(self) -> dict[str, Any]:
        """For scripts and the other side."""
        return asdict(self)


def of(path: Path, mountinfo: str) -> Mount:
    """The mount that a path lies on, by the text of mountinfo; of several at one place the last one counts."""
    place = path.resolve()
    found = Mount("/", "unknown", "unknown")
    for line in mountinfo.splitlines():
        mount = _parsed(line)
        if mount and place.is_relative_to(mount.point) and len(mount.point) >= len(found.point):
            found = mount
    return found


def _parsed(line: str) -> Mount | None:
    head, separator, tail = line.partition(" - ")
    first, last = head.split(), tail.split()
    if not separator or len(first) < 6 or len(last) < 2:
        return None
    parts = ",".join([first[5], *last[2:3]]).split(",")
    options = {name: value for name, _, value in (part.partition("=") for part in parts)}
    return Mount(_plain(first[4]), last[0], _plain(last[1]), options)


def _plain(text: str) -> str:
    """Spaces, tabs and backslashes are written in octal there."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


class Rule(NamedTuple):
    """An option that is wrong for something."""

    option: str
    seen: Callable[[Mount], str]  # the option as it stands, "" where it is right
    needed: bool
    wrong: str  # for what, and why
    remedy: str


def _flag(*names: str) -> Callable[[Mount], str]:
    return lambda mount: next((name for name in names if name in mount.options), "")


def _given(mount: Mount, name: str, wrong: bool) -> str:
    return f"{name}={mount.options.get(name, '')}".rstrip("=") if wrong else ""


NFS_RULES = [
    Rule(
        "soft",
        _flag("soft", "softerr"),
        True,
        "wrong for everything that is written: a server that restarts becomes an I/O error in the middle of a write, and data can be lost"
        " without a word (nfs(5))",
        "Mount with hard.",
    ),
    Rule(
        "nocto",
        _flag("nocto"),
        True,
        "wrong for datasets, checkpoints and the store: opening a file does not ask whether another host changed it (nfs(5))",
        "Mount without nocto.",
    ),
    Rule(
        "proto",
        lambda m: _given(m, "proto", m.options.get("proto", "") in ("udp", "udp6")),
        True,
        "wrong for everything: fragments of datagrams can be put together wrongly on fast networks, which damages data (nfs(5))",
        "Mount with proto=tcp, or proto=rdma.",
    ),
    Rule(
        "acregmin",
        lambda m: _given(m, "acregmin", m.number("acregmin", 3) > STALE),
        True,
        f"wrong for jobs on several hosts: a sign of life is seen so late that a living job can be taken for dead (at most {STALE:.0f} s)",
        "Mount with actimeo=0 for checkpoints and the workdir, elsewhere without actimeo and acregmin.",
    ),
    Rule(
        "acdirmin, acregmax, acdirmax",
        lambda m: " ".join(filter(None, (_given(m, n, m.number(n, 0) > LONGEST_CACHE) for n in ("acdirmin", "acregmax", "acdirmax")))),
        False,
        "wrong for steps that wait for one another: what another host wrote stays unseen for so many seconds",
        "Mount with actimeo=0 for checkpoints and the workdir, elsewhere with the defaults (60 s).",
    ),
    Rule(
        "noac, sync",
        _flag("noac", "sync"),
        False,
        "wrong for checkpoints and data preparation: every write waits for the server (noac is actimeo=0 and sync, nfs(5))",
        "Mount with actimeo=0 alone; tuneline calls fsync where it has to.",
    ),
    Rule(
        "rsize, wsize",
        lambda m: " ".join(filter(None, (_given(m, n, 0 < m.number(n, 0) < SMALL_TRANSFER) for n in ("rsize", "wsize")))),
        False,
        "wrong for streaming reads and checkpoints: many small transfers",
        "Mount with rsize=1048576,wsize=1048576, and look at the largest transfer that the server's export settings allow.",
    ),
    Rule(
        "nconnect",
        lambda m: "one connection" if m.options.get("proto", "tcp").startswith("tcp") and m.number("nconnect", 1) < 2 else "",
        False,
        "wrong for streaming reads and checkpoints on a fast network: one TCP connection often gives less than the network does",
        "Mount with nconnect=8 (Linux 5.3 and later). The first mount of a server decides for all others: unmount them all.",
    ),
    Rule(
        "locks",
        lambda m: _flag("nolock")(m) or _given(m, "local_lock", m.options.get("local_lock", "none") != "none"),
        False,
        "wrong for programs that lock files across hosts, such as stock dvc or SQLite: a lock holds on this host only. tuneline needs none",
        "Mount without nolock and local_lock, and let the lock service through the firewall (NFSv3: NLM and NSM; NFSv4: port 2049 alone).",
    ),
    Rule(
        "vers",
        lambda m: _given(m, "vers", m.options.get("vers", "") in ("2", "4", "4.0")),
        False,
        "wrong for exclusive names: without sessions a repeated request may be carried out twice (RFC 8881, section 2.10.6)",
        "Mount with vers=4.1 or 4.2 (OneFS 9.3 and later), or vers=3.",
    ),
]  # fmt: skip


def judge(mount: Mount, who: str) -> list[Finding]:
    """One finding for how it is mounted, and one for each option that is wrong for something; `who` names the host."""
    name = f"mount on {who}"
    if mount.kind in BUCKETS:
        hint = "Use a volume that keeps to POSIX: NFS, PowerScale, CephFS or a disk; a bucket is named as s3://… (docs/store.md)."
        return [finding(name, False, f"{mount.kind} at {mount.point}: a bucket that is mounted as a folder", hint)]
    wrong = [(rule, seen) for rule in NFS_RULES if (seen := rule.seen(mount))] if mount.is_nfs else []
    told = f"{mount.kind}{' ' + mount.options['vers'] if mount.is_nfs and 'vers' in mount.options else ''}, {mount.source} at {mount.point}"
    return [
        finding(name, True, told, ""),
        *(
            finding(f"mount option {rule.option} on {who}", False, f"{seen}: {rule.wrong}", rule.remedy, needed=rule.needed)
            for rule, seen in wrong
        ),
    ]
