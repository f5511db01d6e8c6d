"""Jobs that work on one store at the same time: what is in it stays whole, and none of them fails for the others."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common import artifacts, jobs, liveness, places
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError
from components.common.hashing import ROOT

JOB = Path(__file__).with_name("adopt_often.py")
DEAD = "4194303-1"  # above the largest pid that Linux gives


def start(place: Path, name: str, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(JOB), str(place / "store"), str(place / "go"), name, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def made(folder: Path, by: str = "me") -> Artifact:
    artifacts.begin(folder, "key")
    (folder / "rows.txt").write_text("row\n")
    return artifacts.publish(folder, "dataset", payload=["rows.txt"], inputs=[], config={}, seed=1, key="key", summary={"by": by})


def said_by(store: Path, sha256: str) -> str:
    return str(places.stored(store, sha256, "dataset").manifest.summary["by"])


def left(store: Path) -> list[str]:
    return [path.name for path in (store / "unfinished").iterdir()]


def killed_between_the_renames(store: Path, stored: Artifact, where: str = "") -> Path:
    """Leave a stored artifact as a job leaves it that is killed before the new one is in its place."""
    job = store / "unfinished" / f"{places.JOB}.{where or liveness.where()}.{DEAD}.0a1b2c3d"
    aside = job / places.ASIDE / "4d3c2b1a"
    aside.mkdir(parents=True)
    stored.path.rename(aside / stored.sha256)
    return job


def test_jobs_that_make_the_same_at_once_all_end_well_and_leave_it_whole(tmp_path: Path) -> None:
    started = [start(tmp_path, name, rounds=40) for name in ("one", "two", "three", "four")]
    time.sleep(1)
    (tmp_path / "go").touch()
    told = [job.communicate(timeout=240) for job in started]
    assert [job.returncode for job in started] == [0, 0, 0, 0], told
    digests = told[0][0].split()
    assert len(set(digests)) == 40
    assert all(said.split() == digests for said, _ in told)
    assert [said_by(tmp_path / "store", sha256) for sha256 in digests[1:3]] == ["all", "all"]
    assert left(tmp_path / "store") == []


def test_what_was_once_in_the_store_stays_there_whoever_is_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    (tmp_path / "go").touch()
    once = set[str]()
    for _ in range(4):
        started = [start(tmp_path, name, rounds=400) for name in ("one", "two", "three")]
        time.sleep(1.5 + chance.random())
        for job in started:
            job.kill()
        once |= {sha256 for job in started for sha256 in job.communicate(timeout=60)[0].split()}
    places.tidy(tmp_path / "store")
    assert once
    assert {places.stored(tmp_path / "store", sha256).sha256 for sha256 in once} == once
    assert left(tmp_path / "store") == []


def test_an_artifact_that_a_killed_job_had_moved_aside_is_found_in_its_place_again(tmp_path: Path) -> None:
    stored = places.adopt(tmp_path, made(tmp_path / "draft"))
    killed_between_the_renames(tmp_path, stored)
    assert said_by(tmp_path, stored.sha256) == "me"
    assert left(tmp_path) == []


def test_an_artifact_that_a_job_of_another_machine_had_moved_aside_is_back_after_a_second(tmp_path: Path) -> None:
    stored = places.adopt(tmp_path, made(tmp_path / "draft"))
    job = killed_between_the_renames(tmp_path, stored, where="other.machine-0a1b2c3d")
    assert said_by(tmp_path, stored.sha256) == "me"
    assert left(tmp_path) == [job.name]  # its owner may live


def test_a_folder_without_a_manifest_in_the_place_of_one_moved_aside_is_told_as_missing(tmp_path: Path) -> None:
    stored = places.adopt(tmp_path, made(tmp_path / "draft"))
    killed_between_the_renames(tmp_path, stored, where="other.machine-0a1b2c3d")
    (tmp_path / stored.sha256 / "torn").mkdir(parents=True)
    with pytest.raises(ArtifactDamagedError, match="is not in the artifact store"):
        places.stored(tmp_path, stored.sha256)


def test_two_jobs_whose_processes_have_the_same_number_write_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = artifacts._fsync

    def another_writes_meanwhile(path: Path) -> None:
        monkeypatch.setattr(artifacts, "_fsync", real)
        artifacts.write_atomically(tmp_path / "note", "another's")
        real(path)

    monkeypatch.setattr(artifacts, "_fsync", another_writes_meanwhile)
    artifacts.write_atomically(tmp_path / "note", "mine")
    assert (tmp_path / "note").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_what_a_killed_job_had_moved_aside_goes_where_another_has_taken_its_place(tmp_path: Path) -> None:
    stored = places.adopt(tmp_path, made(tmp_path / "draft"))
    killed_between_the_renames(tmp_path, stored)
    made(tmp_path / "draft", by="another").path.rename(tmp_path / stored.sha256)
    places.tidy(tmp_path)
    assert said_by(tmp_path, stored.sha256) == "another"
    assert left(tmp_path) == []


def test_an_interruption_between_the_renames_leaves_the_old_one_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = places.adopt(tmp_path, made(tmp_path / "draft"))
    real = jobs.put_aside

    def interrupted(home: Path, aside: Path) -> None:
        real(home, aside)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "put_aside", interrupted)
    with pytest.raises(KeyboardInterrupt):
        places.adopt(tmp_path, made(tmp_path / "draft", by="another"))
    assert said_by(tmp_path, stored.sha256) == "me"
    assert left(tmp_path) == []


def test_a_damaged_artifact_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    stored = places.adopt(tmp_path, made(tmp_path / "draft"))
    (stored.path / "rows.txt").write_text("bow\n")
    with pytest.raises(ArtifactDamagedError, match=r"rows\.txt of the dataset in .* has changed since it was published") as refused:
        places.stored(tmp_path, stored.sha256)
    assert "run the step that made it again" in refused.value.hint
    places.adopt(tmp_path, made(tmp_path / "draft"))
    assert said_by(tmp_path, stored.sha256) == "me"
    assert left(tmp_path) == []


def test_a_job_that_fails_because_an_equal_one_was_first_takes_what_that_made(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> Artifact:
        places.produce(tmp_path, "fine_tuning", "key", lambda place: made(place, by="the first"))
        raise FileNotFoundError("the state that both worked on")

    artifact, cached = places.produce(tmp_path, "fine_tuning", "key", overtaken)
    assert (artifact.manifest.summary["by"], cached) == ("the first", True)
    assert left(tmp_path) == []


def test_a_step_that_fails_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    def build(folder: Path) -> Artifact:
        artifacts.begin(folder, "key")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        places.produce(tmp_path, "data_curation", "key", build)
    assert left(tmp_path) == []
