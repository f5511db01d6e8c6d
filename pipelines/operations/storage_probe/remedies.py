"""Remedies for the findings of a probe, by the name of the check."""

from __future__ import annotations

import errno

DISABLE_ATTRIBUTE_CACHE = (
    "On hosts that wait for each other, mount with actimeo=0, and with lookupcache=positive if they wait for files by"
    ' name (nfs(5), "Data and metadata coherence")'
)
REMEDIES = {
    "read-only": "Mount the storage writable, or check dmesg on the host and the server's events for the error that"
    " made the storage read-only.",
    "space": "Free some space, or enlarge the volume or its quota.",
    "quota": "Raise the quota (PowerScale: SmartQuotas of the directory, the user and the group), or delete files"
    " that count towards it.",
    "permissions": "Allow this user and group to write: check `security.run_as_user`, `run_as_group` and `fs_group` in"
    " platform.yaml, the folder's group and mode, and the export rules.",
    "stale handles": "Retry the read: over NFS, it fails once if another host replaces the file. If all reads "
    "fail, remount the storage.",
    "I/O errors": "Check dmesg on the host, or mount with hard instead of soft: with soft, a slow server causes I/O"
    " errors.",
    "inodes": "Remove small files, or add inodes.",
    "owner": "Run as a dedicated user, not as root (`security.run_as_user` in platform.yaml); with all_squash, map "
    "all hosts to the same user.",
    "mode": "Mount the storage without file_mode= and umask=, so that it preserves permissions: secrets and checkpoints"
    " are private to their owner.",
    "clock": "Synchronize hosts and server by NTP from one source; `chronyc tracking` shows the offset of a host.",
    "case": "Use case-sensitive storage: files of Git, DVC or a model whose names differ only in case overwrite each"
    " other.",
    "names": "Export the storage over NFS, not SMB, with UTF-8 names; encryption layers reduce the maximum length.",
    "new files": f"{DISABLE_ATTRIBUTE_CACHE}.",
    "heartbeats": f"{DISABLE_ATTRIBUTE_CACHE}. Otherwise, a live job can be considered dead and lose its lock.",
    "rename": "Use a POSIX volume: NFS, PowerScale, CephFS or a disk; tuneline publishes by rename and cannot use this"
    " storage.",
    "order": f"{DISABLE_ATTRIBUTE_CACHE}. Otherwise, reads can return an outdated version.",
    "fsync": "Disable write-back caches (vfs-cache, barrier=0, a controller without a battery) and eatmydata; with"
    " them, a crash can lose published data.",
    "fsync time": "Check whether the client ignores fsync: an fsync that is faster than a network round trip does not "
    "flush data.",
    "exclusive names": "Use NFSv3, or NFSv4.1 or later, mounted with hard, or use another POSIX volume. Otherwise, "
    "two jobs can lock the same folder.",
    "locks": "Run programs that lock files on this storage (stock dvc, SQLite) on one host only, or mount NFS without nolock and"
    " local_lock. NFSv3 also requires an open firewall for NLM and NSM. tuneline itself requires no file locks.",
    "deleted while read": "Do not manually delete files that a job on another host may read; over NFS, such"
    " a read fails.",
    "fio": "Run fio manually on the storage, or skip it with --no-fio.",
}
ERRNO_CHECKS = {
    errno.EROFS: "read-only",
    errno.ENOSPC: "space",
    errno.EDQUOT: "quota",
    errno.EACCES: "permissions",
    errno.EPERM: "permissions",
    errno.ESTALE: "stale handles",
    errno.EIO: "I/O errors",
}
DEFAULT_REMEDY = "Check dmesg on the host."
