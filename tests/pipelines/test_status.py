"""What `status` and `logs` say of runs in every state, from run folders as runs leave them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.common.errors import TunelineError
from components.common.places import Workdir
from pipelines import runs, status
from pipelines.runs import Run
from tests.pipelines.command import COMMAND, answer, environment, refusal, tuneline
from tests.pipelines.processes import hear_interrupts

RESULT = {
    "verdict": "accepted",
    "mlflow": {"model_name": "helper", "model_version": "3"},
    "stages": [{"name": "resolve", "seconds": 2.0, "cached": False}, {"name": "data_curation", "seconds": 0.0, "cached": True}],
    "seconds": 41.5,
    "report": None,
}
ERROR = {"stage": "evaluation", "kind": "input", "message": "the test split is empty", "hint": "Raise data_curation.fractions."}


def make(tmp_path: Path, name: str, events: list[dict[str, Any]] = [], **known: Any) -> Run:  # noqa: B006
    """A run's folder: by default of a run that was killed."""
    run = Run(tmp_path / "wd" / "runs" / name)
    run.folder.mkdir(parents=True)
    run.write(**{"status": "running", "pid": 1, "process_started": 1.0, "started": 1000.0, **known})
    run.events.write_text("".join(json.dumps({"time": 1000.0 + i, **event}) + "\n" for i, event in enumerate(events)))
    return run


def mine() -> dict[str, Any]:
    """What run.json holds while this very process is the run's."""
    return {"pid": os.getpid(), "process_started": psutil.Process().create_time(), "started": time.time() - 60}


def event(stage: str, kind: str, **values: Any) -> dict[str, Any]:
    return {"stage": stage, "event": kind, **values}


def step_of(stage: str) -> list[dict[str, Any]]:
    return [event(stage, "started", pid=1), event(stage, "finished", seconds=2.5, cached=False)]


TRAINING = [
    *step_of("resolve"),
    event("fine_tuning", "started", pid=1),
    event("fine_tuning", "step", name="training"),
    *[event("fine_tuning", "progress", done=done, total=40, unit="steps", time=1003.0 + (done - 2) * 8) for done in range(2, 13)],
]


def test_an_empty_workdir_is_said_and_nothing_is_created(tmp_path: Path) -> None:
    done = tuneline("status", "--workdir", "wd", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "there is no run in wd yet; `tuneline run` makes one\n")
    assert answer("status", "--workdir", "wd", cwd=tmp_path)["runs"] == []
    error = refusal(2, "status", "latest", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == f"there is no run in {tmp_path / 'wd'}"
    assert error["hint"] == "`tuneline run` makes one; or name another with --workdir."
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed_newest_first_with_what_came_of_them(tmp_path: Path) -> None:
    make(tmp_path, "20260101-100000-aaaa", status="finished", ended=1041.5, result=RESULT)
    make(tmp_path, "20260102-100000-bbbb", step_of("evaluation"), status="failed", ended=1010.0, error=ERROR)
    make(tmp_path, "20260103-100000-cccc", TRAINING, status="interrupted", ended=1100.0)
    make(tmp_path, "20260104-100000-dddd", TRAINING)
    out = tuneline("status", "--workdir", "wd", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[:2] for line in out] == [
        ["20260104-100000-dddd", "killed"],
        ["20260103-100000-cccc", "interrupted"],
        ["20260102-100000-bbbb", "failed"],
        ["20260101-100000-aaaa", "finished"],
    ]
    assert out[0].endswith("fine-tune: training, 12 of 40 steps, 0.125/s, 224 s left")
    assert out[3].endswith("42 s  accepted, helper version 3")
    listed = answer("status", "--limit", "1", "--workdir", "wd", cwd=tmp_path)["runs"]
    assert [(row["run"], row["state"], row["stage"]) for row in listed] == [("20260104-100000-dddd", "killed", "fine_tuning")]
    assert "and 2 older; --limit shows more" in tuneline("status", "--limit", "2", "--workdir", "wd", cwd=tmp_path).stdout


def test_a_run_is_running_only_while_its_own_process_lives(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = psutil.Process(child.pid).create_time()
    run = make(tmp_path, "a", TRAINING, pid=child.pid, process_started=born)
    assert run.state == "running"
    assert make(tmp_path, "b", TRAINING, pid=child.pid, process_started=born - 100).state == "killed", "the pid was given to another"
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert run.state == "killed", "a zombie runs nothing"
    child.communicate()
    assert run.state == "killed"
    (tmp_path / "wd" / "runs" / "c").mkdir()
    assert Run(tmp_path / "wd" / "runs" / "c").state == "killed", "killed before it wrote a word"
    assert answer("status", "c", "--workdir", "wd", cwd=tmp_path)["seconds"] is None


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], "starting"),
        (step_of("resolve"), "resolve is done"),
        ([event("triton_packaging", "started")], "package"),
        (TRAINING, "fine-tune: training, 12 of 40 steps, 0.125/s, 224 s left"),
        ([*TRAINING, event("fine_tuning", "step", name="writing the model")], "fine-tune: writing the model"),
        ([event("evaluation", "progress", done=4, total=None, unit="rows")], "evaluate"),
        ([event("triton_packaging", "step", name="loading"), event("triton_packaging", "progress", done=4, total=None, unit="seconds")],
         "package: loading, 4 s so far"),
    ],
)  # fmt: skip
def test_the_place_of_a_running_run_is_told(tmp_path: Path, events: list[dict[str, Any]], text: str) -> None:
    assert status.overview(make(tmp_path, "a", events, **mine()))["progress"] == text


def test_a_running_run_tells_its_stages_and_those_that_the_cache_answered(tmp_path: Path) -> None:
    run = make(tmp_path, "a", TRAINING, **mine())
    found = answer("status", "a", "--workdir", "wd", cwd=tmp_path)
    assert [(stage["name"], stage["state"]) for stage in found["stages"]] == [
        ("resolve", "finished"), ("data_curation", "cached"), ("data_versioning", "cached"), ("fine_tuning", "running"),
    ]  # fmt: skip
    assert found["stages"][0]["seconds"] == 2.5
    assert 59 < found["seconds"] < 600
    assert (found["error"], found["report"], found["logs"]) == (None, None, str(run.folder / "logs"))


def test_a_failed_run_tells_its_error_with_the_hint(tmp_path: Path) -> None:
    failed = event("evaluation", "failed", error=ERROR, exit_code=1, seconds=3.0)
    make(tmp_path, "a", [event("evaluation", "started"), failed], status="failed", ended=1005.0, error=ERROR)
    found = answer("status", "a", "--workdir", "wd", cwd=tmp_path)
    assert found["error"] == ERROR
    assert found["stages"][-1] == {"name": "evaluation", "state": "failed", "seconds": 3.0, "cached": False}
    said = tuneline("status", "latest", "--workdir", "wd", cwd=tmp_path).stdout
    assert "evaluation: the test split is empty\n  Raise data_curation.fractions.\n" in said
    assert "tuneline logs a" in said


def test_a_killed_run_says_that_the_same_command_goes_on(tmp_path: Path) -> None:
    run = make(tmp_path, "a", TRAINING)
    with run.events.open("a") as file:
        file.write('{"time": 12, "stage": "fine_tu')  # torn by the kill
    assert status.stages_of(run, run.state)[-1]["state"] == "stopped"
    assert "the same `tuneline run` goes on from where it stopped" in tuneline("status", "a", "--workdir", "wd", cwd=tmp_path).stdout


def test_a_run_is_named_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    for name in ("20260101-100000-aaaa", "20260101-110000-bbbb"):
        make(tmp_path, name)
    assert answer("status", "20260101-10", "--workdir", "wd", cwd=tmp_path)["run"] == "20260101-100000-aaaa"
    assert answer("status", "latest", "--workdir", "wd", cwd=tmp_path)["run"] == "20260101-110000-bbbb"
    error = refusal(2, "status", "20260101", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "20260101 is the beginning of 2 runs: 20260101-110000-bbbb, 20260101-100000-aaaa"
    assert error["hint"] == "Give more of the name, or `latest`."
    error = refusal(2, "logs", "mine", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == f"there is no run mine in {tmp_path / 'wd'}; there are: 20260101-110000-bbbb, 20260101-100000-aaaa"
    assert error["hint"] == "Give one of these names, or `latest`."


def with_logs(tmp_path: Path, **known: Any) -> Run:
    run = make(tmp_path, "a", TRAINING, **known)
    (run.folder / "logs").mkdir()
    run.stage_log("resolve").write_text("looking\n")
    run.stage_log("fine_tuning").write_text("one\ntwo\nthree\n")
    run.log.write_text("kfp speaks\n")
    return run


def test_logs_come_in_the_order_of_the_stages_and_say_where_there_is_none(tmp_path: Path) -> None:
    run = with_logs(tmp_path)
    assert tuneline("logs", "a", "--workdir", "wd", cwd=tmp_path).stdout.splitlines() == [
        f"== resolve ({run.stage_log('resolve')})",
        "looking",
        "== data_curation: no log in this run: its result came from the cache",
        "== data_versioning: no log in this run: its result came from the cache",
        f"== fine_tuning ({run.stage_log('fine_tuning')})",
        "one",
        "two",
        "three",
    ]
    found = answer("logs", "a", "--lines", "2", "--workdir", "wd", cwd=tmp_path)
    assert found["run"] == "a"
    assert found["logs"][1] == {"stage": "data_curation", "path": None, "lines": []}
    assert found["logs"][3] == {"stage": "fine_tuning", "path": str(run.stage_log("fine_tuning")), "lines": ["two", "three"]}


@pytest.mark.parametrize("name", ["fine_tuning", "fine-tuning", "fine-tune"])
def test_one_stage_s_log_is_found_by_every_name_people_see(tmp_path: Path, name: str) -> None:
    with_logs(tmp_path)
    assert [log["lines"] for log in answer("logs", "a", name, "--workdir", "wd", cwd=tmp_path)["logs"]] == [["one", "two", "three"]]


def test_an_unknown_stage_is_refused_with_those_of_the_run(tmp_path: Path) -> None:
    with_logs(tmp_path)
    for name in ("tuning", "promote"):
        error = refusal(2, "logs", "a", name, "--workdir", "wd", cwd=tmp_path)
        assert error["message"] == f"a has no stage {name}; it has: resolve, data_curation, data_versioning, fine_tuning, run"
        assert error["hint"] == "Name one of these, or none for all of them."
    error = refusal(2, "logs", "a", "--follow", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "--follow does not go with --json, which prints one object"
    assert error["hint"] == "Leave one of them out."


def test_the_run_s_own_log_is_there_too_and_stands_in_where_no_stage_wrote_one(tmp_path: Path) -> None:
    with_logs(tmp_path)
    assert answer("logs", "a", "run", "--workdir", "wd", cwd=tmp_path)["logs"][0]["lines"] == ["kfp speaks"]
    bare = make(tmp_path, "b", status="failed")
    assert [(log.stage, log.why) for log in status.logs(bare)] == [("run", "no log: it ended before its first step")]
    bare.log.write_text("kfp failed\n")
    assert status.logs(bare)[0].lines() == ["kfp failed"]


def test_logs_are_followed_until_the_run_ends(tmp_path: Path) -> None:
    run = with_logs(tmp_path, **mine())

    def add(text: str) -> None:
        with run.stage_log("fine_tuning").open("a") as file:
            file.write(text)

    def end() -> None:
        add(" and a half\n")
        run.write(status="finished", result=RESULT)

    told = []
    for log, text in status.follow(run, last=1):
        told.append((log.stage, text))
        if text == "three\n":
            add("four\nfive")
        elif text == "four\n":
            threading.Timer(0.7, end).start()  # while half a line stands there
    assert told == [("resolve", "looking\n"), ("fine_tuning", "three\n"), ("fine_tuning", "four\n"), ("fine_tuning", "five and a half\n")]


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    run = make(tmp_path, "a", TRAINING, **mine())
    watching = status.watch(run)
    assert next(watching)["state"] == "running"
    run.write(status="finished", result=RESULT, ended=time.time())
    assert [now["state"] for now in watching] == ["finished"]
    assert answer("status", "--watch", "--workdir", "wd", cwd=tmp_path)["state"] == "finished"
    said = tuneline("status", "a", "-w", "--workdir", "wd", cwd=tmp_path)
    assert said.stderr.splitlines()[-1].endswith("accepted, helper version 3")
    assert "  resolve            finished      2.0 s\n  data_curation      cached\n" in said.stdout


def test_a_run_that_is_not_running_cannot_be_cancelled(tmp_path: Path) -> None:
    make(tmp_path, "a", status="finished", result=RESULT)
    error = refusal(2, "cancel", "a", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "a is not running: it is finished"
    assert error["hint"] == "`tuneline status` lists the runs and their states."
    make(tmp_path, "b", TRAINING)
    assert refusal(2, "cancel", "b", "--workdir", "wd", cwd=tmp_path)["message"] == "b is not running: it is killed"


def test_the_listing_of_a_workdir_reads_what_is_no_run_as_none(tmp_path: Path) -> None:
    (tmp_path / "wd" / "runs").mkdir(parents=True)
    (tmp_path / "wd" / "runs" / "notes.txt").write_text("mine")
    assert runs.every(Workdir(tmp_path / "wd")) == []


def test_a_run_of_another_user_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    run = make(tmp_path, "a", TRAINING, **mine())
    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    with pytest.raises(TunelineError, match=f"process {os.getpid()} belongs to ") as error:
        runs.cancel(run, on_wait=lambda _: None)
    assert error.value.hint == f"Cancel the run as {psutil.Process().username()}, or ask them to."


@pytest.mark.parametrize("command", [["status", "-w"], ["logs", "a", "-f"]])
def test_ctrl_c_ends_the_looking_on_and_not_the_run(tmp_path: Path, command: list[str]) -> None:
    run = with_logs(tmp_path, **mine())
    looking = subprocess.Popen(
        [*COMMAND, *command, "--workdir", "wd"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    stream = looking.stderr if command[0] == "status" else looking.stdout
    assert stream is not None
    stream.readline()
    looking.send_signal(signal.SIGINT)
    complained = looking.communicate(timeout=120)[1]
    assert (looking.returncode, run.state) == (0, "running")
    assert complained.endswith("the run goes on\n")
    assert "Traceback" not in complained
