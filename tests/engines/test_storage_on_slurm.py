"""The storage probe and the storage benchmark as jobs of two tasks on a real Slurm cluster of two nodes.

Both nodes and the folder are on this machine, so the test covers the coordination of the two tasks, not a network file system.
"""

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


def test_two_nodes_agree_on_the_probe_result(tmp_path: Path) -> None:
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
    with slurm_cluster.run_cluster() as cluster:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        srun = ["srun", "-N2", "-n2", f"--output={tmp_path}/%t.json", f"--error={tmp_path}/%t.err", *command]
        env = environment(ROOT, SLURM_CONF=str(cluster.configuration_file), PATH=path)
        process = subprocess.run(srun, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    errors = [(tmp_path / f"{rank}.err").read_text() for rank in (0, 1) if (tmp_path / f"{rank}.err").exists()]
    assert process.returncode == 0, (process.stdout, process.stderr, errors)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert [(host["rank"], host["host"]) for host in first["hosts"]] == [(0, "n1"), (1, "n2")]
    assert first["ok"]
    assert [finding["name"] for finding in first["findings"] if not finding["ok"]] == []
    assert "one kernel" in first["findings"][0]["found"], "two nodes on one machine are recognized as one host"
    assert list(storage.iterdir()) == []


def test_batch_script_benchmarks_from_two_nodes(tmp_path: Path) -> None:
    storage, program = tmp_path / "storage", tmp_path / "bin" / "tuneline"
    storage.mkdir()
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@" -o "{tmp_path}/report"\n')
    program.chmod(0o755)
    script = ROOT / "docs" / "examples" / "storage-benchmark.sbatch"
    options = ["--checkpoint", "1m", "--ranks", "2", "--seconds", "0.1", "--wait", "60"]
    with slurm_cluster.run_cluster() as cluster:
        path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = environment(ROOT, SLURM_CONF=str(cluster.configuration_file), PATH=path, STORAGE=str(storage))
        command = ["sbatch", "--wait", f"--output={tmp_path}/log", str(script), *options]
        process = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
    log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    assert process.returncode == 0, (process.stdout, process.stderr, log)
    result = json.loads((tmp_path / "report" / "benchmark.json").read_text())
    assert [(host["rank"], host["host"]) for host in result["hosts"]] == [(0, "n1"), (1, "n2")]
    assert result["checkpoint_write"]["bytes"] == 14_000_000
    assert result["checkpoint_read"]["other_host"]
    assert list(storage.iterdir()) == []
