"""A KeyboardInterrupt of the caller stops the run of the API after it has saved its work.

Long tier: a whole run starts, and its process is interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import preloaded_server
from tests.pipelines.command import environment
from tests.pipelines.processes import hear_interrupts
from tests.pipelines.project import write_project

SCRIPT = """
import tuneline
config = tuneline.Customization.load("customization.yaml", fine_tuning={"max_steps": 100000})
try:
    tuneline.run(config, "wd")
except KeyboardInterrupt:
    print("interrupted")
"""
TIMEOUT_SECONDS = 300


@pytest.mark.long
@pytest.mark.pipeline
def test_interrupted_run_has_saved_its_work(tmp_path: Path) -> None:
    write_project(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT],
        cwd=tmp_path,
        env=environment(**preloaded_server.get_variables("PRELOADED_STEPS")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any('"validation_loss"' in path.read_text() for path in tmp_path.glob("wd/runs/*/events.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, output) == (0, "interrupted\n")
    assert "fine-tune: training" in errors  # the progress of the child
    (run,) = tmp_path.glob("wd/runs/*/run.json")
    assert json.loads(run.read_text())["status"] == "interrupted"
    assert list(tmp_path.glob("wd/state/fine_tuning/*/**/checkpoint-*"))
