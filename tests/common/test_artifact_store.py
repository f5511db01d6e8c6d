"""Concurrent jobs on one artifact store: stored artifacts stay intact and no job fails because of another.

The test marked `long` kills writing processes over several rounds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.artifacts.code_digest import ROOT
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError
from components.common.workspace import artifact_store, job_folders, liveness

WRITER = Path(__file__).with_name("concurrent_store_writer.py")
DEAD_PROCESS = "4194303-1"  # above the largest pid that Linux gives


def start_writer(folder: Path, name: str, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(folder / "store"), str(folder / "go"), name, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def publish_dataset(folder: Path, by: str = "me") -> Artifact:
    artifact_folder.claim_folder(folder, "key")
    (folder / "rows.txt").write_text("row\n")
    return artifact_folder.publish(
        folder, "dataset", payload=["rows.txt"], inputs=[], config={}, seed=1, key="key", summary={"by": by}
    )


def stored_author(store: Path, sha256: str) -> str:
    return str(artifact_store.load_artifact(store, sha256, "dataset").manifest.summary["by"])


def unfinished_entries(store: Path) -> list[str]:
    return [path.name for path in (store / "unfinished").iterdir()]


def simulate_kill_between_renames(store: Path, stored: Artifact, host: str = "") -> Path:
    """Leave the store as a job does that is killed after it moved the old artifact aside."""
    job = (
        store
        / "unfinished"
        / f"{artifact_store.JOB_FOLDER_PREFIX}.{host or liveness.identify_host()}.{DEAD_PROCESS}.0a1b2c3d"
    )
    aside = job / artifact_store.ASIDE_FOLDER / "4d3c2b1a"
    aside.mkdir(parents=True)
    stored.path.rename(aside / stored.sha256)
    return job


def test_concurrent_writers_of_equal_artifacts_all_succeed(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, name, rounds=40) for name in ("one", "two", "three", "four")]
    time.sleep(1)
    (tmp_path / "go").touch()
    outputs = [writer.communicate(timeout=240) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0, 0], outputs
    digests = outputs[0][0].split()
    assert len(set(digests)) == 40
    assert all(stdout.split() == digests for stdout, _ in outputs)
    assert [stored_author(tmp_path / "store", sha256) for sha256 in digests[1:3]] == ["all", "all"]
    assert unfinished_entries(tmp_path / "store") == []


@pytest.mark.long
def test_stored_artifacts_survive_killed_processes(tmp_path: Path) -> None:
    rng = random.Random(7)
    (tmp_path / "go").touch()
    stored_digests = set[str]()
    for _ in range(4):
        writers = [start_writer(tmp_path, name, rounds=400) for name in ("one", "two", "three")]
        time.sleep(1.5 + rng.random())
        for writer in writers:
            writer.kill()
        stored_digests |= {sha256 for writer in writers for sha256 in writer.communicate(timeout=60)[0].split()}
    artifact_store.remove_abandoned_jobs(tmp_path / "store")
    assert stored_digests
    assert {
        artifact_store.load_artifact(tmp_path / "store", sha256).sha256 for sha256 in stored_digests
    } == stored_digests
    assert unfinished_entries(tmp_path / "store") == []


def test_artifact_moved_aside_by_killed_job_is_restored(tmp_path: Path) -> None:
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    simulate_kill_between_renames(tmp_path, stored)
    assert stored_author(tmp_path, stored.sha256) == "me"
    assert unfinished_entries(tmp_path) == []


def test_artifact_moved_aside_on_another_host_is_restored(tmp_path: Path) -> None:
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    job = simulate_kill_between_renames(tmp_path, stored, host="other.machine-0a1b2c3d")
    assert stored_author(tmp_path, stored.sha256) == "me"
    assert unfinished_entries(tmp_path) == [job.name]  # its owner may be alive


def test_folder_without_manifest_is_reported_as_missing_artifact(tmp_path: Path) -> None:
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    simulate_kill_between_renames(tmp_path, stored, host="other.machine-0a1b2c3d")
    (tmp_path / stored.sha256 / "torn").mkdir(parents=True)
    with pytest.raises(ArtifactDamagedError, match="is not in the artifact store"):
        artifact_store.load_artifact(tmp_path, stored.sha256)


def test_atomic_writes_of_equal_pids_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = artifact_folder.fsync

    def write_from_other_job(path: Path) -> None:
        monkeypatch.setattr(artifact_folder, "fsync", real)
        artifact_folder.write_atomically(tmp_path / "note", "another's")
        real(path)

    monkeypatch.setattr(artifact_folder, "fsync", write_from_other_job)
    artifact_folder.write_atomically(tmp_path / "note", "mine")
    assert (tmp_path / "note").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_copy_moved_aside_is_removed_after_another_job_replaced_it(tmp_path: Path) -> None:
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    simulate_kill_between_renames(tmp_path, stored)
    publish_dataset(tmp_path / "draft", by="another").path.rename(tmp_path / stored.sha256)
    artifact_store.remove_abandoned_jobs(tmp_path)
    assert stored_author(tmp_path, stored.sha256) == "another"
    assert unfinished_entries(tmp_path) == []


def test_interruption_between_renames_keeps_old_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    real = job_folders.move_aside

    def move_aside_then_interrupt(home: Path, aside: Path) -> None:
        real(home, aside)
        raise KeyboardInterrupt

    monkeypatch.setattr(job_folders, "move_aside", move_aside_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft", by="another"))
    assert stored_author(tmp_path, stored.sha256) == "me"
    assert unfinished_entries(tmp_path) == []


def test_damaged_artifact_is_replaced_by_intact_one(tmp_path: Path) -> None:
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    (stored.path / "rows.txt").write_text("bow\n")
    with pytest.raises(
        ArtifactDamagedError, match=r"rows\.txt of the dataset in .* has changed since it was published"
    ) as error:
        artifact_store.load_artifact(tmp_path, stored.sha256)
    assert "rerun the step that created it" in error.value.hint
    artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    assert stored_author(tmp_path, stored.sha256) == "me"
    assert unfinished_entries(tmp_path) == []


def test_folder_that_another_host_has_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in an NFS client's cache refers to the folder that the other host removes, until it opens the store."""
    stored = artifact_store.add_artifact(tmp_path, publish_dataset(tmp_path / "draft"))
    (stored.path / "rows.txt").unlink()
    replacement = publish_dataset(tmp_path / "draft", by="another").path

    def revalidate(folder: Path) -> None:
        if folder == tmp_path and replacement.exists():
            stored.path.rename(tmp_path / "removed")
            replacement.rename(stored.path)

    monkeypatch.setattr(filesystem, "revalidate", revalidate)
    assert stored_author(tmp_path, stored.sha256) == "another"


def test_failed_build_returns_artifact_of_faster_equal_build(tmp_path: Path) -> None:
    def fail_after_faster_build(folder: Path) -> Artifact:
        artifact_store.get_or_build(
            tmp_path, "fine_tuning", "key", lambda build_folder: publish_dataset(build_folder, by="the first")
        )
        raise FileNotFoundError("the state that both worked on")

    artifact, cached = artifact_store.get_or_build(tmp_path, "fine_tuning", "key", fail_after_faster_build)
    assert (artifact.manifest.summary["by"], cached) == ("the first", True)
    assert unfinished_entries(tmp_path) == []


def test_failed_build_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    def build(folder: Path) -> Artifact:
        artifact_folder.claim_folder(folder, "key")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        artifact_store.get_or_build(tmp_path, "data_curation", "key", build)
    assert unfinished_entries(tmp_path) == []
