"""Shared storage over the NFS of Linux kernels: a server and two clients with caches of their own, started by a kit.

The kit is a folder with the program `nfs-lab`, which starts the machines `a` (server), `b` and `c` (clients). stress: the
tests wait for caches to expire and for the server to restart (3 minutes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipelines.command import ROOT

KIT_VARIABLE = "TUNELINE_NFS_LAB"
pytestmark = [
    pytest.mark.stress,
    pytest.mark.nfs,
    pytest.mark.skipif(
        not os.environ.get(KIT_VARIABLE) or os.geteuid() != 0,
        reason=f"{KIT_VARIABLE} is not set to the folder of a kit that starts NFS machines, or this user is not root",
    ),
]
ADVISED, DEFAULT = "work", "plain3"  # mounts of NFSv3 with the options of docs/powerscale.md, and without options
REPLAY_SECONDS = 40


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


def test_probe_measures_how_late_a_client_with_default_options_sees_changes(machines: Machines) -> None:
    probe = f"-m pipelines.cli storage probe /mnt/{DEFAULT} --pair late --size 8MiB --no-fio --json --rank"
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda rank: json.loads(machines.run_python("bc"[rank], f"{probe} {rank}")), (0, 1)))
    for report in reports:
        for side in report["measured"]["visibility"]:
            delays = {name: side[name] for name in ("by_name", "in_listing", "time_of_change", "added_bytes")}
            assert all(delay is not None and delay < side["patience"] for delay in delays.values()), delays
