"""The command line as a user starts it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ("TUNELINE_CACHE", "TUNELINE_THREADS")  # where models are converted to once, and how many threads a worker may use
COMMAND = [sys.executable, "-P", "-m", "pipelines.cli"]


def environment(code: Path = ROOT, **extra: str) -> dict[str, str]:
    """An environment that imports tuneline from `code` and inherits no workdir."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TUNELINE_", "MLFLOW_")) or k in KEPT}
    return {**inherited, "PYTHONPATH": str(code), "PYTHONUTF8": "1", **extra}


def tuneline(*arguments: object, cwd: Path, code: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(code, **extra), capture_output=True, text=True, timeout=600, check=False)


def answer(*arguments: object, cwd: Path, code: Path = ROOT, **extra: str) -> dict[str, Any]:
    """Run a command with --json and return its object; it must exit 0 and print nothing else."""
    done = tuneline(*arguments, "--json", cwd=cwd, code=code, **extra)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(code: int, *arguments: object, cwd: Path, **extra: str) -> dict[str, str]:
    """Run a command that must fail with this exit code and one error object; returns it."""
    done = tuneline(*arguments, "--json", cwd=cwd, **extra)
    assert done.returncode == code, done.stdout + done.stderr
    error: dict[str, str] = json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr, done.stderr
    return error
