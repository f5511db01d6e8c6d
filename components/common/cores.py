"""How many cores this process may use, a container's and not the machine's, and of which kind they are."""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # a container sees its own group here
CPUINFO = Path("/proc/cpuinfo")


def threads() -> int:
    """TUNELINE_THREADS, or the number of cores this process may use."""
    return int(os.environ.get("TUNELINE_THREADS") or available())


def available(cgroup: Path = CGROUP) -> int:
    """The cores this process may use, at least 1.

    A CPU limit of Kubernetes is a quota of time, which the affinity mask does not show: with a process a core of a node of 128, all of
    them would wait for the time of four. A part of a core counts as one.
    """
    allowed = len(os.sched_getaffinity(0))
    quota, period = _quota(cgroup)
    return allowed if quota <= 0 else min(allowed, math.ceil(quota / period))


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's own name, such as "AMD EPYC 7763 64-Core Processor"; where it says none, its architecture."""
    try:
        found = re.search(r"^model name\s*: *(\S.*)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _quota(cgroup: Path) -> tuple[int, int]:
    """Microseconds of processor time in so many microseconds, the former 0 or less where there is no limit.

    Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and Documentation/scheduler/sched-bwc.rst (cgroup v1).
    """
    try:
        if (limit := cgroup / "cpu.max").exists():
            quota, period = limit.read_text(encoding="ascii").split()
            return (0, 1) if quota == "max" else (int(quota), int(period))
        files = (cgroup / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        quota_us, period_us = (int(file.read_text(encoding="ascii")) for file in files)
        return quota_us, period_us
    except (OSError, ValueError):
        return 0, 1
