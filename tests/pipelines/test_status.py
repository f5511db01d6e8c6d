"""Output of `status` and `logs` for run folders in every state."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.common.runtime.errors import TunelineError
from components.common.workspace.artifact_store import Workdir
from pipelines.cli import run_history
from pipelines.runs import run_folder, run_status
from pipelines.runs.run_folder import Run
from tests.pipelines.command import COMMAND, answer_in_process, environment, refusal, run_in_process
from tests.pipelines.processes import hear_interrupts

RESULT = {
    "verdict": "accepted",
    "mlflow": {"model_name": "helper", "model_version": "3"},
    "stages": [
        {"name": "resolve", "seconds": 2.0, "cached": False},
        {"name": "data_curation", "seconds": 0.0, "cached": True},
    ],
    "seconds": 41.5,
    "report": None,
}
ERROR = {
    "stage": "evaluation",
    "kind": "input",
    "message": "the test split is empty",
    "hint": "Raise data_curation.fractions.",
}


def make_run(tmp_path: Path, name: str, events: list[dict[str, Any]] = [], **fields: Any) -> Run:  # noqa: B006
    """Create the folder of a run; without fields the run was killed."""
    run = Run(tmp_path / "wd" / "runs" / name)
    run.folder.mkdir(parents=True)
    run.update(**{"status": "running", "pid": 1, "process_started": 1.0, "started": 1000.0, **fields})
    run.events.write_text("".join(json.dumps({"time": 1000.0 + i, **event}) + "\n" for i, event in enumerate(events)))
    return run


def own_process() -> dict[str, Any]:
    """Return the fields of run.json for a run in this process."""
    return {"pid": os.getpid(), "process_started": psutil.Process().create_time(), "started": time.time() - 60}


def event(stage: str, kind: str, **values: Any) -> dict[str, Any]:
    return {"stage": stage, "event": kind, **values}


def step_events(stage: str) -> list[dict[str, Any]]:
    return [event(stage, "started", pid=1), event(stage, "finished", seconds=2.5, cached=False)]


TRAINING = [
    *step_events("resolve"),
    event("fine_tuning", "started", pid=1),
    event("fine_tuning", "step", name="training"),
    *[
        event("fine_tuning", "progress", done=done, total=40, unit="steps", time=1003.0 + (done - 2) * 8)
        for done in range(2, 13)
    ],
]


def test_empty_workdir_is_reported_and_nothing_is_created(tmp_path: Path) -> None:
    process = run_in_process("status", "--workdir", "wd", cwd=tmp_path)
    assert (process.returncode, process.stdout) == (
        0,
        "no runs in wd yet; start a run with `tuneline run` (single stages, such as `tuneline finetune`, are not listed)\n",
    )
    assert answer_in_process("status", "--workdir", "wd", cwd=tmp_path)["runs"] == []
    error = refusal(2, "status", "latest", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == f"run latest does not exist in {tmp_path / 'wd'}"
    assert error["hint"] == "Start a run with `tuneline run`, or choose another --workdir."
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed_newest_first_with_their_results(tmp_path: Path) -> None:
    make_run(tmp_path, "20260101-100000-aaaa", status="finished", ended=1041.5, result=RESULT)
    make_run(tmp_path, "20260102-100000-bbbb", step_events("evaluation"), status="failed", ended=1010.0, error=ERROR)
    make_run(tmp_path, "20260103-100000-cccc", TRAINING, status="interrupted", ended=1100.0)
    make_run(tmp_path, "20260104-100000-dddd", TRAINING)
    lines = run_in_process("status", "--workdir", "wd", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["20260104-100000-dddd", "killed"],
        ["20260103-100000-cccc", "interrupted"],
        ["20260102-100000-bbbb", "failed"],
        ["20260101-100000-aaaa", "finished"],
    ]
    assert lines[0].endswith("fine-tune: training, 12 of 40 steps, 0.125/s, 224 s left")
    assert lines[3].endswith("42 s  accepted, helper version 3")
    rows = answer_in_process("status", "--limit", "1", "--workdir", "wd", cwd=tmp_path)["runs"]
    assert [(row["run"], row["state"], row["stage"]) for row in rows] == [
        ("20260104-100000-dddd", "killed", "fine_tuning")
    ]
    assert (
        "and 2 older runs; --limit lists more"
        in run_in_process("status", "--limit", "2", "--workdir", "wd", cwd=tmp_path).stdout
    )


def test_run_is_running_only_while_its_process_lives(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process_started = psutil.Process(child.pid).create_time()
    run = make_run(tmp_path, "a", TRAINING, pid=child.pid, process_started=process_started)
    assert run.state == "running"
    assert make_run(tmp_path, "b", TRAINING, pid=child.pid, process_started=process_started - 100).state == "killed", (
        "another process has the pid"
    )
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert run.state == "killed", "a zombie is not a running process"
    child.communicate()
    assert run.state == "killed"
    (tmp_path / "wd" / "runs" / "c").mkdir()
    assert Run(tmp_path / "wd" / "runs" / "c").state == "killed", "a run without run.json is killed"
    assert answer_in_process("status", "c", "--workdir", "wd", cwd=tmp_path)["seconds"] is None


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], "starting"),
        (step_events("resolve"), "resolve is done"),
        ([event("triton_packaging", "started")], "package"),
        (TRAINING, "fine-tune: training, 12 of 40 steps, 0.125/s, 224 s left"),
        ([*TRAINING, event("fine_tuning", "step", name="writing the model")], "fine-tune: writing the model"),
        ([event("evaluation", "progress", done=4, total=None, unit="rows")], "evaluate"),
        ([event("triton_packaging", "step", name="loading"), event("triton_packaging", "progress", done=4, total=None, unit="seconds")],
         "package: loading, 4 s elapsed"),
    ],
)  # fmt: skip
def test_progress_of_a_running_run(tmp_path: Path, events: list[dict[str, Any]], text: str) -> None:
    assert run_status.summarize_run(make_run(tmp_path, "a", events, **own_process()))["progress"] == text


def test_running_run_lists_finished_and_cached_stages(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", TRAINING, **own_process())
    result = answer_in_process("status", "a", "--workdir", "wd", cwd=tmp_path)
    assert [(stage["name"], stage["state"]) for stage in result["stages"]] == [
        ("resolve", "finished"), ("data_curation", "cached"), ("data_versioning", "cached"), ("fine_tuning", "running"),
    ]  # fmt: skip
    assert result["stages"][0]["seconds"] == 2.5
    assert 59 < result["seconds"] < 600
    assert (result["error"], result["report"], result["logs"]) == (None, None, str(run.folder / "logs"))


def test_failed_run_shows_error_and_hint(tmp_path: Path) -> None:
    failed = event("evaluation", "failed", error=ERROR, exit_code=1, seconds=3.0)
    make_run(tmp_path, "a", [event("evaluation", "started"), failed], status="failed", ended=1005.0, error=ERROR)
    result = answer_in_process("status", "a", "--workdir", "wd", cwd=tmp_path)
    assert result["error"] == ERROR
    assert result["stages"][-1] == {"name": "evaluation", "state": "failed", "seconds": 3.0, "cached": False}
    output = run_in_process("status", "latest", "--workdir", "wd", cwd=tmp_path).stdout
    assert "evaluation: the test split is empty\n  Raise data_curation.fractions.\n" in output
    assert "tuneline logs a" in output


def test_killed_run_shows_how_to_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", TRAINING)
    with run.events.open("a") as file:
        file.write('{"time": 12, "stage": "fine_tu')  # torn by the kill
    assert run_status.list_stages(run, run.state)[-1]["state"] == "stopped"
    assert (
        "to resume the run, run the same `tuneline run` command again"
        in run_in_process("status", "a", "--workdir", "wd", cwd=tmp_path).stdout
    )


def test_run_is_found_by_a_unique_prefix(tmp_path: Path) -> None:
    for name in ("20260101-100000-aaaa", "20260101-110000-bbbb"):
        make_run(tmp_path, name)
    assert answer_in_process("status", "20260101-10", "--workdir", "wd", cwd=tmp_path)["run"] == "20260101-100000-aaaa"
    assert answer_in_process("status", "latest", "--workdir", "wd", cwd=tmp_path)["run"] == "20260101-110000-bbbb"
    error = refusal(2, "status", "20260101", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "20260101 is the prefix of 2 runs: 20260101-110000-bbbb, 20260101-100000-aaaa"
    assert error["hint"] == "Use a longer prefix, or `latest`."
    error = refusal(2, "logs", "mine", "--workdir", "wd", cwd=tmp_path)
    assert (
        error["message"]
        == f"run mine does not exist in {tmp_path / 'wd'}; existing runs: 20260101-110000-bbbb, 20260101-100000-aaaa"
    )
    assert error["hint"] == "Use one of these names, or `latest`."


def make_run_with_logs(tmp_path: Path, **fields: Any) -> Run:
    run = make_run(tmp_path, "a", TRAINING, **fields)
    (run.folder / "logs").mkdir()
    run.stage_log("resolve").write_text("looking\n")
    run.stage_log("fine_tuning").write_text("one\ntwo\nthree\n")
    run.log.write_text("kfp speaks\n")
    return run


def test_logs_are_in_stage_order_with_reasons_for_missing_ones(tmp_path: Path) -> None:
    run = make_run_with_logs(tmp_path)
    assert run_in_process("logs", "a", "--workdir", "wd", cwd=tmp_path).stdout.splitlines() == [
        f"== resolve ({run.stage_log('resolve')})",
        "looking",
        "== data_curation: no log in this run: the stage was cached",
        "== data_versioning: no log in this run: the stage was cached",
        f"== fine_tuning ({run.stage_log('fine_tuning')})",
        "one",
        "two",
        "three",
    ]
    result = answer_in_process("logs", "a", "--lines", "2", "--workdir", "wd", cwd=tmp_path)
    assert result["run"] == "a"
    assert result["logs"][1] == {"stage": "data_curation", "path": None, "lines": []}
    assert result["logs"][3] == {
        "stage": "fine_tuning",
        "path": str(run.stage_log("fine_tuning")),
        "lines": ["two", "three"],
    }


@pytest.mark.parametrize("name", ["fine_tuning", "fine-tuning", "fine-tune"])
def test_stage_log_is_found_by_every_spelling(tmp_path: Path, name: str) -> None:
    make_run_with_logs(tmp_path)
    assert [log["lines"] for log in answer_in_process("logs", "a", name, "--workdir", "wd", cwd=tmp_path)["logs"]] == [
        ["one", "two", "three"]
    ]


def test_unknown_stage_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    make_run_with_logs(tmp_path)
    for name in ("tuning", "promote"):
        error = refusal(2, "logs", "a", name, "--workdir", "wd", cwd=tmp_path)
        assert (
            error["message"]
            == f"a has no stage {name}; existing stages: resolve, data_curation, data_versioning, fine_tuning, run"
        )
        assert error["hint"] == "Choose one of these stages, or omit the stage to show all logs."
    error = refusal(2, "logs", "a", "--follow", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "--follow cannot be combined with --json, which prints one object"
    assert error["hint"] == "Omit --follow or --json."


def test_run_log_is_listed_if_no_stage_has_a_log(tmp_path: Path) -> None:
    make_run_with_logs(tmp_path)
    assert answer_in_process("logs", "a", "run", "--workdir", "wd", cwd=tmp_path)["logs"][0]["lines"] == ["kfp speaks"]
    failed_run = make_run(tmp_path, "b", status="failed")
    assert [(log.stage, log.reason) for log in run_status.list_logs(failed_run)] == [
        ("run", "no log: the run ended before its first step")
    ]
    failed_run.log.write_text("kfp failed\n")
    assert run_status.list_logs(failed_run)[0].read_lines() == ["kfp failed"]


def test_logs_are_followed_until_the_run_ends(tmp_path: Path) -> None:
    run = make_run_with_logs(tmp_path, **own_process())

    def add(text: str) -> None:
        with run.stage_log("fine_tuning").open("a") as file:
            file.write(text)

    def end() -> None:
        add(" and a half\n")
        run.update(status="finished", result=RESULT)

    lines = []
    for log, text in run_status.follow_logs(run, last=1):
        lines.append((log.stage, text))
        if text == "three\n":
            add("four\nfive")
        elif text == "four\n":
            threading.Timer(0.7, end).start()  # while the last line is incomplete
    assert lines == [
        ("resolve", "looking\n"),
        ("fine_tuning", "three\n"),
        ("fine_tuning", "four\n"),
        ("fine_tuning", "five and a half\n"),
    ]


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", TRAINING, **own_process())
    statuses = run_status.watch_run(run)
    assert next(statuses)["state"] == "running"
    run.update(status="finished", result=RESULT, ended=time.time())
    assert [status["state"] for status in statuses] == ["finished"]
    assert answer_in_process("status", "--watch", "--workdir", "wd", cwd=tmp_path)["state"] == "finished"
    process = run_in_process("status", "a", "-w", "--workdir", "wd", cwd=tmp_path)
    assert process.stderr.splitlines()[-1].endswith("accepted, helper version 3")
    assert "  resolve            finished      2.0 s\n  data_curation      cached\n" in process.stdout


def test_ended_run_cannot_be_cancelled(tmp_path: Path) -> None:
    make_run(tmp_path, "a", status="finished", result=RESULT)
    error = refusal(2, "cancel", "a", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "a is not running; its state is finished"
    assert error["hint"] == "Run `tuneline status` to list the states of all runs."
    make_run(tmp_path, "b", TRAINING)
    assert (
        refusal(2, "cancel", "b", "--workdir", "wd", cwd=tmp_path)["message"] == "b is not running; its state is killed"
    )


def test_list_runs_of_a_missing_workdir_is_empty(tmp_path: Path) -> None:
    (tmp_path / "wd" / "runs").mkdir(parents=True)
    (tmp_path / "wd" / "runs" / "notes.txt").write_text("mine")
    assert run_folder.list_runs(Workdir(tmp_path / "wd")) == []


def test_run_of_another_user_cannot_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    run = make_run(tmp_path, "a", TRAINING, **own_process())
    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    with pytest.raises(TunelineError, match=f"cannot stop process {os.getpid()}, which belongs to ") as error:
        run_folder.cancel_run(run, on_wait=lambda _: None)
    assert error.value.hint == f"Cancel the run as {psutil.Process().username()}."


@pytest.mark.parametrize("command", [["status", "-w"], ["logs", "a", "-f"]])
def test_ctrl_c_ends_watching_but_not_the_run(tmp_path: Path, command: list[str]) -> None:
    run = make_run_with_logs(tmp_path, **own_process())
    watcher = subprocess.Popen(
        [*COMMAND, *command, "--workdir", "wd"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    stream = watcher.stderr if command[0] == "status" else watcher.stdout
    assert stream is not None
    stream.readline()
    watcher.send_signal(signal.SIGINT)
    error_output = watcher.communicate(timeout=120)[1]
    assert (watcher.returncode, run.state) == (0, "running")
    assert error_output.endswith("the run continues\n")
    assert "Traceback" not in error_output


def test_watching_on_a_terminal_shows_the_loss_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [{"train_loss": loss} for loss in (4.0, 3.0, math.nan, 2.0)]
    metrics = [event("fine_tuning", "metrics", values=values, step=n) for n, values in enumerate(losses)]
    run = make_run(tmp_path, "a", [*TRAINING, *metrics])
    monkeypatch.setenv("COLUMNS", "200")
    for is_terminal in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        run_history._watch(run, quiet=False)
        assert ("  loss █▅▁ 2" in screen.getvalue()) is is_terminal


def test_open_prints_report_and_mlflow_command(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    report = run.folder / "report.html"
    report.touch()
    uri = f"sqlite:///{tmp_path}/my project.db"
    run.update(status="finished", result={**RESULT, "report": str(report)}, tracking_uri=uri, mlflow_run_id="17")
    result = answer_in_process("open", "--workdir", "wd", cwd=tmp_path)
    assert (result["run"], result["report"], result["url"]) == ("a", str(report), report.as_uri())
    assert shlex.split(result["mlflow_ui"]) == ["mlflow", "ui", "--backend-store-uri", uri]
    output = run_in_process("open", "a", "--workdir", "wd", cwd=tmp_path).stdout.splitlines()
    assert output == [f"report: {report.as_uri()}", f"MLflow run 17: {result['mlflow_ui']}"]
    run.update(tracking_uri="https://mlflow.example.com")
    assert answer_in_process("open", "--workdir", "wd", cwd=tmp_path)["mlflow_ui"] is None
    output = run_in_process("open", "a", "--workdir", "wd", cwd=tmp_path).stdout.splitlines()
    assert output[1] == "MLflow run 17: https://mlflow.example.com"


def test_open_without_a_report_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "a", status="failed")
    error = refusal(2, "open", "a", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "a has no report: its state is failed"
    report = tmp_path / "report.html"
    report.touch()
    make_run(tmp_path, "b").update(status="finished", result={**RESULT, "report": str(report)})
    error = refusal(2, "open", "a", "--workdir", "wd", cwd=tmp_path)
    assert error["hint"].endswith("The newest run with a report is b.")
