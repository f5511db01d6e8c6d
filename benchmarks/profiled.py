"""Where the CPU time of a command goes, by the module of ours that spends it or has it spent by a library.

python -m benchmarks.profiled FILE.json MODULE ARGUMENT…    runs a module as `python -m` would, under cProfile
"""

from __future__ import annotations

import cProfile
import json
import pstats
import runpy
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

OURS = ("components", "pipelines", "data")
ROUNDS = 60  # how far up a chain of library calls time is passed on


def main(output: Path, module: str, arguments: list[str]) -> None:
    """Run the module, however it ends, and write seconds by module."""
    sys.argv = [module, *arguments]
    profile = cProfile.Profile()
    try:
        profile.enable()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        profile.disable()
        output.write_text(json.dumps(by_module(pstats.Stats(profile).stats)))  # type: ignore[attr-defined]


def by_module(stats: dict[Any, Any]) -> dict[str, float]:
    """Seconds by module of ours, most first. A library's own time goes to its callers, in the shares of the time they waited for it, until
    it has come to a module of ours; what comes to none is `start and libraries`."""
    held = {function: float(entry[2]) for function, entry in stats.items()}
    total: dict[str, float] = defaultdict(float)
    for _ in range(ROUNDS):
        passed: dict[Any, float] = defaultdict(float)
        for function, seconds in held.items():
            name = module_of(function[0])
            callers = {caller: entry[3] for caller, entry in stats[function][4].items() if caller != function and entry[3] > 0}
            if name or not callers:
                total[name or "start and libraries"] += seconds
                continue
            waited = sum(callers.values())
            for caller, share in callers.items():
                passed[caller] += seconds * share / waited
        held = passed
    total["start and libraries"] += sum(held.values())
    return {name: round(seconds, 3) for name, seconds in sorted(total.items(), key=lambda item: -item[1]) if seconds >= 0.0005}


def module_of(file: str) -> str:
    """The module of ours that a source file is, such as components.data_curation.rows, or nothing."""
    root = Path(__file__).resolve().parents[1]
    try:
        parts = Path(file).resolve().relative_to(root).with_suffix("").parts
    except ValueError:
        return ""
    return ".".join(parts) if parts and parts[0] in OURS else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:])
