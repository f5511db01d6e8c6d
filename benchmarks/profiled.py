"""Where the CPU time of a command goes, by the module of ours that spends it or has it spent by a library.

The command runs with `environment(folder)`; every Python process of it then leaves a profile in the folder, which `summary` adds up.
"""

from __future__ import annotations

import os
import pstats
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = ("tuneline", "components", "pipelines")
ROUNDS = 60  # how far up a chain of library calls time is passed on


def environment(folder: Path) -> dict[str, str]:
    """What makes a command, and what it starts, profile themselves into an existing folder."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "profiling"), str(ROOT)]),
        "PROFILE_FOLDER": str(folder),
    }


def summary(folder: Path) -> dict[str, float]:
    """CPU seconds by module over all processes that left a profile, most first."""
    total: dict[str, float] = defaultdict(float)
    for file in sorted(folder.glob("*.pstats")):
        for name, seconds in by_module(pstats.Stats(str(file)).stats).items():  # type: ignore[attr-defined]
            total[name] += seconds
    return {name: round(seconds, 3) for name, seconds in sorted(total.items(), key=lambda item: -item[1])}


def by_module(stats: dict[Any, Any]) -> dict[str, float]:
    """Seconds by module of ours. A library's own time goes to its callers, in the shares of the time they waited for it, until it has come
    to a module of ours; what comes to none is `start and libraries`."""
    held = {function: float(entry[2]) for function, entry in stats.items()}
    total: dict[str, float] = defaultdict(float)
    for _ in range(ROUNDS):
        passed: dict[Any, float] = defaultdict(float)
        for function, seconds in held.items():
            name = module_of(function[0])
            callers = {
                caller: entry[3] for caller, entry in stats[function][4].items() if caller != function and entry[3] > 0
            }
            if name or not callers:
                total[name or "start and libraries"] += seconds
                continue
            waited = sum(callers.values())
            for caller, share in callers.items():
                passed[caller] += seconds * share / waited
        held = passed
    total["start and libraries"] += sum(held.values())
    return {name: seconds for name, seconds in total.items() if seconds >= 0.0005}


def module_of(file: str) -> str:
    """The module of ours that a source file is, such as components.data_curation.rows, or nothing."""
    try:
        parts = Path(file).resolve().relative_to(ROOT).with_suffix("").parts
    except ValueError:
        return ""
    return ".".join(parts) if parts and parts[0] in OURS else ""
