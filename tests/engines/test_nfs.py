"""Shared storage over the NFS of Linux kernels: a server and two clients with separate caches, started by a kit.

The kit is a folder with the program `nfs-lab`, which starts the machines `a` (server), `b` and `c` (clients). stress: the
tests wait for caches to expire, for the server to restart, and for locks of a host without power (35 minutes).
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
REPLAY_SECONDS, MAX_STEPS = 40, 160
MAX_SECONDS = 500  # for a program that a file or a power cut stops
GRACE_SECONDS = 15  # of the kit's server: time to reclaim NFSv4 state after a restart, and the lease of a client


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

    def restart_server(self) -> None:
        self.control("run", "a", "--root", "lab-server restart 5")

    def cut_network(self) -> None:
        """Cut the network of the server for longer than the lease of NFSv4."""
        self.control("unplug", "a")
        time.sleep(GRACE_SECONDS + 5)
        self.control("plug", "a")

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

    def publish_through_interruptions(self, program: str, folders: Sequence[str]) -> None:
        """Publish on both clients at once while the server restarts and while its network is cut."""
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(self.repeat_on_both, program, MAX_SECONDS, folders)
            self.wait_for_files(f"{folder}/published-{client}" for folder in folders for client in "bc")
            self.restart_server()
            time.sleep(GRACE_SECONDS + 5)
            self.cut_network()
            assert not publishing.done()
            self.control("run", "c", " && ".join(f"touch {folder}/stop" for folder in folders))
        assert collect_results(publishing.result()) == {folder: {"published"} for folder in folders}
        self.control("run", "c", " && ".join(f"rm {folder}/stop" for folder in folders))

    def verify_on_both(self, program: str, folders: Sequence[str]) -> None:
        """Check that both clients read the same number of publications, at once with the recommended options."""
        for folder, results in collect_results(self.repeat_on_both(program, 0, folders)).items():
            assert len({result.split(" intact")[0] for result in results}) == 1, results
            expected = "intact at once" if any(kind in folder for kind in ADVISED) else "intact"
            assert all(expected in result for result in results), results

    def wait_for_files(self, paths: Iterable[str], seconds: int = MAX_SECONDS) -> None:
        """Wait until files below /mnt/KIND of a client exist on the server."""
        exported = [re.sub("^/mnt/[^/]+", "/export/work", path) for path in paths]
        tests = " && ".join(f"until test -e {path}; do sleep 0.2; done" for path in exported)
        self.control("run", "a", "--root", f"timeout {seconds} bash -c '{tests}'")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    running = Machines(Path(os.environ[KIT_VARIABLE]))
    shared = {str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    folders = (part for folder in sorted(shared) for part in ("--share", folder))
    running.control("up", "--fresh", "--memory", "3072M", *folders)
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
    programs = ("rename_file", "link_file", "move_folder", "remove_folder", "lock_workdir")
    folders = {program: list_folders(f"lost-{program}") for program in programs}
    with ThreadPoolExecutor(len(programs)) as pool:
        results = [pool.submit(machines.repeat, "b", p, REPLAY_SECONDS, folders[p]) for p in programs]
        machines.wait_for_files(f"{folder}/ready" for kinds in folders.values() for folder in kinds)
        time.sleep(3)
        machines.control("mute", "a")  # requests are executed, and answers are lost
        time.sleep(1.5)
        machines.control("cut", "a")
        machines.control("plug", "a")
        machines.control("boot", "a")
    expected = {folder: {"done"} for kinds in folders.values() for folder in kinds}
    assert collect_results(result.result() for result in results) == expected


def test_doctor_warns_of_an_sqlite_database_on_nfs(machines: Machines) -> None:
    for kind in KINDS:
        output = machines.run_python("b", f"-m pipelines.cli doctor --workdir /mnt/{kind}/doctor --json || true")
        findings = {finding["name"]: finding["found"] for finding in json.loads(output)["findings"]}
        assert "is an SQLite file on nfs" in findings["MLflow database"]


def test_clients_that_publish_at_once_lose_no_artifact(machines: Machines) -> None:
    """Each client publishes its own artifacts, and others that the other client publishes in the same second."""
    folders = list_folders("store")
    machines.publish_through_interruptions("publish_artifact", folders)
    machines.verify_on_both("verify_artifacts", folders)


def test_data_versions_are_published_by_two_clients_and_after_a_power_cut(machines: Machines) -> None:
    folders = list_folders("versions")
    machines.publish_through_interruptions("publish_version", folders)
    machines.control("run", "c", " && ".join(f"rm {folder}/writing-b" for folder in folders))
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(machines.repeat, "b", "publish_version", MAX_SECONDS, folders)
        machines.wait_for_files(f"{folder}/writing-b" for folder in folders)
        machines.reset("b")
        assert isinstance(stopped.exception(), AssertionError)
    assert collect_results([machines.repeat("c", "publish_version", 0, folders)]) == {f: {"published"} for f in folders}
    machines.verify_on_both("verify_versions", folders)


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
    """The server restarts while the client holds the lease; then the client loses its network."""
    folders = list_folders("lease")
    with ThreadPoolExecutor(2) as pool:
        fenced = pool.submit(machines.repeat, "b", "write_checkpoints", 0, folders)
        machines.wait_for_files(f"{folder}/checkpoint-3" for folder in folders)
        machines.restart_server()
        machines.wait_for_files(f"{folder}/checkpoint-6" for folder in folders)
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
    schedule = {
        "max_steps": MAX_STEPS,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "checkpoint_every": 10,
        "keep_checkpoints": 16,
    }
    (folder / "c.yaml").write_text(json.dumps({"seed": 11, "fine_tuning": {**recipe, **schedule}}))
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


def train(machines: Machines, client: str, folder: str) -> dict[str, object]:
    options = f"-o {folder}/out -c /exchange/training/c.yaml --workdir {folder}/work --json"
    output = machines.run_python(client, f"-m pipelines.cli finetune /exchange/training/rows {options}")
    result: dict[str, object] = json.loads(output)
    return result


@pytest.fixture(scope="module")
def uninterrupted(machines: Machines, exchange: Path) -> object:
    """Return the digest of the model that a client trains in a local folder."""
    return train(machines, "c", "/tmp/uninterrupted")["sha256"]


@pytest.mark.parametrize("kinds", [ADVISED, DEFAULT], ids=["recommended-options", "default-options"])
def test_training_of_a_host_without_power_is_continued_by_another_to_the_same_weights(
    machines: Machines, uninterrupted: object, kinds: tuple[str, ...]
) -> None:
    """The server restarts and its network is cut, then the client loses power, and the other one takes over."""
    folders = list_folders("training", kinds)

    def wait_for_checkpoint(step: int) -> None:
        machines.wait_for_files(
            f"{folder}/work/state/fine_tuning/*/checkpoint-{step}/complete.json" for folder in folders
        )

    with ThreadPoolExecutor(len(folders)) as pool:
        stopped = [pool.submit(train, machines, "b", folder) for folder in folders]
        wait_for_checkpoint(10)
        machines.restart_server()
        wait_for_checkpoint(20)
        machines.cut_network()
        wait_for_checkpoint(30)
        machines.reset("b")
        assert all(isinstance(program.exception(), AssertionError) for program in stopped)
        continued = list(pool.map(lambda folder: train(machines, "c", folder), folders))
    assert {result["sha256"] for result in continued} == {uninterrupted}
    assert all(int(str(result["resumed_from"])) >= 30 for result in continued), continued


def test_probe_measures_how_late_a_client_sees_changes(machines: Machines) -> None:
    def probe(kind: str, rank: int) -> dict[str, dict[str, list[dict[str, float | None]]]]:
        options = f"--pair {kind} --size 8MiB --no-fio --json --rank {rank}"
        output = machines.run_python("bc"[rank], f"-m pipelines.cli storage probe /mnt/{kind} {options}")
        report: dict[str, dict[str, list[dict[str, float | None]]]] = json.loads(output)
        return report

    with ThreadPoolExecutor(2 * len(KINDS)) as pool:
        reports = list(pool.map(probe, KINDS * 2, [0] * len(KINDS) + [1] * len(KINDS)))
    for report in reports:
        for side in report["measured"]["visibility"]:
            delays = {name: side[name] for name in ("by_name", "in_listing", "time_of_change", "added_bytes")}
            assert all(delay is not None and delay < side["patience"] for delay in delays.values()), delays
