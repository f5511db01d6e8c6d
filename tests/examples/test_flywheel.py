"""`examples/flywheel`: its page, its simulated days, its steps, and what it refuses.

Fast tier: the steps are replaced by results. The whole example, killed and resumed, is in the stress tier: it trains
two versions of the demo model.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import BusyError, OutputOccupiedError
from components.common.workspace import job_folders
from examples.flywheel import __main__ as flywheel
from examples.flywheel import page, steps
from examples.flywheel.questions import Question
from pipelines.gateway.addresses import PortInUseError
from tests.pipelines.command import ROOT, environment

FIRST_DAY = "2026-11-02"


def build_check(first: int, e_values: list[float], alarm_window: int | None) -> dict[str, Any]:
    windows = [{"from": f"2026-11-{first + n + 1:02}T09:00:00+00:00", "e_value": e} for n, e in enumerate(e_values)]
    reference = {"name": "days ..2026-11-07", "prompts": 300}
    return {
        "alarm": bool(alarm_window),
        "alarm_window": alarm_window,
        "threshold": 20.0,
        "reference": reference,
        "windows": windows,
    }


def build_steps() -> dict[str, Any]:
    comparison = {
        "decision": "better",
        "decided_after": 31,
        "pairs": 87,
        "mean_difference": 0.25,
        "low": 0.1,
        "high": 0.4,
        "e_better": 5e4,
    }
    answer = {"prompt": "What is <x>?", "reference": "right", "incumbent_answer": "wrong", "candidate_answer": None}
    results: dict[str, Any] = {
        "prepare": {"rows": 280, "first_day": FIRST_DAY},
        "train": {},
        "serve_first_version": {"version": "1", "answers": 650, "captured": 650, "corrections": 225},
        "find_drift": build_check(7, [1.0, 0.9, 3.0, 48.5], 4),
        "retrain": {
            "reasons": ["drift alarm in window 4"],
            "comparison": comparison,
            "export": {"conversations": 130, "held_back": 95},
        },
        "serve_shadow": {"version": "1", "answers": 50, "captured": 100},
        "promote": {
            "decision": "promoted",
            "reason": "version 2 is the champion",
            "shadow": {"comparison": {**comparison, "decided_after": 14, "pairs": 50}},
            "answers": [answer],
        },
        "serve_next_version": {"version": "2", "answers": 200, "captured": 200},
        "check_again": build_check(14, [0.9, 1.2], None),
    }
    assert list(results) == [step.__name__ for step in steps.STEPS]
    return {name: {"begun": "", "seconds": 10.0, "result": result} for name, result in results.items()}


def test_page_tells_the_story_of_the_results() -> None:
    text = page.render(build_steps())
    for expected in (
        "The drift check raised an alarm on day 10.",
        "225 corrected answers yielded 130 training rows for version 2",
        "After that, the drift check raised no alarm",
        "e-value 48.5; the threshold is 20",
        "better on held-back questions: decided after 31 of 87 pairs",
        "better, decided after 14 of 50 pairs",
        "On 50 live questions that it answered as a shadow, version 2 was better.",
        "version 2 is the champion",
        "What is &lt;x&gt;?",
    ):
        assert expected in text
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_summary_has_the_alarm_and_the_durations() -> None:
    summary = page.summarize(build_steps())
    assert summary["find_drift"]["alarm_day"] == 10
    assert summary["find_drift"]["e_values"] == {7: 1.0, 8: 0.9, 9: 3.0, 10: 48.5}
    assert (summary["check_again"]["alarm"], summary["questions"]) == (False, 900)
    assert sum(summary["seconds"].values()) == 90


def test_questions_drift_on_day_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Path, packages: tuple[str, ...]) -> list[Question]:
        return [Question(packages[0], str(number), "q", "d") for number in range(1000)]

    monkeypatch.setattr(steps, "read_questions", read)
    visits = steps.plan_visits(steps.Flywheel(tmp_path, 0, {"prepare": {"first_day": FIRST_DAY}}), 1, steps.LAST_DAY)
    new_by_day = dict.fromkeys(range(1, steps.LAST_DAY + 1), 0)
    for visit in visits:
        new_by_day[visit.time.day - 1] += visit.question.module in steps.NETWORK_AND_CONCURRENCY
    assert [*new_by_day.values()] == [0] * 4 + [25] + [50] * 5
    assert len({(visit.question.module, visit.question.name) for visit in visits}) == len(visits)
    late = [visit.user for visit in visits if visit.question.module in steps.NETWORK_AND_CONCURRENCY][:175]
    assert len(set(late)) == 175  # each corrected answer is of another user: one pair each


def test_captured_rows_move_to_their_days(tmp_path: Path) -> None:
    folder = tmp_path / "captured" / "tuneline" / "2026-11-27" / "07"
    folder.mkdir(parents=True)
    rows = [{"timestamp": 1, "tuneline": {}, "response": {"id": name}} for name in ("a", "b")]
    rows.append({"timestamp": 1, "tuneline": {"shadow_of": "b"}, "response": {"id": "c"}})
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = {"a": datetime(2026, 11, 2, 9, 10, tzinfo=UTC), "b": datetime(2026, 11, 3, 9, tzinfo=UTC)}
    for _ in range(2):  # a repeated step writes the same files
        assert steps.move_to_days(tmp_path, times) == 3
    files = {path.parts[-3]: path.read_text() for path in tmp_path.glob("traffic/tuneline/*/09/*.jsonl")}
    moved = {day: [json.loads(line) for line in text.splitlines()] for day, text in files.items()}
    ids = {day: [row["response"]["id"] for row in rows] for day, rows in moved.items()}
    assert ids == {"2026-11-02": ["a"], "2026-11-03": ["b", "c"]}
    assert moved["2026-11-02"][0]["timestamp"] == times["a"].timestamp()


def test_finished_steps_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def prepare(_: object) -> dict[str, Any]:
        calls.append("prepare")
        if len(calls) == 1:
            raise KeyboardInterrupt
        return {}

    def train(example: steps.Flywheel) -> dict[str, Any]:
        calls.append("train")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"earlier": example.results["prepare"]}

    monkeypatch.setattr(flywheel, "STEPS", (prepare, train))
    monkeypatch.setattr(page, "summarize", dict)
    monkeypatch.setattr(page, "render", lambda _: "page")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            flywheel.run(tmp_path / "f", 0)
    assert flywheel.run(tmp_path / "f", 0)["train"]["result"] == {"earlier": {}}
    assert calls == ["prepare", "prepare", "train", "train"]
    assert (tmp_path / "f" / "flywheel.html").read_text() == "page"


def test_taken_folder_and_port_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(OutputOccupiedError, match="does not contain this example"):
        flywheel.run(tmp_path, 0)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "flywheel.json").write_text('{"steps": {}}')
    with job_folders.folder_lock(tmp_path / "g"), pytest.raises(BusyError):
        flywheel.run(tmp_path / "g", 0)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PortInUseError, match="already in use"):
        flywheel.run(tmp_path / "f", server.getsockname()[1])


@pytest.mark.stress
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_killed_example_resumes_and_tells_its_story(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.flywheel", "--folder", str(tmp_path / "f"), "--json"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        command += ["--port", str(server.getsockname()[1])]
    first = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    while not (tmp_path / "f" / "captured").exists():  # the first version is served
        assert first.poll() is None
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    ended = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    summary = json.loads(ended.stdout)
    assert ended.returncode == 0, summary
    assert (summary["decision"], summary["comparison"]["decision"]) == ("promoted", "better")
    assert summary["shadow_comparison"]["decision"] == "better"
    assert (summary["captured"], summary["find_drift"]["alarm"]) == (550, True)
    assert summary["find_drift"]["alarm_day"] > steps.LAST_CLEAN_DAY
    assert not summary["check_again"]["alarm"]
    assert "version 2 is the champion" in Path(summary["page"]).read_text()
