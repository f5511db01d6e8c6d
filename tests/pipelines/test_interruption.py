"""Ctrl-C, SIGTERM, SIGKILL and `tuneline cancel` on a whole run: nothing is left running, and the same command ends as ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, tracking
from components.common.places import Workdir
from pipelines import runs
from tests.pipelines.command import answer
from tests.pipelines.processes import ask_until_stopping, events, left_of, signal_group, start, wait_for, wait_until_alone
from tests.pipelines.project import run

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton, pytest.mark.long]
WD = "stopped"


def start_until(project: Path, reached: Callable[[dict[str, Any]], bool]) -> subprocess.Popen[str]:
    """The command, once more, as far as an event of its own."""
    before = len(events(project / WD))
    child = start(project, WD)
    wait_for(child, project / WD, reached, before)
    return child


def trains(event: dict[str, Any]) -> bool:
    return event["stage"] == "fine_tuning" and event["event"] == "metrics"


def waits_for_triton(event: dict[str, Any]) -> bool:
    return event["stage"] == "triton_packaging" and event["event"] == "progress" and event["unit"] == "seconds" and event["done"] >= 1


def interrupted(child: subprocess.Popen[str], project: Path, within: float) -> dict[str, str]:
    """The error object of a run that ended with 75 within so many seconds, and left no process and no lock."""
    said = child.communicate(timeout=within)[0]
    assert left_of(project / WD) == []
    assert child.returncode == 75, said + (project / f"{WD}.stderr").read_text()
    error: dict[str, str] = json.loads(said)["error"]
    assert error["kind"] == "interrupted"
    assert error["hint"].startswith("Run the same command again: it goes on from ")
    assert not (project / WD / "lock.json").exists()
    last = runs.find(Workdir(project / WD), "latest")
    assert last.state == "interrupted"
    assert last.read()["error"] == error
    return error


def digests(result: dict[str, Any]) -> dict[str, str]:
    return {kind: artifacts.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items()}


def test_a_run_interrupted_in_every_way_ends_with_the_digests_of_one_that_was_not(first: dict[str, Any], project: Path) -> None:
    child = start_until(project, trains)
    signal_group(child, signal.SIGINT)
    error = interrupted(child, project, within=120)
    assert error["stage"] == "fine_tuning"
    assert error["message"].startswith("training was interrupted after step ")

    child = start_until(project, trains)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    wait_until_alone(project / WD)

    child = start_until(project, waits_for_triton)
    cancelled = answer("cancel", "latest", "--workdir", WD, cwd=project)
    assert (cancelled["state"], cancelled["stage"]) == ("interrupted", "triton_packaging")
    assert interrupted(child, project, within=120)["stage"] == "triton_packaging"

    child = start_until(project, waits_for_triton)
    ask_until_stopping(runs.find(Workdir(project / WD), "latest"), lambda: child.send_signal(signal.SIGINT))
    signal_group(child, signal.SIGINT)
    error = interrupted(child, project, within=120)
    # Triton, asked this early, may be gone before the second Ctrl-C comes; test_runs.py has a step that never ends by itself.
    assert error["message"] in ("the run was ended at once, before it had saved its last steps", "interrupted")

    result = run(project, WD)
    assert digests(result) == digests(first)
    assert [left.data.tags.get("tuneline.stage") for left in open_runs(project / WD)] == []
    assert not list((project / WD / "store" / "unfinished").iterdir())
    check_logs(project)


def open_runs(workdir: Path) -> list[Any]:
    client = tracking.connect(f"sqlite:///{workdir / 'mlflow.db'}").MlflowClient()
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(everywhere, "attributes.status = 'RUNNING'"))


def check_logs(project: Path) -> None:
    """A stage's log has its own words and those of the engines it started; one that the cache answered has none."""
    logs = {log["stage"]: log for log in answer("logs", "latest", "--workdir", WD, cwd=project)["logs"]}
    triton = "\n".join(logs["triton_packaging"]["lines"])
    assert "loading the package in Triton" in triton
    assert "server.cc" in triton
    assert (logs["fine_tuning"]["path"], logs["fine_tuning"]["lines"]) == (None, [])
    own = answer("logs", "latest", "run", "--workdir", WD, cwd=project)["logs"][0]["lines"]
    assert any("Executing task" in line for line in own)
