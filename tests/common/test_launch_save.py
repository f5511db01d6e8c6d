"""The pre-stop hook of a pod makes the training in its folder save and waits for it.

The test is in the tier `long` because it starts two torchrun jobs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from components.common.artifacts.code_digest import ROOT
from components.common.launch.torchrun import TorchrunLauncher
from components.common.runtime import process_control
from tests.common.test_launch import build_command, is_alive, wait_for_pids, wait_until


@pytest.mark.long
def test_pre_stop_hook_saves_only_training_of_its_folder(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    jobs = [TorchrunLauncher().start(build_command("wait", folder), folder) for folder in (own, other)]
    try:
        own_pids, other_pids = (wait_for_pids(folder, 1) for folder in (own, other))
        hook_command = [sys.executable, "-P", "-m", "components.common.launch.ray.pre_stop_hook", "30", str(own)]
        subprocess.run(
            hook_command, check=True, timeout=60, env=process_control.build_python_environment(PYTHONPATH=str(ROOT))
        )
        assert (own / "saved.0").exists()
        assert not is_alive(own_pids[0])
        wait_until(lambda: jobs[0].poll().state != "running", 5)
        assert is_alive(other_pids[0])
        assert not (other / "saved.0").exists()
    finally:
        for job in jobs:
            job.cancel()
