"""What a pod does before it ends: the training in it is asked to save, and waited for; another job's is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from components.common import process
from components.common.hashing import ROOT
from components.common.launch.torchrun import TorchRun
from tests.common.test_launch import command, lives, pids, wait_until


def test_a_training_saves_before_its_pod_ends_and_another_folders_goes_on(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    jobs = [TorchRun().start(command("wait", folder), folder) for folder in (own, other)]
    try:
        ours, theirs = (pids(folder, 1) for folder in (own, other))
        hook = [sys.executable, "-P", "-m", "components.common.launch.save", "30", str(own)]
        subprocess.run(hook, check=True, timeout=60, env=process.python_environment(PYTHONPATH=str(ROOT)))
        assert (own / "saved.0").exists()
        assert not lives(ours[0])
        wait_until(lambda: jobs[0].look().state != "running", 5)
        assert lives(theirs[0])
        assert not (other / "saved.0").exists()
    finally:
        for job in jobs:
            job.cancel()
