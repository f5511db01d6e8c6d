"""What a stage's work cost: wall time, CPU time and GPU time, kept beside the artifact it made.

A run that finds an artifact in the cache pays nothing for it; what it cost when it was made is still worth knowing. A process that was
killed could not tell what it spent, so the cost of resumed work counts from its last start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from components.common import places

Cost = dict[str, float]


class Clock:
    """Counts from its creation. CPU time is that of this process and of the children it has waited for."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), _cpu_seconds()

    def read(self) -> Cost:
        """{"seconds", "cpu_seconds", "gpu_seconds"}; GPU time is wall time × the GPUs this process holds memory on."""
        seconds = time.monotonic() - self._wall
        return {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(_cpu_seconds() - self._cpu, 3),
            "gpu_seconds": round(seconds * _gpus_used(), 3),
        }


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _gpus_used() -> int:
    """GPUs on which torch reserved memory in this process; without torch loaded, none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.max_memory_reserved(device) > 0 for device in range(torch.cuda.device_count()))


def keep(store: Path, stage: str, sha256: str, spent: Cost) -> None:
    """Note what it cost to make an artifact: store/costs/<sha256>.json."""
    places.write_note(store, _note(sha256), json.dumps({"stage": stage, **spent}) + "\n")


def known(store: Path, sha256: str) -> Cost | None:
    """What it cost to make an artifact; None where that was not kept."""
    try:
        kept = json.loads(places.read_note(store, _note(sha256)) or "")
    except (OSError, ValueError):
        return None
    return {name: float(kept[name]) for name in ("seconds", "cpu_seconds", "gpu_seconds")}


def _note(sha256: str) -> str:
    return f"costs/{sha256}.json"
