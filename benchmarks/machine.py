"""The circumstances of a measurement: command, commit, machine and date."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PLACES = {
    "--workdir": "DIR",
    "--about": "FILE",
    "--baseline": "CHECKOUT",
    "--json": "FILE",
    "--peer-python": "PYTHON",
    "--vllm-python": "PYTHON",
}


def circumstances(module: str) -> dict[str, Any]:
    """Return the circumstances of this program. `memory` is in bytes; `load` is the average of the last five minutes."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "command": f"python -m {module} " + shlex.join(anywhere(sys.argv[1:])),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": describe_commit(ROOT),
        "python": platform.python_version(),
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[1], 1),
    }


def describe_commit(checkout: Path) -> str:
    """Return the abbreviated commit of a checkout, with -dirty if files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def anywhere(arguments: list[str]) -> list[str]:
    """Return the arguments without the paths of this machine."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [PLACES.get(option) or (Path(given).name if given.startswith("/") else given) for option, given in pairs]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
