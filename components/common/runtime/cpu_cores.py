"""Number of CPU cores available to this process within its container's limits, and the CPU's model name."""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path

CGROUP_FOLDER = Path("/sys/fs/cgroup")  # the control group of this container
CPUINFO_FILE = Path("/proc/cpuinfo")


def get_thread_count() -> int:
    """Return TUNELINE_THREADS; default: the number of available cores."""
    return int(os.environ.get("TUNELINE_THREADS") or count_available_cores())


def count_available_cores(cgroup: Path = CGROUP_FOLDER) -> int:
    """Return the number of cores that this process may use, rounded up.

    A Kubernetes CPU limit is a time quota, which the affinity mask does not include. See Linux,
    Documentation/admin-guide/cgroup-v2.rst (cpu.max) and Documentation/scheduler/sched-bwc.rst (cgroup v1).
    """
    affinity = len(os.sched_getaffinity(0))
    try:
        if (limit := cgroup / "cpu.max").exists():
            quota, period = limit.read_text(encoding="ascii").split()
        else:
            files = (cgroup / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text(encoding="ascii") for file in files)
        cores = int(quota) / int(period)
    except (OSError, ValueError):  # no limit: no file, or the quota "max"
        return affinity
    return affinity if cores <= 0 else min(affinity, math.ceil(cores))


def get_processor_name(cpuinfo: Path = CPUINFO_FILE) -> str:
    """Return the CPU's model name, such as "AMD EPYC 7763 64-Core Processor"; if unknown, its architecture."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: *(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()
