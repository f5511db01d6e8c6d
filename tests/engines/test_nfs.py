"""Shared storage over the NFS of Linux kernels: a server and two clients with separate caches, started by a kit.

The kit is a folder with the program `nfs-lab`, which starts the machines `a` (server), `b` and `c` (clients). stress: the
tests wait for caches to expire, for the server to restart, and for locks of a host without power (12 minutes).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.datasets import small_dataset
from tests.pipelines.command import ROOT
from tests.tiny import tiny_model

KIT_VARIABLE = "TUNELINE_NFS_LAB"
pytestmark = [
    pytest.mark.stress,
    pytest.mark.nfs,
    pytest.mark.skipif(
        not os.environ.get(KIT_VARIABLE) or os.geteuid() != 0,
        reason=f"{KIT_VARIABLE} is not set to the folder of a kit that starts NFS machines, or this user is not root",
    ),
]
ADVISED, DEFAULT = (
    "work",
    "plain3",
)  # mounts of NFSv3 with the options of docs/how-to/powerscale.md, and without options
REPLAY_SECONDS, MAX_STEPS = 40, 80


@dataclass(frozen=True)
class Machines:
    """The running machines; each sees the checkout and this Python at their paths."""

    kit: Path

    def control(self, *arguments: str) -> str:
        """Run a command of the kit and return its output."""
        command = [self.kit / "nfs-lab", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def mount(self, kind: str) -> None:
        for client in "bc":
            self.control("run", client, "--root", f"mountpoint -q /mnt/{kind} || lab-mount {kind}")

    def run_python(self, client: str, arguments: str) -> str:
        """Run `python ARGUMENTS` with this checkout on a client, and return the last line of the output."""
        variables = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={ROOT}"
        return self.control("run", client, f"env {variables} timeout 280 {sys.executable} -P {arguments}").splitlines()[
            -1
        ]

    def repeat(self, client: str, program: str, folder: str, seconds: float) -> dict[str, int]:
        """Repeat a program of nfs_programs.py and return how often it had each result."""
        output = self.run_python(client, f"-m tests.engines.nfs_programs {program} {folder} {seconds}")
        counts: dict[str, int] = json.loads(output)
        return counts


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    running = Machines(Path(os.environ[KIT_VARIABLE]))
    shared = {str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    running.control("up", "--fresh", *(part for folder in sorted(shared) for part in ("--share", folder)))
    try:
        running.mount(ADVISED)
        running.mount(DEFAULT)
        yield running
    finally:
        running.control("down")


def test_state_of_a_run_is_read_while_another_host_replaces_it(machines: Machines) -> None:
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(machines.repeat, "b", "write_run", f"/mnt/{ADVISED}/state", 20)
        read = pool.submit(machines.repeat, "c", "read_run", f"/mnt/{ADVISED}/state", 20)
    assert written.result()["written"] > 50
    assert set(read.result()) == {"whole"}


def test_operations_whose_answers_are_lost_in_a_restart_of_the_server_succeed(machines: Machines) -> None:
    programs = ("rename_file", "link_file", "move_folder", "lock_workdir")
    folders = {program: f"/mnt/{ADVISED}/lost-{program}" for program in programs}
    with ThreadPoolExecutor(len(programs)) as pool:
        results = {p: pool.submit(machines.repeat, "b", p, folders[p], REPLAY_SECONDS) for p in programs}
        machines.control(
            "run", "b", " && ".join(f"until test -e {f}/ready; do sleep 1; done" for f in folders.values())
        )
        time.sleep(3)
        machines.control("mute", "a")  # requests are executed, and answers are lost
        time.sleep(1.5)
        machines.control("cut", "a")
        machines.control("plug", "a")
        machines.control("boot", "a")
    assert {program: set(result.result()) for program, result in results.items()} == {
        program: {"done"} for program in programs
    }


@pytest.fixture(scope="module")
def exchange(machines: Machines) -> Path:
    """A folder that the host and all machines share, with a tiny model, a dataset and a recipe."""
    folder = Path(os.environ.get("NFS_LAB_DIR", f"/tmp/nfs-lab-{os.getuid()}")) / "exchange" / "training"
    shutil.rmtree(folder, ignore_errors=True)
    tiny_model(folder / "tiny")
    small_dataset(folder / "rows", train=400)
    recipe = {"base_model": "/exchange/training/tiny", "adaptation": "full", "max_length": 128, "validation_rows": 4}
    schedule = {"max_steps": MAX_STEPS, "batch_size": 4, "learning_rate": 1e-3, "checkpoint_every": 10}
    (folder / "c.yaml").write_text(json.dumps({"seed": 11, "fine_tuning": {**recipe, **schedule}}))
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


def test_training_of_a_host_without_power_is_continued_by_another_to_the_same_weights(
    machines: Machines, exchange: Path
) -> None:
    """The server restarts during the training, then the client loses power, and the other one takes over its folder."""

    def train(client: str, name: str) -> str:
        folder = f"/mnt/{ADVISED}/{name}"
        options = f"-o {folder}/out -c /exchange/training/c.yaml --workdir {folder}/work --json"
        result = json.loads(machines.run_python(client, f"-m pipelines.cli finetune /exchange/training/rows {options}"))
        return str(result["sha256"])

    def wait_for_checkpoint(step: int) -> None:
        pattern = f"/export/work/stopped/work/state/fine_tuning/*/checkpoint-{step}/complete.json"
        machines.control("run", "a", "--root", f"until ls {pattern}; do sleep 1; done")

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(train, "b", "stopped")
        wait_for_checkpoint(10)
        machines.control("run", "a", "--root", "lab-server restart 5")
        wait_for_checkpoint(40)
        machines.control("cut", "b")
        assert stopped.exception() is not None
    assert train("c", "stopped") == train("c", "whole")


def test_probe_measures_how_late_a_client_with_default_options_sees_changes(machines: Machines) -> None:
    probe = f"-m pipelines.cli storage probe /mnt/{DEFAULT} --pair late --size 8MiB --no-fio --json --rank"
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda rank: json.loads(machines.run_python("bc"[rank], f"{probe} {rank}")), (0, 1)))
    for report in reports:
        for side in report["measured"]["visibility"]:
            delays = {name: side[name] for name in ("by_name", "in_listing", "time_of_change", "added_bytes")}
            assert all(delay is not None and delay < side["patience"] for delay in delays.values()), delays
