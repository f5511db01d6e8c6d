"""Output of a step and its children goes to the run's logs; errors and signals end the step in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from components.common.runtime import process_control
from tests.pipelines.processes import hear_interrupts

ROOT = Path(__file__).parents[2]
STEP = """
import os, subprocess, sys
from components.common import pipeline_step
from components.common.runtime import process_control

print("before the step")
with pipeline_step.step_context("fine_tuning") as s:
    s.reporter.step("training")
    print("from Python")
    os.write(2, b"from a library\\n")
    subprocess.run(["sh", "-c", "echo from a child; echo its complaint >&2"])
    {body}
print("after the step")
"""


def run_step(tmp_path: Path, body: str, **extra: str) -> subprocess.Popen[str]:
    environment = process_control.build_python_environment(PYTHONPATH=str(ROOT), **extra)
    command = [sys.executable, "-c", STEP.format(body=body)]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True, "preexec_fn": hear_interrupts}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def events(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_step_output_goes_to_its_log(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("from an engine\n")
    body = "process_control.append_to_step_log(__import__('pathlib').Path('engine.log'))"
    child = run_step(tmp_path, body, TUNELINE_EVENTS=str(tmp_path / "events.jsonl"))
    output = child.communicate(timeout=60)[0]
    log = tmp_path / "logs" / "fine_tuning.log"
    assert output.splitlines() == ["before the step", f"fine_tuning writes to {log}", "after the step"]
    assert log.read_text().splitlines() == [
        "training", "from Python", "from a library", "from a child", "its complaint", "from an engine",
    ]  # fmt: skip
    assert child.returncode == 0


def test_on_cluster_output_stays_in_pod_log(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("from an engine\n")
    child = run_step(tmp_path, "process_control.append_to_step_log(__import__('pathlib').Path('engine.log'))")
    output = child.communicate(timeout=60)[0]
    assert output.splitlines() == [
        "before the step", "training", "from Python", "from a library", "from a child", "its complaint", "after the step",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [tmp_path / "engine.log"]


def test_unexpected_error_names_log_with_traceback(tmp_path: Path) -> None:
    child = run_step(tmp_path, "raise ValueError('no such luck')", TUNELINE_EVENTS=str(tmp_path / "events.jsonl"))
    child.communicate(timeout=60)
    log = tmp_path / "logs" / "fine_tuning.log"
    error_event = events(tmp_path)[-1]
    assert error_event["error"]["message"] == "ValueError: no such luck"
    assert error_event["error"]["hint"] == f"Report this bug in tuneline: the traceback is in {log}."
    assert "ValueError: no such luck" in log.read_text()
    assert (error_event["error"]["stage"], child.returncode) == ("fine_tuning", 1)


def test_second_signal_does_not_interrupt_cleanup(tmp_path: Path) -> None:
    body = """
    import time
    from pathlib import Path
    try:
        s.reporter.note("waiting")
        time.sleep(60)
    finally:
        s.reporter.note("clearing up")
        time.sleep(1)
        Path("cleared").touch()
"""
    child = run_step(tmp_path, body, TUNELINE_EVENTS=str(tmp_path / "events.jsonl"))
    for text, sent in (("waiting", signal.SIGINT), ("clearing up", signal.SIGTERM), ("clearing up", signal.SIGINT)):
        deadline = time.monotonic() + 60
        while not any(event.get("text") == text for event in events(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(sent)
        time.sleep(0.1)
    child.communicate(timeout=60)
    assert (tmp_path / "cleared").exists()
    assert (child.returncode, events(tmp_path)[-1]["error"]["kind"]) == (75, "interrupted")
    assert events(tmp_path)[-1]["error"]["hint"] == "Run the same command again to resume."
