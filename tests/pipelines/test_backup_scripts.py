"""The backup scripts of docs/examples/ on a simulated workdir; test_backup.py uses the workdir of a whole run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from tests.pipelines.backup_restore import EXAMPLES, back_up, list_files, restore, run_script
from tests.pipelines.command import environment

DIGEST = "a1" * 32
OLD = time.time() - 40 * 86400
FILES = (
    "runs/r1/run.json",
    "mlflow-artifacts/1/.hidden.json",
    "dvc-remote/files/md5/ab/cdef",
    "store/keys/training/k1",
    f"store/{DIGEST}/weights",
    f"store/{DIGEST}/manifest.json",
)


def write_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        os.utime(folder / name, (OLD, OLD))
    return folder


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    return write_files(tmp_path / "wd", *FILES)


@pytest.fixture
def backup(workdir: Path, tmp_path: Path) -> Path:
    return back_up("wd", tmp_path / "kept", cwd=tmp_path)


def get_script_error(name: str, *arguments: object, cwd: Path, **extra: str) -> str:
    """Return the message of a script that exits with 1."""
    process = run_script(name, *arguments, cwd=cwd, **extra)
    assert process.returncode == 1, process.stderr
    return process.stderr


def git(folder: Path, *arguments: object) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(folder), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_restored_backup_is_readable_by_its_owner_only(workdir: Path, backup: Path, tmp_path: Path) -> None:
    assert list_files(backup) == set(FILES)
    assert list_files(restore(backup, tmp_path / "new" / "wd")) == set(FILES)
    assert [path.stat().st_mode & 0o077 for path in (backup, tmp_path / "new" / "wd")] == [0, 0]


def test_incomplete_backup_is_refused_under_any_name(tmp_path: Path) -> None:
    write_files(tmp_path / "kept" / "x.part", *FILES)
    for name, cwd in (("kept/x.part/", tmp_path), ("x.part", tmp_path / "kept"), (".", tmp_path / "kept" / "x.part")):
        assert "not a complete backup" in get_script_error("restore.sh", name, tmp_path / "new", cwd=cwd)
    assert not (tmp_path / "new").exists()


def test_backup_reports_missing_parts_and_requires_the_store(tmp_path: Path) -> None:
    write_files(tmp_path / "wd", "runs/r1/run.json")
    process = run_script("backup.sh", "wd", "kept", cwd=tmp_path)
    assert process.returncode == 0
    for missing in ("data-repository", "dvc-remote", "mlflow-artifacts", "store", "mlflow.db"):
        assert f"wd/{missing} does not exist" in process.stderr
    assert "the folder nowhere does not exist" in get_script_error(
        "backup.sh", "wd", "other", cwd=tmp_path, TUNELINE_STORE="nowhere"
    )
    assert not (tmp_path / "other").exists()


def fake_date(timestamp: str, folder: Path) -> str:
    """Return a PATH with a `date` that always prints this time."""
    folder.mkdir(exist_ok=True)
    (folder / "date").write_text(f"#!/bin/sh\necho {timestamp}\n")
    (folder / "date").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_second_backup_in_the_same_second_is_refused(workdir: Path, tmp_path: Path) -> None:
    path = fake_date("20260101T000000Z", tmp_path / "bin")
    first = back_up("wd", tmp_path / "kept", cwd=tmp_path, PATH=path)
    assert "already exists" in get_script_error("backup.sh", "wd", tmp_path / "kept", cwd=tmp_path, PATH=path)
    assert (list_files(first), [path.name for path in first.parent.iterdir()]) == (set(FILES), [first.name])
    first.rename(first.with_name(f"{first.name}.part"))
    assert "File exists" in get_script_error("backup.sh", "wd", tmp_path / "kept", cwd=tmp_path, PATH=path)


def create_backups(folder: Path, *days: tuple[str, float]) -> None:
    for name, age in days:
        write_files(folder / name, "mlflow.db")
        os.utime(folder / name, (time.time() - age * 86400,) * 2)


def test_backups_are_kept_for_keep_days_or_forever(workdir: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    old = [
        ("20260101T000000Z", 40),
        ("20260102T000000Z", 20),
        ("20260103T000000Z.part", 2),
        ("20260104T000000Z.part", 0.5),
    ]
    mine = [("mine", 400), ("20260101", 400), ("20260101T000000Z.mine", 400)]
    create_backups(kept, *old, *mine)
    first = back_up("wd", kept, cwd=tmp_path)
    assert {path.name for path in kept.iterdir()} == {name for name, _ in (*old, *mine)} | {first.name}
    second = back_up("wd", kept, cwd=tmp_path, KEEP_DAYS="30", PATH=fake_date("20260105T000000Z", tmp_path / "bin"))
    assert {path.name for path in kept.iterdir()} == {name for name, _ in (*old[1::2], *mine)} | {
        first.name,
        second.name,
    }
    assert "expected a number of days" in get_script_error("backup.sh", "wd", kept, cwd=tmp_path, KEEP_DAYS="a month")


@contextmanager
def run_writer(store: Path) -> Iterator[list[str]]:
    """Write artifacts, the notes that reference them and a run's report in a loop during a block; yield the notes."""
    stopped, notes = threading.Event(), []

    def write_until_stopped() -> None:
        for number in range(150):
            if stopped.is_set():
                return
            (store / "unfinished" / "new").mkdir(parents=True)
            write_files(store / "unfinished" / "new", "weights", "manifest.json")
            (store / "unfinished" / "new").rename(store / f"{number:064x}")
            for note in (store / "keys" / "training" / str(number), store.parent / "runs" / "r1" / "run.json"):
                artifact_folder.write_atomically(note, f"{number:064x}")
            notes.append(str(number))
            stopped.wait(0.02)

    writer = threading.Thread(target=write_until_stopped)
    writer.start()
    try:
        yield notes
    finally:
        stopped.set()
        writer.join()


def test_backup_during_writes_is_consistent(workdir: Path, tmp_path: Path) -> None:
    with run_writer(workdir / "store") as notes:
        while not notes:
            time.sleep(0.01)
        before = list(notes)
        backup = back_up("wd", tmp_path / "kept", cwd=tmp_path)
        assert len(notes) > len(before)
    digests = {path.name: path.read_text() for path in (backup / "store" / "keys" / "training").iterdir()}
    assert digests.keys() >= {"k1", *before}
    assert [
        digest
        for name, digest in digests.items()
        if name != "k1" and not (backup / "store" / digest / "manifest.json").exists()
    ] == []
    assert [name for name in list_files(backup) if re.search(r"/\.[^/]*\.[0-9a-f]{8}$|unfinished", name)] == []


def test_removed_and_unfinished_files_are_left_out(workdir: Path, tmp_path: Path) -> None:
    write_files(workdir, "runs/r1/.run.json.0123abcd", "dvc-remote/files/md5/ab/.x-Y_z.tmp", "runs/r1/gone")
    python = tmp_path / "python"  # lists a file that is removed before the copy
    python.write_text(
        f"#!{sys.executable}\nimport shutil, sys\ncopy2 = shutil.copy2\n"
        "def late(source, target):\n    source.endswith('/gone') and shutil.os.unlink(source)\n    return copy2(source, target)\n"
        "shutil.copy2 = late\ndel sys.argv[:2]\nexec(sys.stdin.read())\n"
    )
    python.chmod(0o755)
    variables = environment(PYTHON=str(python))
    command = ["sh", EXAMPLES / "backup.sh", "wd", "kept"]
    process = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    assert list_files(tmp_path / process.stdout.strip()) == set(FILES)
    assert not (workdir / "runs" / "r1" / "gone").exists()


def test_data_repository_of_another_user_is_cloned_with_settings(workdir: Path, tmp_path: Path) -> None:
    repository = workdir / "data-repository"
    git(tmp_path, "init", "--quiet", "--bare", "--template=", repository)
    git(tmp_path, "clone", "--quiet", repository, "clone")
    git(tmp_path / "clone", "commit", "--quiet", "--allow-empty", "-m", "one")
    git(tmp_path / "clone", "push", "--quiet", "origin", "HEAD:main")
    git(repository, "config", "receive.denyDeletes", "true")
    write_files(repository, "hooks/update")
    foreign = run_script("backup.sh", "wd", "kept", cwd=tmp_path, GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    assert foreign.returncode == 0, foreign.stderr
    copy = restore(tmp_path / foreign.stdout.strip(), tmp_path / "new") / "data-repository"
    assert git(copy, "rev-parse", "main") == git(repository, "rev-parse", "main")
    assert (copy / "config").read_text() == (repository / "config").read_text()
    assert (copy / "hooks" / "update").exists()
    assert git(copy, "fsck") == ""


def test_restore_fills_an_empty_mount_point_or_linked_folder(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    before = (tmp_path / "volume").stat().st_ino
    (tmp_path / "link").symlink_to("volume")
    assert restore(backup, tmp_path / "link") == tmp_path / "link"
    assert list_files(tmp_path / "volume") == set(FILES)
    assert ((tmp_path / "volume").stat().st_ino, (tmp_path / "link").is_symlink()) == (before, True)
    (tmp_path / "nowhere").symlink_to("gone")
    write_files(tmp_path, "file")
    for target in ("nowhere", "file"):
        assert "is not a folder" in get_script_error("restore.sh", backup, tmp_path / target, cwd=tmp_path)


def test_leftovers_of_an_interrupted_restore_are_reported(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    for target in ("new", "volume"):
        assert run_script("restore.sh", backup, target, cwd=tmp_path, SYNC="false").returncode != 0
    assert not (tmp_path / "new").exists()
    assert "Remove it and try again" in get_script_error("restore.sh", backup, "new", cwd=tmp_path)
    assert "Empty it and try again" in get_script_error("restore.sh", backup, "volume", cwd=tmp_path)
    shutil.rmtree(tmp_path / "new.part")
    assert list_files(restore(backup, tmp_path / "new")) == set(FILES)


def test_store_url_is_refused_before_any_write(backup: Path, tmp_path: Path) -> None:
    error = get_script_error("restore.sh", backup, "new", cwd=tmp_path, TUNELINE_STORE="s3://bucket/prefix")
    assert "TUNELINE_STORE is a URL" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "wd"]


@pytest.mark.parametrize(("store", "inside"), [("new/store", "store"), ("new/own/artifacts/", "own/artifacts")])
def test_store_inside_the_workdir_is_restored_to_its_path(
    backup: Path, tmp_path: Path, store: str, inside: str
) -> None:
    workdir = restore(backup, tmp_path / "new", TUNELINE_STORE=str(tmp_path / store))
    assert list_files(workdir) == {name.replace("store/", f"{inside}/") for name in FILES}


def test_shared_store_receives_only_missing_artifacts(backup: Path, tmp_path: Path) -> None:
    other = "b2" * 32
    write_files(backup / "store", f"{other}/manifest.json", "keys/training/k2")
    shared = write_files(tmp_path / "shared", f"{DIGEST}/manifest.json", f"{other}/half", "keys/training/k1")
    (shared / "keys" / "training" / "k1").write_text("theirs")
    (shared / DIGEST / "manifest.json").write_text("in use")  # with the current time
    mtime = (shared / DIGEST / "manifest.json").stat().st_mtime_ns
    start = time.time() - 2
    for name in ("one", "two"):
        workdir = restore(backup, tmp_path / name, TUNELINE_STORE=str(shared))
        assert list_files(workdir) == {file for file in FILES if not file.startswith("store/")}
    assert list_files(shared) == {
        f"{DIGEST}/manifest.json",
        f"{other}/manifest.json",
        "keys/training/k1",
        "keys/training/k2",
    }
    assert (shared / "keys" / "training" / "k1").read_text() == "theirs"
    assert (shared / DIGEST / "manifest.json").stat().st_mtime_ns == mtime
    assert (shared / other / "manifest.json").stat().st_mtime > start, "gc must not see it as unused"
    assert [(shared / "unfinished").is_dir(), *(shared / "unfinished").iterdir()] == [True]


def test_interrupted_restore_leaves_no_partial_artifact(backup: Path, tmp_path: Path) -> None:
    copy_half = tmp_path / "half"
    copy_half.write_text(
        '#!/bin/sh\ncase $2 in */unfinished/*) cp "$1/manifest.json" "$2" && exit 1 ;; *) cp -Rp "$1" "$2" ;; esac\n'
    )
    copy_half.chmod(0o755)
    process = run_script(
        "restore.sh", backup, "new", cwd=tmp_path, TUNELINE_STORE=str(tmp_path / "shared"), SYNC=str(copy_half)
    )
    assert process.returncode != 0
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["unfinished"]
    assert not (tmp_path / "new").exists(), "the workdir is published last"
    shutil.rmtree(tmp_path / "new.part")
    restore(backup, tmp_path / "new", TUNELINE_STORE=str(tmp_path / "shared"))
    assert list_files(tmp_path / "shared") == {
        name.removeprefix("store/") for name in FILES if name.startswith("store/")
    }
