"""The probe of shared storage as a job of two tasks on a real Slurm of two nodes. Both are on this machine, and so is the folder: that the
two sides meet, talk and come to one result is what is tried here, and nothing of a network's file system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import slurm_cluster
from tests.pipelines.command import COMMAND, ROOT, environment

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_two_nodes_meet_in_a_folder_and_come_to_the_same_result(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    command = [
        *COMMAND,
        "storage",
        "probe",
        str(storage),
        "--pair",
        "nodes",
        "--quick",
        "--size",
        "8MiB",
        "--no-fio",
        "--wait",
        "60",
        "--json",
    ]
    with slurm_cluster.two_nodes() as cluster:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        srun = ["srun", "-N2", "-n2", f"--output={tmp_path}/%t.json", f"--error={tmp_path}/%t.err", *command]
        given = environment(ROOT, SLURM_CONF=str(cluster.configuration), PATH=path)
        done = subprocess.run(srun, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=120, check=False)
    told = [(tmp_path / f"{rank}.err").read_text() for rank in (0, 1) if (tmp_path / f"{rank}.err").exists()]
    assert done.returncode == 0, (done.stdout, done.stderr, told)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert [(host["rank"], host["host"]) for host in first["hosts"]] == [(0, "n1"), (1, "n2")]
    assert first["ok"]
    assert [one["name"] for one in first["findings"] if not one["ok"]] == []
    assert "one kernel" in first["findings"][0]["found"], "it does not take two nodes of one machine for two hosts"
    assert list(storage.iterdir()) == []
