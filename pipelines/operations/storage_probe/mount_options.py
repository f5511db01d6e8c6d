"""Mount of a path, and mount options that are unsuitable for tuneline's workloads.

nfs(5) of nfs-utils (https://man7.org/linux/man-pages/man5/nfs.5.html) documents the options. The kernel lists the
values negotiated with the server in /proc/self/mountinfo (proc_pid_mountinfo(5)), without default values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from components.common.reporting.check_findings import CheckResult, check_result
from components.common.runtime.mounts import BUCKET_FILESYSTEMS, Mount
from components.common.workspace import job_folders, liveness

# With a longer delay of heartbeats, a live job is considered dead.
MAX_HEARTBEAT_DELAY_SECONDS = job_folders.LOCK_STALE_AFTER_SECONDS - 2 * liveness.HEARTBEAT_INTERVAL_SECONDS
MAX_CACHE_SECONDS = 60  # the default of acregmax and acdirmax
MIN_TRANSFER_BYTES = 1 << 17  # current servers negotiate 2**20


class MountRule(NamedTuple):
    """A rule that detects an unsuitable mount option."""

    option: str
    violation: Callable[[Mount], str]  # returns the unsuitable option as mounted, or ""
    needed: bool
    consequence: str  # the affected workload and the reason
    remedy: str


def _match_flag(*names: str) -> Callable[[Mount], str]:
    return lambda mount: next((name for name in names if name in mount.options), "")


def _match_values(*names: str, wrong: Callable[[str], bool]) -> Callable[[Mount], str]:
    """List the options of these names that have a wrong value."""
    return lambda mount: " ".join(
        f"{name}={mount.options[name]}" for name in names if name in mount.options and wrong(mount.options[name])
    )


def _exceeds(limit: float) -> Callable[[str], bool]:
    return lambda value: value.isdigit() and int(value) > limit


NFS_RULES = [
    MountRule(
        "soft",
        _match_flag("soft", "softerr"),
        True,
        "unsafe for all writes: after a server restart, writes can fail with an I/O error or lose data silently"
        " (nfs(5))",
        "Mount with hard.",
    ),
    MountRule(
        "nocto",
        _match_flag("nocto"),
        True,
        "unsafe for datasets, checkpoints and the store: opening a file does not check whether another host changed it"
        " (nfs(5))",
        "Mount without nocto.",
    ),
    MountRule(
        "proto",
        _match_values("proto", wrong=lambda value: value in ("udp", "udp6")),
        True,
        "unsafe for all workloads: on fast networks, datagram fragments can be reassembled incorrectly, which corrupts "
        "data (nfs(5))",
        "Mount with proto=tcp, or proto=rdma.",
    ),
    MountRule(
        "acregmin",
        _match_values("acregmin", wrong=_exceeds(MAX_HEARTBEAT_DELAY_SECONDS)),
        True,
        "unsafe for jobs on several hosts: heartbeats become visible so late that a live job can be considered dead"
        f" (limit: {MAX_HEARTBEAT_DELAY_SECONDS:.0f} s)",
        "Mount with actimeo=0 for checkpoints and the workdir, and without actimeo and acregmin elsewhere.",
    ),
    MountRule(
        "acdirmin, acregmax, acdirmax",
        _match_values("acdirmin", "acregmax", "acdirmax", wrong=_exceeds(MAX_CACHE_SECONDS)),
        False,
        "unsuitable for steps that wait for each other: files of another host can remain invisible for this "
        "number of seconds",
        "Mount with actimeo=0 for checkpoints and the workdir, and with the defaults (60 s) elsewhere.",
    ),
    MountRule(
        "noac, sync",
        _match_flag("noac", "sync"),
        False,
        "unsuitable for checkpoints and data preparation: every write waits for the server (noac is actimeo=0 and sync,"
        " nfs(5))",
        "Mount with actimeo=0 alone; tuneline calls fsync when necessary.",
    ),
    MountRule(
        "rsize, wsize",
        _match_values("rsize", "wsize", wrong=lambda value: value.isdigit() and 0 < int(value) < MIN_TRANSFER_BYTES),
        False,
        "unsuitable for streaming reads and checkpoints: many small transfers",
        "Mount with rsize=1048576,wsize=1048576, and check the maximum transfer size in the server's export settings.",
    ),
    MountRule(
        "nconnect",
        lambda mount: (
            "one connection"
            if mount.options.get("proto", "tcp").startswith("tcp") and mount.options.get("nconnect", "1") == "1"
            else ""
        ),
        False,
        "unsuitable for streaming reads and checkpoints on a fast network: one TCP connection often cannot use the whole"
        " bandwidth",
        "Mount with nconnect=8 (Linux 5.3 and later) after unmounting all mounts of the server, because the first mount"
        " sets the value for the others.",
    ),
    MountRule(
        "locks",
        lambda mount: (
            _match_flag("nolock")(mount) or _match_values("local_lock", wrong=lambda value: value != "none")(mount)
        ),
        False,
        "unsafe for programs that lock files across hosts, such as stock dvc or SQLite: a lock excludes only "
        "processes of this host. tuneline itself requires no locks",
        "Mount without nolock and local_lock, and open the firewall for the lock service (NFSv3: NLM and NSM; NFSv4:"
        " port 2049 alone).",
    ),
    MountRule(
        "vers",
        _match_values("vers", wrong=lambda value: value in ("2", "4", "4.0")),
        False,
        "unsafe for exclusive names: without sessions, a retransmitted request may be executed twice (RFC 8881,"
        " section 2.10.6)",
        "Mount with vers=4.1 or 4.2 (OneFS 9.3 and later), or vers=3.",
    ),
]


def check_mount(mount: Mount, host: str) -> list[CheckResult]:
    """Return one result for the mount on a host, and one for each unsuitable option."""
    name = f"mount on {host}"
    if mount.kind in BUCKET_FILESYSTEMS:
        found = f"{mount.kind} at {mount.point}: a bucket mounted as a folder"
        hint = "Use a POSIX volume (NFS, PowerScale, CephFS or a disk), or specify the bucket as s3://… (docs/how-to/store.md)."
        return [check_result(name, False, found, hint)]
    version = f" {mount.options['vers']}" if mount.is_nfs and "vers" in mount.options else ""
    results = [check_result(name, True, f"{mount.kind}{version}, {mount.source} at {mount.point}", "")]
    for rule in NFS_RULES if mount.is_nfs else []:
        if violation := rule.violation(mount):
            found = f"{violation}: {rule.consequence}"
            option = f"mount option {rule.option} on {host}"
            results.append(check_result(option, False, found, rule.remedy, needed=rule.needed))
    return results
