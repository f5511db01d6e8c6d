"""Run the command line in a child process, as a user does, or in this process."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests import json_reference, preloaded_server

ROOT = Path(__file__).parents[2]
INHERITED_VARIABLES = (
    "TUNELINE_CACHE",
    "TUNELINE_THREADS",
)  # the cache of converted models, and the number of threads per worker
# Builds the commands once per process: a call of the app builds all of them, for most refusals the largest part.
get_command = functools.cache(typer.main.get_command)
PRELOADED = ("PRELOADED_STEPS", "PRELOADED_COMMANDS")
TIMEOUT_SECONDS = 600.0
COMMAND = [sys.executable, "-P", "-m", "pipelines.cli"]


def environment(code: Path = ROOT, **extra: str) -> dict[str, str]:
    """Return an environment that imports tuneline from `code` and has no inherited workdir."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("TUNELINE_", "MLFLOW_")) or k in INHERITED_VARIABLES
    }
    return {**inherited, "PYTHONPATH": str(code), "PYTHONUTF8": "1", **extra}


def tuneline(
    *arguments: object,
    cwd: Path,
    code: Path = ROOT,
    preloaded: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        preloaded: fork the command and its steps from a process that has imported the libraries. Other code than this
            checkout's, and variables that libraries or Python read at their start, need a new process.
    """
    command = [*COMMAND, *map(str, arguments)]
    if preloaded and code == ROOT and all(name.startswith(("TUNELINE_", "MLFLOW_")) for name in extra):
        extra |= preloaded_server.get_variables(*PRELOADED)
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(code, **extra),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def answer(
    *arguments: object,
    cwd: Path,
    code: Path = ROOT,
    preloaded: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **extra: str,
) -> dict[str, Any]:
    """Run a command with --json, which must exit 0 and print one object; return that object."""
    process = tuneline(
        *arguments, "--json", cwd=cwd, code=code, preloaded=preloaded, timeout_seconds=timeout_seconds, **extra
    )
    return _read_answer(process, arguments)


def answer_in_process(*arguments: object, cwd: Path, **extra: str) -> dict[str, Any]:
    """Run a command as `answer` does, in this process, without the start of a Python and its imports."""
    return _read_answer(run_in_process(*arguments, "--json", cwd=cwd, **extra), arguments)


def _read_answer(process: subprocess.CompletedProcess[str], arguments: Sequence[object]) -> dict[str, Any]:
    assert process.returncode == 0, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    assert json_reference.find_undocumented_keys(arguments, result) == []
    return result


def refusal(code: int, *arguments: object, cwd: Path, **extra: str) -> dict[str, str]:
    """Run a command that must fail with this exit code; return its error object.

    The command runs in this process: a refusal takes milliseconds, a new Python a second. A whole run, whose keys
    depend on the state of the process, and variables that libraries read on import need a child process.
    """
    starts_run = arguments[0] == "run" and "--dry-run" not in arguments
    in_process = not starts_run and all(name.startswith(("TUNELINE_", "MLFLOW_")) for name in extra)
    process = (run_in_process if in_process else tuneline)(*arguments, "--json", cwd=cwd, **extra)
    assert process.returncode == code, process.stdout + process.stderr
    error: dict[str, str] = json.loads(process.stdout)["error"]
    assert "Traceback" not in process.stderr, process.stderr
    return error


def run_in_process(*arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process; restore signal handlers, folder, umask and environment afterwards."""
    from pipelines.cli import main as cli_main

    out, err, inherited = io.StringIO(), io.StringIO(), dict(os.environ)
    command = ["tuneline", *map(str, arguments)]
    umask = os.umask(0o022)  # of the caller; commands restrict it
    os.umask(umask)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.setattr(typer.main, "get_command", get_command)
        patch.setattr(cli_main.process_control, "install_stop_handlers", lambda **_: None)
        patch.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment(**extra))
        try:
            with pytest.raises(SystemExit) as exit_error:
                cli_main.main()
        finally:
            os.umask(umask)
            os.environ.clear()
            os.environ.update(inherited)
    return subprocess.CompletedProcess(command, int(exit_error.value.code or 0), out.getvalue(), err.getvalue())
