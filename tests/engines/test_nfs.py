"""Shared storage over the NFS of Linux kernels: a server and two clients with separate caches, started by a kit.

The kit is a folder with the program `nfs-lab`, which starts the machines `a` (server), `b` and `c` (clients). stress: the
tests wait for caches to expire, for the server to restart, and for locks of a host without power (20 minutes).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.datasets import small_dataset
from tests.engines.nfs_programs import HELD_PUBLICATIONS
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
# Mounts of NFSv3 and NFSv4.1 with the options of docs/how-to/powerscale.md, and of NFSv3 and NFSv4.2 without options.
ADVISED, DEFAULT = ("work", "work41"), ("plain3", "plain42")
KINDS = (*ADVISED, *DEFAULT)
PUBLISH_SECONDS, REPLAY_SECONDS, MAX_STEPS = 25, 40, 80


@dataclass(frozen=True)
class Machines:
    """The running machines; each sees the checkout and this Python at their paths."""

    kit: Path

    def control(self, *arguments: str) -> str:
        """Run a command of the kit and return its output."""
        command = [self.kit / "nfs-lab", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
        assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def mount(self, clients: str) -> None:
        for client in clients:
            self.control("run", client, "--root", " && ".join(f"lab-mount {kind}" for kind in KINDS))

    def reset(self, client: str) -> None:
        """Cut the power of a client, and start it again."""
        self.control("reset", client)
        self.mount(client)

    def run_python(self, client: str, arguments: str) -> str:
        """Run `python ARGUMENTS` with this checkout on a client, and return the last line of the output."""
        variables = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={ROOT}"
        return self.control("run", client, f"env {variables} timeout 570 {sys.executable} -P {arguments}").splitlines()[
            -1
        ]

    def repeat(self, client: str, program: str, seconds: float, folders: Sequence[str]) -> dict[str, dict[str, int]]:
        """Repeat a program of nfs_programs.py in each folder and return how often it had each result."""
        output = self.run_python(client, f"-m tests.engines.nfs_programs {program} {seconds} {' '.join(folders)}")
        counts: dict[str, dict[str, int]] = json.loads(output)
        return counts

    def repeat_on_both(self, program: str, seconds: float, folders: Sequence[str]) -> list[dict[str, dict[str, int]]]:
        """Repeat a program on both clients at once."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda client: self.repeat(client, program, seconds, folders), "bc"))

    def wait_for_files(self, paths: Iterable[str], seconds: int = 240) -> None:
        """Wait until files below /mnt/KIND of a client exist on the server."""
        exported = [re.sub("^/mnt/[^/]+", "/export/work", path) for path in paths]
        tests = " && ".join(f"until test -e {path}; do sleep 0.2; done" for path in exported)
        self.control("run", "a", "--root", f"timeout {seconds} bash -c '{tests}'")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    running = Machines(Path(os.environ[KIT_VARIABLE]))
    shared = {str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    running.control("up", "--fresh", *(part for folder in sorted(shared) for part in ("--share", folder)))
    try:
        running.mount("bc")
        yield running
    finally:
        running.control("down")


def list_folders(name: str, kinds: Iterable[str] = KINDS) -> list[str]:
    """Return a folder per kind of mount, because all mounts show one export."""
    return [f"/mnt/{kind}/{name}-{kind}" for kind in kinds]


def collect_results(results: Iterable[dict[str, dict[str, int]]]) -> dict[str, set[str]]:
    """Return the different results per folder."""
    collected: dict[str, set[str]] = {}
    for result in results:
        for folder, counts in result.items():
            collected.setdefault(folder, set()).update(counts)
    return collected


def test_state_of_a_run_is_read_while_another_host_replaces_it(machines: Machines) -> None:
    folders = list_folders("state")
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(machines.repeat, "b", "write_run", 20, folders)
        machines.wait_for_files([f"{folder}/ready" for folder in folders])
        read = pool.submit(machines.repeat, "c", "read_run", 20, folders)
    assert all(counts["written"] > 0 for counts in written.result().values())
    assert collect_results([read.result()]) == {folder: {"whole"} for folder in folders}


def test_operations_whose_answers_are_lost_in_a_restart_of_the_server_succeed(machines: Machines) -> None:
    programs = ("rename_file", "link_file", "move_folder", "lock_workdir")
    folders = {program: f"/mnt/{ADVISED[0]}/lost-{program}" for program in programs}
    with ThreadPoolExecutor(len(programs)) as pool:
        results = [pool.submit(machines.repeat, "b", p, REPLAY_SECONDS, [folders[p]]) for p in programs]
        machines.wait_for_files(f"{folder}/ready" for folder in folders.values())
        time.sleep(3)
        machines.control("mute", "a")  # requests are executed, and answers are lost
        time.sleep(1.5)
        machines.control("cut", "a")
        machines.control("plug", "a")
        machines.control("boot", "a")
    assert collect_results(result.result() for result in results) == {folder: {"done"} for folder in folders.values()}


def test_clients_that_publish_at_once_lose_no_artifact(machines: Machines) -> None:
    """Each client publishes its own artifacts, and others that the other client publishes in the same second."""
    folders = list_folders("store")
    published = machines.repeat_on_both("publish_artifact", PUBLISH_SECONDS, folders)
    assert collect_results(published) == {folder: {"published"} for folder in folders}
    for folder, results in collect_results(machines.repeat_on_both("verify_artifacts", 0, folders)).items():
        assert len({result.split(" intact")[0] for result in results}) == 1, results
        expected = "intact at once" if any(kind in folder for kind in ADVISED) else "intact"
        assert all(expected in result for result in results), results


@dataclass(frozen=True)
class PowerCut:
    """Client b lost power half-way in publications and while it held leases; the folders of its programs."""

    publications: list[str]
    leases: list[str]
    refused: dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def power_cut(machines: Machines) -> PowerCut:
    publications, leases = list_folders("cut-store"), list_folders("cut-lease")
    held = [f"{folder}/{point}" for folder in publications for point in HELD_PUBLICATIONS]
    with ThreadPoolExecutor(2) as pool:
        stopped = [pool.submit(machines.repeat, "b", "hold_publication", 0, held)]
        try:
            machines.wait_for_files(f"{Path(f).parent}/held-{Path(f).name}" for f in held)
            stopped.append(pool.submit(machines.repeat, "b", "write_checkpoints", 0, leases))
            machines.wait_for_files(f"{folder}/checkpoint-3" for folder in leases)
            refused = machines.repeat("c", "request_lease", 0, leases)
        finally:
            machines.reset("b")
        assert all(isinstance(program.exception(), AssertionError) for program in stopped)
    return PowerCut(publications, leases, refused)


def test_publication_of_a_client_without_power_is_invisible_and_is_repeated_by_another(
    machines: Machines, power_cut: PowerCut
) -> None:
    folders = {f"{folder}/{point}": point for folder in power_cut.publications for point in HELD_PUBLICATIONS}
    found = {"files": "absent", "manifest": "absent", "replacement": "old"}
    recovered = collect_results([machines.repeat("c", "recover_publication", 0, list(folders))])
    assert recovered == {folder: {f"{found[point]}, then published"} for folder, point in folders.items()}
    verified = collect_results([machines.repeat("b", "verify_artifacts", 0, power_cut.publications)])
    for results in verified.values():
        assert all(result.startswith("3 intact") for result in results), results


def test_lease_of_a_client_without_power_passes_to_another(machines: Machines, power_cut: PowerCut) -> None:
    assert collect_results([power_cut.refused]) == {folder: {"refused"} for folder in power_cut.leases}
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(machines.repeat, "c", "write_checkpoints", 0, power_cut.leases)
        machines.wait_for_files(f"{folder}/writes-c" for folder in power_cut.leases)
        stop(machines, power_cut.leases)
    assert collect_results([writing.result()]) == {folder: {"stopped"} for folder in power_cut.leases}
    verify_checkpoints(machines, power_cut.leases)


def stop(machines: Machines, folders: Iterable[str]) -> None:
    """Let `write_checkpoints` write some checkpoints, and stop it."""
    time.sleep(10)
    machines.control("run", "c", " && ".join(f"touch {folder}/stop" for folder in folders))


def verify_checkpoints(machines: Machines, folders: Iterable[str]) -> None:
    """Check that client c continued from the last complete checkpoint of b, and that no file of its checkpoints changed."""
    for results in collect_results([machines.repeat("c", "read_checkpoints", 0, list(folders))]).values():
        assert results == {"b* c*"}


def test_client_that_was_cut_off_does_not_write_after_another_took_its_lease(machines: Machines) -> None:
    folders = list_folders("lease")
    with ThreadPoolExecutor(2) as pool:
        fenced = pool.submit(machines.repeat, "b", "write_checkpoints", 0, folders)
        machines.wait_for_files(f"{folder}/checkpoint-3" for folder in folders)
        machines.control("unplug", "b")
        writing = pool.submit(machines.repeat, "c", "write_checkpoints", 0, folders)
        machines.wait_for_files(f"{folder}/writes-c" for folder in folders)
        time.sleep(10)
        machines.control("plug", "b")
        errors = collect_results([fenced.result()])
        stop(machines, folders)
    # The successor has removed the folder in which b saves.
    expected = ("BusyError", "FileNotFoundError")
    assert all(error.startswith(expected) for results in errors.values() for error in results), errors
    assert collect_results([writing.result()]) == {folder: {"stopped"} for folder in folders}
    verify_checkpoints(machines, folders)


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
        folder = f"/mnt/{ADVISED[0]}/{name}"
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
        machines.reset("b")
        assert stopped.exception() is not None
    assert train("c", "stopped") == train("c", "whole")


def test_probe_measures_how_late_a_client_with_default_options_sees_changes(machines: Machines) -> None:
    probe = f"-m pipelines.cli storage probe /mnt/{DEFAULT[0]} --pair late --size 8MiB --no-fio --json --rank"
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda rank: json.loads(machines.run_python("bc"[rank], f"{probe} {rank}")), (0, 1)))
    for report in reports:
        for side in report["measured"]["visibility"]:
            delays = {name: side[name] for name in ("by_name", "in_listing", "time_of_change", "added_bytes")}
            assert all(delay is not None and delay < side["patience"] for delay in delays.values()), delays
