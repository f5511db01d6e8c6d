"""What a measurement was made with: the command, the code and the machine; and on which day."""

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
PLACES = {"--workdir": "DIR", "--json": "FILE", "--peer-python": "PYTHON", "--vllm-python": "PYTHON"}


def circumstances(module: str) -> dict[str, Any]:
    """Of the program that runs. memory is bytes, load that of the last five minutes."""
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "command": f"python -m {module} " + shlex.join(anywhere(sys.argv[1:])),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[1], 1),
    }


def anywhere(arguments: list[str]) -> list[str]:
    """The arguments as one would give them elsewhere: without the folders of this machine."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [PLACES.get(option) or (Path(given).name if given.startswith("/") else given) for option, given in pairs]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
