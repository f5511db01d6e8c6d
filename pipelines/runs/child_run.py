"""Execution of a run in a child process, for programs that must keep their signal handlers, children and environment."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

from components.common.runtime import process_control
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import Customization
from pipelines.runs import run_folder
from pipelines.runs.local_runner import EventListener
from pipelines.runs.results import RunResult

POLL_INTERVAL_SECONDS = 0.2
MAX_ERROR_CHARACTERS = 2000


def run_customization(customization: Customization, work: Workdir, reporter: Reporter) -> RunResult:
    """Run `tuneline run` in a child process, and report its progress.

    A KeyboardInterrupt stops the run, which saves its work first; a second one ends the run without saving. Launcher and
    MLflow server are those of the environment.

    Raises:
        TunelineError: the run failed; kind, message, hint and stage are those of the command.
    """
    with tempfile.TemporaryDirectory(prefix="tuneline-run-") as scratch:
        path, output, errors = (Path(scratch) / name for name in ("customization.yaml", "output", "errors"))
        customization.write(path)
        arguments = ["run", "--json", "-c", str(path), "--workdir", str(work.root)]
        with output.open("wb") as stdout, errors.open("wb") as stderr:
            child = subprocess.Popen(
                process_control.build_module_command("pipelines.cli", *arguments),
                env=process_control.build_python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the run once
                preexec_fn=process_control.die_with_parent,
            )
        try:
            _follow(child, work, reporter)
        finally:
            _stop(child)
        return _read_result(child, output, errors)


def _follow(child: subprocess.Popen[bytes], work: Workdir, reporter: Reporter) -> None:
    """Report the events of the child's run until the child ends."""
    while child.poll() is None:
        for run in run_folder.list_runs(work):
            process = run.find_process()  # None for an earlier run whose process had the same ID
            if process and process.pid == child.pid:
                with EventListener(run, reporter).follow_in_thread():
                    child.wait()
                return
        time.sleep(POLL_INTERVAL_SECONDS)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Stop the child if it still runs, and wait for its end; each KeyboardInterrupt sends one more signal."""
    while child.poll() is None:
        child.terminate()
        try:
            child.wait()
        except KeyboardInterrupt:
            continue


def _read_result(child: subprocess.Popen[bytes], output: Path, errors: Path) -> RunResult:
    try:
        values = json.loads(output.read_text(encoding="utf-8"))
    except ValueError:
        text = errors.read_text(encoding="utf-8", errors="replace")[-MAX_ERROR_CHARACTERS:].strip()
        raise TunelineError(
            f"the process of the run ended with status {child.returncode}: {text or 'no output'}",
            hint="Run the same call again to resume. `tuneline logs latest` prints the logs.",
        ) from None
    if error := values.get("error"):
        raise TunelineError.from_dict(error, child.returncode)
    return RunResult.from_dict(values)
