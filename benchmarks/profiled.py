"""CPU time of a command by tuneline module; the time of a library counts for the module that calls it.

The command runs with `environment(folder)`; each of its Python processes then writes a profile to the folder, and `summary` adds them up.
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
    """Return variables with which a command and its children write profiles to an existing folder."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "profiling"), str(ROOT)]),
        "PROFILE_FOLDER": str(folder),
    }


def summary(folder: Path) -> dict[str, float]:
    """Return the CPU seconds by module over all profiled processes, largest first."""
    total: dict[str, float] = defaultdict(float)
    for file in sorted(folder.glob("*.pstats")):
        for name, seconds in by_module(pstats.Stats(str(file)).stats).items():  # type: ignore[attr-defined]
            total[name] += seconds
    return {name: round(seconds, 3) for name, seconds in sorted(total.items(), key=lambda item: -item[1])}


def by_module(stats: dict[Any, Any]) -> dict[str, float]:
    """Return seconds by module of tuneline.

    The own time of a library goes to its callers, in proportion to the time of their calls, up to a module of tuneline; time without such a
    caller is `start and libraries`.
    """
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
    """Return the tuneline module of a source file, such as components.data_curation.rows; "" for any other file."""
    try:
        parts = Path(file).resolve().relative_to(ROOT).with_suffix("").parts
    except ValueError:
        return ""
    return ".".join(parts) if parts and parts[0] in OURS else ""
