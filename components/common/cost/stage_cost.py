"""Measured cost of a stage: wall, CPU and GPU time and energy of the GPUs, stored with the artifact.

A cached artifact adds no cost to a run; the cost of its creation remains available. A killed process records no cost;
interrupted and failed attempts are added to the cost of the artifact that a later attempt finishes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.common.models import compute_devices
from components.common.workspace import artifact_store

Cost = dict[str, float]
TIMES = ("seconds", "cpu_seconds", "gpu_seconds")
# GPU time whose energy a counter measured, and GPU time of a known design power, each with its energy in kWh. Present
# only if it was measured. GPU time outside both has no known power.
ENERGIES = ("counted_gpu_seconds", "counted_kwh", "rated_gpu_seconds", "rated_kwh")
JOULES_PER_KWH = 3.6e6
JOB_COST_FILENAME = "cost.jsonl"  # in a job folder: one line per attempt of the job
_jobs: Counter[str] = Counter()  # cost of jobs that a launcher ran for this process


class CostClock:
    """Clock that measures cost since its creation.

    CPU time includes child processes that have been waited for. GPU time is wall time × number of GPUs in use.
    """

    def __init__(self) -> None:
        self._wall, self._cpu, self._jobs = time.monotonic(), _measure_cpu_seconds(), Counter(_jobs)
        self._joules = _read_energy_counters()

    def read(self) -> Cost:
        """Return the values of TIMES, and those of ENERGIES that are known."""
        seconds = time.monotonic() - self._wall
        cost: defaultdict[str, float] = defaultdict(float)
        cost.update({"seconds": seconds, "cpu_seconds": _measure_cpu_seconds() - self._cpu, "gpu_seconds": 0.0})
        counters = _read_energy_counters() if self._joules else {}
        for uuid, watts in _list_used_gpus():
            cost["gpu_seconds"] += seconds
            if uuid in counters and uuid in self._joules:
                cost["counted_gpu_seconds"] += seconds
                cost["counted_kwh"] += (counters[uuid] - self._joules[uuid]) / JOULES_PER_KWH
            elif watts:
                cost["rated_gpu_seconds"] += seconds
                cost["rated_kwh"] += watts * seconds / JOULES_PER_KWH
        for name, value in _jobs.items():
            cost[name] += value - self._jobs[name]
        return _round(cost)


def _measure_cpu_seconds() -> float:
    return sum(os.times()[:4])  # user and system time of this process and of its children


def _list_used_gpus() -> list[tuple[str, float | None]]:
    """Return UUID and design power in watts of each GPU on which torch has reserved memory in this process."""
    torch = sys.modules.get("torch")  # torch is not imported for this
    if not torch or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    used = [index for index in range(torch.cuda.device_count()) if torch.cuda.max_memory_reserved(index) > 0]
    properties = [torch.cuda.get_device_properties(index) for index in used]
    return [(f"GPU-{gpu.uuid}", compute_devices.get_design_watts(gpu.name)) for gpu in properties]


def _read_energy_counters() -> dict[str, float]:
    """Return the energy in joules that each GPU has used, by UUID; {} without the package nvidia-ml-py or a counter.

    NVML has the counter nvmlDeviceGetTotalEnergyConsumption (mJ) since Volta, but not for a MIG instance.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {nvml.nvmlDeviceGetUUID(gpu): nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000 for gpu in devices}
    except Exception:  # not installed, no driver, or a GPU without the counter: the energy is estimated
        return {}


def _round(cost: Mapping[str, float]) -> Cost:
    return {name: round(value, 9 if name.endswith("kwh") else 3) for name, value in cost.items()}


def add_costs(costs: Iterable[Mapping[str, Any]]) -> Cost:
    """Return the sum of costs; other keys are ignored. Whole milliseconds and µWh are added: the order has no effect."""
    total: Counter[str] = Counter(dict.fromkeys(TIMES, 0))
    for cost in costs:
        known = [name for name in (*TIMES, *ENERGIES) if name in cost]
        total.update({name: round(float(cost[name]) * _get_scale(name)) for name in known})
    return {name: value / _get_scale(name) for name, value in total.items()}


def _get_scale(name: str) -> int:
    return 10**9 if name.endswith("kwh") else 1000


def record_cost(store: Path, stage: str, sha256: str, spent: Cost) -> None:
    """Write the cost of an artifact to store/costs/<sha256>.json."""
    artifact_store.write_note(store, f"costs/{sha256}.json", json.dumps({"stage": stage, **spent}) + "\n")


def read_cost(store: Path, sha256: str) -> Cost | None:
    """Return the cost of an artifact, or None if it was not recorded."""
    return _read_note(store, f"costs/{sha256}.json")


def record_attempt(store: Path, stage: str, key: str, spent: Cost) -> None:
    """Add the cost of an attempt that built no artifact to that of the earlier attempts with this key."""
    total = add_costs([read_attempts(store, stage, key), spent])
    artifact_store.write_note(store, f"attempts/{stage}/{key}", json.dumps(total) + "\n")


def read_attempts(store: Path, stage: str, key: str) -> Cost:
    """Return the cost of the attempts with this key that built no artifact; zero if none was recorded."""
    return _read_note(store, f"attempts/{stage}/{key}") or dict.fromkeys(TIMES, 0.0)


def reset_attempts(store: Path, stage: str, key: str) -> None:
    """Set the recorded cost of earlier attempts, which is now part of the artifact's cost, to zero.

    The note is overwritten: a step may write to a bucket but not delete there.
    """
    artifact_store.write_note(store, f"attempts/{stage}/{key}", json.dumps(dict.fromkeys(TIMES, 0.0)) + "\n")


def _read_note(store: Path, name: str) -> Cost | None:
    try:
        note = json.loads(artifact_store.read_note(store, name) or "")
        return add_costs([{key: note[key] for key in (*TIMES, *ENERGIES) if key in note or key in TIMES}])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def write_job_cost(folder: Path, clock: CostClock, processes: int) -> None:
    """Append the cost of a job's attempt to the job folder: that of this process × the number of processes.

    The processes train equal shares, each on one GPU.
    """
    cost = multiply(clock.read(), processes)
    with suppress(OSError), (folder / JOB_COST_FILENAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(cost) + "\n")  # a full disk must not hide the job's outcome


def multiply(cost: Cost, processes: int) -> Cost:
    """Return the cost of equal processes at the same time: CPU, GPU time and energy of one of them × their number."""
    return _round({name: value if name == "seconds" else value * processes for name, value in cost.items()})


def collect_job_cost(folder: Path, *, is_local: bool) -> None:
    """Add the costs in a job folder to every clock of this process, and remove their file.

    Args:
        folder: the job folder.
        is_local: the job's processes are children of this process, whose CPU time the clocks already have.
    """
    measured_here = ("seconds", "cpu_seconds") if is_local else ("seconds",)
    _jobs.update({name: value for name, value in read_job_cost(folder).items() if name not in measured_here})
    (folder / JOB_COST_FILENAME).unlink(missing_ok=True)


def read_job_cost(folder: Path) -> Cost:
    """Return the cost of the attempts of a job that were not collected yet, from its job folder."""
    path, costs = folder / JOB_COST_FILENAME, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # truncated
            costs.append(json.loads(line))
    return add_costs(costs)
