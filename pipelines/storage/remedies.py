"""What mends each thing that a probe finds, by the name of its finding."""

from __future__ import annotations

import errno

NO_CACHE = (
    "Mount with actimeo=0, and lookupcache=positive where files are waited for by name, on the hosts that wait for one another"
    " (nfs(5), «Data and metadata coherence»)."
)
USER = (
    "Let this user and group write there: `security.run_as_user`, `run_as_group` and `fs_group` in platform.yaml, the folder's group and"
    " mode, the export's rules."
)
REMEDIES = {
    "read-only": "Mount it writable. Where it was writable before, the kernel or the server made it so after an error: dmesg on the"
    " host, and"
    " the server's events, say why.",
    "space": "Make room, or have the volume or its quota enlarged. Publishing is refused without space, and loses nothing.",
    "quota": "Have the quota raised (PowerScale: SmartQuotas of the directory, of the user and of the group), or make room below it.",
    "permissions": USER,
    "stale handles": "Read it again: over NFS that is how it is when a file is replaced or deleted while another host reads it. Where"
    " it happens"
    " to every file, the export was made anew: unmount and mount it again.",
    "I/O errors": "dmesg on the host says more. With `soft` a server that is slow for a moment ends so: mount with hard.",
    "inodes": "Remove small files, or have more inodes given.",
    "owner": "Run as a user of your own, not as root (`security.run_as_user` in platform.yaml); with all_squash let all hosts be"
    " mapped to one user.",
    "mode": "Mount it so that it keeps permissions, without file_mode= or umask=: secrets and checkpoints are made for their owner alone.",
    "clock": "Let hosts and server keep time by NTP from one source: `chronyc tracking` on the hosts, the time settings of the server.",
    "case": "Use storage that tells case apart: of two such files of Git, DVC or a model one replaces the other.",
    "names": "Export it over NFS, not SMB, with UTF-8 names. Layers that encrypt shorten names.",
    "new files": NO_CACHE,
    "signs of life": f"A living job can be taken for dead, and its folder for free. {NO_CACHE}",
    "rename": "tuneline publishes by a rename, and cannot be used here. Use a volume that keeps to POSIX: NFS, PowerScale, CephFS, a disk.",
    "order": f"What was published last is not what is read. {NO_CACHE}",
    "fsync": "A crash here loses what was published. Look for a write-back cache (vfs-cache, barrier=0, a controller without a"
    " battery), and"
    " for eatmydata.",
    "fsync time": "It comes back sooner than any network answers, so it forces nothing out. Look for a client that ignores it.",
    "exclusive names": "Two jobs would hold one folder. Use NFSv3 or 4.1 and later with hard, or another volume that keeps to POSIX.",
    "locks": "tuneline needs none. Let no stock dvc, SQLite or other program that locks files work here from several hosts; NFS:"
    " mount without"
    " nolock and local_lock, and let the lock service through (NFSv3: NLM and NSM).",
    "deleted while read": "Over NFS that is how it is. Delete nothing by hand that a job on another host may read.",
    "fio": "Run fio by hand there, or leave it out with --no-fio.",
}
REFUSED = {
    errno.EROFS: "read-only",
    errno.ENOSPC: "space",
    errno.EDQUOT: "quota",
    errno.EACCES: "permissions",
    errno.EPERM: "permissions",
    errno.ESTALE: "stale handles",
    errno.EIO: "I/O errors",
}
OTHERWISE = "Look at what the error names, and at dmesg on the host."
