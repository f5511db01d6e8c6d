"""The cost of a command: CPU and wall seconds, memory and disk of all its processes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from components.common.runtime import process_control

PROCESS_POLL_INTERVAL_SECONDS = 0.1  # of processes and memory
STORAGE_POLL_INTERVAL_SECONDS = 1.0  # of shared memory and disk, which cost more to measure
LEFTOVER_TIMEOUT_SECONDS = 10  # for processes that the command left behind


@dataclass
class Cost:
    """The cost of a command and of all its descendants.

    Attributes:
        cpu, wall: Seconds.
        rss, pss: Peaks of the sums over all processes in bytes. Shared memory counts once per process in rss, and once in pss.
        disk: Largest growth of the watched folders in bytes.
        parts: CPU seconds by kind of process, as sampled; a process that ends between two samples counts only in cpu.
        memory: Peak rss by kind of process in bytes.
    """

    command: list[str]
    cpu: float = 0.0
    wall: float = 0.0
    rss: int = 0
    pss: int = 0
    disk: int = 0
    returncode: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(
    command: list[str],
    log: Path,
    watched: list[Path],
    cwd: Path,
    environment: dict[str, str] | None = None,
    stdout: Path | None = None,
) -> Cost:
    """Run a command to its end and return its cost; the return code reports a failure.

    The output goes to `log`, or standard output to a separate file. A separate process measures the command and has no other child, so
    that no other child of the caller is counted or killed.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        return apart.submit(_measured, command, log, watched, cwd, environment, stdout).result()


def _measured(
    command: list[str],
    log: Path,
    watched: list[Path],
    cwd: Path,
    environment: dict[str, str] | None,
    stdout: Path | None,
) -> Cost:
    process_control.adopt_orphans()  # so that what outlives its parent is still below this process, and counted
    cost = Cost(command)
    before, held, seen = _children_cpu(), sum(map(_size, watched)), dict[psutil.Process, tuple[str, float]]()
    began = time.monotonic()
    with log.open("wb") as file, (stdout or Path(os.devnull)).open("wb") as output:
        spoken = output if stdout else file
        child = subprocess.Popen(
            command,
            stdout=spoken,
            stderr=file,
            cwd=cwd,
            env=process_control.build_python_environment(**(environment or {})),
            preexec_fn=process_control.die_with_parent,
        )
        looked = 0.0
        while child.poll() is None:
            _look(cost, seen)
            if time.monotonic() - looked > STORAGE_POLL_INTERVAL_SECONDS:
                looked = time.monotonic()
                cost.pss = max(cost.pss, sum(pss_of(p.pid) for p in seen if p.is_running()))
                cost.disk = max(cost.disk, sum(map(_size, watched)) - held)
            time.sleep(PROCESS_POLL_INTERVAL_SECONDS)
        cost.wall, cost.returncode = time.monotonic() - began, child.returncode
    _end(seen)
    cost.disk = max(cost.disk, sum(map(_size, watched)) - held)
    cost.cpu = max(_children_cpu() - before, sum(seconds for _, seconds in seen.values()))
    cost.parts = _parts(seen)
    return cost


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _look(cost: Cost, seen: dict[psutil.Process, tuple[str, float]]) -> None:
    rss: dict[str, int] = defaultdict(int)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError), child.oneshot():
            times, label = child.cpu_times(), _label(child.cmdline())
            rss[label] += child.memory_info().rss
            seen[child] = (label, times.user + times.system)
    cost.rss = max(cost.rss, sum(rss.values()))
    cost.memory.update({label: max(held, cost.memory.get(label, 0)) for label, held in rss.items()})


def _label(command: list[str]) -> str:
    """Return the module or program that a process runs, without paths."""
    if "-m" in command[1:]:
        return command[command.index("-m") + 1]
    if "-c" in command[1:]:
        return " ".join(command[command.index("-c") + 1].split())[:60]
    return " ".join(Path(part).name for part in command[:2]) or "a process that just began"


def _parts(seen: dict[psutil.Process, tuple[str, float]]) -> dict[str, float]:
    parts: dict[str, float] = defaultdict(float)
    for label, seconds in seen.values():
        parts[label] += seconds
    return {label: round(seconds, 2) for label, seconds in sorted(parts.items(), key=lambda part: -part[1])}


def pss_of(pid: int) -> int:
    """Return the private memory of a process plus its share of shared memory, in bytes; 0 if it has ended."""
    return rollup(pid).get("Pss", 0)


def rollup(pid: int) -> dict[str, int]:
    """Return the kernel's sums over the memory of a process in bytes, such as Rss, Pss and Anonymous; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(place) / name).lstat().st_blocks * 512
    return total


def _end(seen: dict[psutil.Process, tuple[str, float]]) -> None:
    """Wait for the remaining processes of the command, kill those that do not end, and count all of them."""
    _, alive = psutil.wait_procs(list(seen), timeout=LEFTOVER_TIMEOUT_SECONDS)
    for left in alive:
        with suppress(psutil.Error):
            left.kill()
    psutil.wait_procs(alive, timeout=LEFTOVER_TIMEOUT_SECONDS)
    for child in seen:
        with suppress(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)
