"""Ctrl-C, SIGTERM, SIGKILL and `tuneline cancel` on a whole run: no process is left, and the run can be resumed.

Long tier: a run is interrupted and finished; a server forks its steps. Stress tier: runs in processes as users start them are killed, and
interrupted while Triton starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.reporting import mlflow_tracking
from components.common.workspace.artifact_store import Workdir
from pipelines.runs import run_folder
from tests import preloaded_server
from tests.pipelines.command import answer
from tests.pipelines.processes import (
    events,
    left_of,
    signal_group,
    signal_until_stopping,
    start,
    wait_for,
    wait_until_alone,
)
from tests.pipelines.project import run

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.daft,
    pytest.mark.dvc,
    pytest.mark.mlflow,
    pytest.mark.triton,
]


def start_until(workdir: Path, condition: Callable[[dict[str, Any]], bool], **extra: str) -> subprocess.Popen[str]:
    """Start the run again and wait until one of its new events satisfies `condition`."""
    before = len(events(workdir))
    child = start(workdir.parent, workdir.name, **extra)
    wait_for(child, workdir, condition, before)
    return child


def is_training_metric(event: dict[str, Any]) -> bool:
    return event["stage"] == "fine_tuning" and event["event"] == "metrics"


def is_triton_startup(event: dict[str, Any]) -> bool:
    return (
        event["stage"] == "triton_packaging"
        and event["event"] == "progress"
        and event["unit"] == "seconds"
        and event["done"] >= 1
    )


def check_interruption(child: subprocess.Popen[str], workdir: Path, timeout: float) -> dict[str, str]:
    """Check that a run exits with 75, leaving no process and no lock; return its error object."""
    output = child.communicate(timeout=timeout)[0]
    assert left_of(workdir) == []
    assert child.returncode == 75, output + workdir.with_name(f"{workdir.name}.stderr").read_text()
    error: dict[str, str] = json.loads(output)["error"]
    assert error["kind"] == "interrupted"
    assert error["hint"].startswith("Run the same command again to resume")
    assert not (workdir / "lock.json").exists()
    newest = run_folder.find_run(Workdir(workdir), "latest")
    assert newest.state == "interrupted"
    assert newest.read()["error"] == error
    return error


def read_digests(result: dict[str, Any]) -> dict[str, str]:
    return {kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items()}


@pytest.mark.long
def test_interrupted_run_resumes_with_equal_digests(first_digests: dict[str, str], project: Path) -> None:
    workdir = project / "stopped"
    child = start_until(workdir, is_training_metric, **preloaded_server.get_variables("PRELOADED_STEPS"))
    signal_group(child, signal.SIGINT)
    error = check_interruption(child, workdir, timeout=120)
    assert error["stage"] == "fine_tuning"
    assert error["message"].startswith("training was interrupted after step ")
    check_finished_run(workdir, first_digests)


@pytest.mark.stress
def test_interrupted_and_killed_run_resumes_with_equal_digests(first_digests: dict[str, str], project: Path) -> None:
    workdir = project / "killed"
    child = start_until(workdir, is_training_metric)
    signal_group(child, signal.SIGINT)
    assert check_interruption(child, workdir, timeout=120)["stage"] == "fine_tuning"

    child = start_until(workdir, is_training_metric)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    wait_until_alone(workdir)
    check_finished_run(workdir, first_digests)


@pytest.mark.stress
def test_run_cancelled_and_interrupted_while_triton_starts_is_finished(
    first_digests: dict[str, str], project: Path
) -> None:
    workdir = project / "cancelled"
    child = start_until(workdir, is_triton_startup)
    cancelled = answer("cancel", "latest", "--workdir", workdir, cwd=project)
    assert (cancelled["state"], cancelled["stage"]) == ("interrupted", "triton_packaging")
    assert check_interruption(child, workdir, timeout=120)["stage"] == "triton_packaging"

    child = start_until(workdir, is_triton_startup)
    signal_until_stopping(run_folder.find_run(Workdir(workdir), "latest"), lambda: child.send_signal(signal.SIGINT))
    signal_group(child, signal.SIGINT)
    error = check_interruption(child, workdir, timeout=120)
    # Triton may exit before the second Ctrl-C; test_runs.py has a step that never ends by itself.
    assert error["message"] in ("the run was killed before it saved its last steps", "interrupted")
    check_finished_run(workdir, first_digests)


def check_finished_run(workdir: Path, first_digests: dict[str, str]) -> None:
    result = run(workdir.parent, workdir.name)
    assert read_digests(result) == first_digests
    assert [mlflow_run.data.tags.get("tuneline.stage") for mlflow_run in find_open_mlflow_runs(workdir)] == []
    assert not list((workdir / "store" / "unfinished").iterdir())
    check_logs(workdir)


def find_open_mlflow_runs(workdir: Path) -> list[Any]:
    client = mlflow_tracking.connect(f"sqlite:///{workdir / 'mlflow.db'}").MlflowClient()
    experiment_ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiment_ids, "attributes.status = 'RUNNING'"))


def check_logs(workdir: Path) -> None:
    """A stage log has the lines of the stage and its engines; a cached stage has no log."""
    logs = {log["stage"]: log for log in answer("logs", "latest", "--workdir", workdir, cwd=workdir.parent)["logs"]}
    triton = "\n".join(logs["triton_packaging"]["lines"])
    assert "loading the package in Triton" in triton
    assert "server.cc" in triton
    assert (logs["data_curation"]["path"], logs["data_curation"]["lines"]) == (None, [])
    run_lines = answer("logs", "latest", "run", "--workdir", workdir, cwd=workdir.parent)["logs"][0]["lines"]
    assert any("Executing task" in line for line in run_lines)
