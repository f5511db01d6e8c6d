"""Cost of a stage: wall, CPU and GPU time, stored with the artifact in the artifact store.

A cached artifact adds no cost to a run; the cost of its creation remains available. A killed process records no cost,
so the cost of resumed work contains only the time since the last start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from components.common.workspace import artifact_store

Cost = dict[str, float]


class CostClock:
    """Clock that measures cost since its creation. CPU time includes child processes that have been waited for."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), _measure_cpu_seconds()

    def read(self) -> Cost:
        """Return {"seconds", "cpu_seconds", "gpu_seconds"}; GPU time is wall time × number of GPUs in use."""
        seconds = time.monotonic() - self._wall
        # A used GPU is one on which torch has reserved memory in this process; torch is not imported for this.
        gpus, torch = 0, sys.modules.get("torch")
        if torch and torch.cuda.is_available() and torch.cuda.is_initialized():
            gpus = sum(torch.cuda.max_memory_reserved(device) > 0 for device in range(torch.cuda.device_count()))
        return {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(_measure_cpu_seconds() - self._cpu, 3),
            "gpu_seconds": round(seconds * gpus, 3),
        }


def _measure_cpu_seconds() -> float:
    return sum(os.times()[:4])  # user and system time of this process and of its children


def record_cost(store: Path, stage: str, sha256: str, spent: Cost) -> None:
    """Write the cost of an artifact to store/costs/<sha256>.json."""
    artifact_store.write_note(store, f"costs/{sha256}.json", json.dumps({"stage": stage, **spent}) + "\n")


def read_cost(store: Path, sha256: str) -> Cost | None:
    """Return the cost of an artifact, or None if it was not recorded."""
    try:
        note = json.loads(artifact_store.read_note(store, f"costs/{sha256}.json") or "")
    except (OSError, ValueError):
        return None
    return {name: float(note[name]) for name in ("seconds", "cpu_seconds", "gpu_seconds")}
