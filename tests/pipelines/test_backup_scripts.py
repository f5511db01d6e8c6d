"""The scripts of docs/examples/ on a folder laid out as a work folder is; test_backup.py takes one of a whole customization."""

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

from components.common import artifacts
from tests.pipelines.command import environment
from tests.pipelines.restoring import EXAMPLES, backed_up, files, restored, script

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


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        os.utime(folder / name, (OLD, OLD))
    return folder


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    return write(tmp_path / "wd", *FILES)


@pytest.fixture
def backup(workdir: Path, tmp_path: Path) -> Path:
    return backed_up("wd", tmp_path / "kept", cwd=tmp_path)


def refused(name: str, *arguments: object, cwd: Path, **extra: str) -> str:
    """What a script says that ends with 1."""
    done = script(name, *arguments, cwd=cwd, **extra)
    assert done.returncode == 1, done.stderr
    return done.stderr


def git(folder: Path, *arguments: object) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(folder), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_what_is_backed_up_comes_back_and_nobody_else_may_look_into_either(workdir: Path, backup: Path, tmp_path: Path) -> None:
    assert files(backup) == set(FILES)
    assert files(restored(backup, tmp_path / "new" / "wd")) == set(FILES)
    assert [path.stat().st_mode & 0o077 for path in (backup, tmp_path / "new" / "wd")] == [0, 0]


def test_half_a_backup_is_refused_by_whatever_name(tmp_path: Path) -> None:
    write(tmp_path / "kept" / "x.part", *FILES)
    for name, place in (("kept/x.part/", tmp_path), ("x.part", tmp_path / "kept"), (".", tmp_path / "kept" / "x.part")):
        assert "no whole backup" in refused("restore.sh", name, tmp_path / "new", cwd=place)
    assert not (tmp_path / "new").exists()


def test_a_backup_says_what_is_not_in_it_and_fails_where_the_named_store_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "wd", "runs/r1/run.json")
    told = script("backup.sh", "wd", "kept", cwd=tmp_path)
    assert told.returncode == 0
    for missing in ("data-repository", "dvc-remote", "mlflow-artifacts", "store", "mlflow.db"):
        assert f"there is no wd/{missing}" in told.stderr
    assert "no folder nowhere" in refused("backup.sh", "wd", "other", cwd=tmp_path, TUNELINE_STORE="nowhere")
    assert not (tmp_path / "other").exists()


def at(moment: str, folder: Path) -> str:
    """A PATH on which `date` always gives this moment."""
    folder.mkdir(exist_ok=True)
    (folder / "date").write_text(f"#!/bin/sh\necho {moment}\n")
    (folder / "date").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_second_backup_in_the_same_second_is_refused_and_the_first_stays_as_it_was(workdir: Path, tmp_path: Path) -> None:
    path = at("20260101T000000Z", tmp_path / "bin")
    first = backed_up("wd", tmp_path / "kept", cwd=tmp_path, PATH=path)
    assert "is there already" in refused("backup.sh", "wd", tmp_path / "kept", cwd=tmp_path, PATH=path)
    assert (files(first), [path.name for path in first.parent.iterdir()]) == (set(FILES), [first.name])
    first.rename(first.with_name(f"{first.name}.part"))
    assert "File exists" in refused("backup.sh", "wd", tmp_path / "kept", cwd=tmp_path, PATH=path)


def aged(folder: Path, *days: tuple[str, float]) -> None:
    for name, age in days:
        write(folder / name, "mlflow.db")
        os.utime(folder / name, (time.time() - age * 86400,) * 2)


def test_backups_are_kept_for_so_many_days_and_for_ever_where_none_are_said(workdir: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    old = [("20260101T000000Z", 40), ("20260102T000000Z", 20), ("20260103T000000Z.part", 2), ("20260104T000000Z.part", 0.5)]
    mine = [("mine", 400), ("20260101", 400), ("20260101T000000Z.mine", 400)]
    aged(kept, *old, *mine)
    first = backed_up("wd", kept, cwd=tmp_path)
    assert {path.name for path in kept.iterdir()} == {name for name, _ in (*old, *mine)} | {first.name}
    second = backed_up("wd", kept, cwd=tmp_path, KEEP_DAYS="30", PATH=at("20260105T000000Z", tmp_path / "bin"))
    assert {path.name for path in kept.iterdir()} == {name for name, _ in (*old[1::2], *mine)} | {first.name, second.name}
    assert "no number" in refused("backup.sh", "wd", kept, cwd=tmp_path, KEEP_DAYS="a month")


@contextmanager
def writing(store: Path) -> Iterator[list[str]]:
    """Have somebody make an artifact and then the note that names it, again and again, and the report of a run; yields the notes."""
    ended, made = threading.Event(), []

    def work() -> None:
        for number in range(150):
            if ended.is_set():
                return
            (store / "unfinished" / "new").mkdir(parents=True)
            write(store / "unfinished" / "new", "weights", "manifest.json")
            (store / "unfinished" / "new").rename(store / f"{number:064x}")
            for note in (store / "keys" / "training" / str(number), store.parent / "runs" / "r1" / "run.json"):
                artifacts.write_atomically(note, f"{number:064x}")
            made.append(str(number))
            ended.wait(0.02)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        yield made
    finally:
        ended.set()
        writer.join()


def test_beside_a_writer_all_that_a_backup_names_is_in_it_and_nothing_temporary(workdir: Path, tmp_path: Path) -> None:
    with writing(workdir / "store") as made:
        while not made:
            time.sleep(0.01)
        before = list(made)
        backup = backed_up("wd", tmp_path / "kept", cwd=tmp_path)
        assert len(made) > len(before)
    notes = {path.name: path.read_text() for path in (backup / "store" / "keys" / "training").iterdir()}
    assert notes.keys() >= {"k1", *before}
    assert [one for name, one in notes.items() if name != "k1" and not (backup / "store" / one / "manifest.json").exists()] == []
    assert [name for name in files(backup) if re.search(r"/\.[^/]*\.[0-9a-f]{8}$|unfinished", name)] == []


def test_what_vanishes_while_it_is_copied_is_none_and_names_of_unfinished_files_are_left_out(workdir: Path, tmp_path: Path) -> None:
    write(workdir, "runs/r1/.run.json.0123abcd", "dvc-remote/files/md5/ab/.x-Y_z.tmp", "runs/r1/gone")
    python = tmp_path / "python"  # one that lists files and then finds one gone
    python.write_text(
        f"#!{sys.executable}\nimport shutil, sys\ncopy2 = shutil.copy2\n"
        "def late(source, target):\n    source.endswith('/gone') and shutil.os.unlink(source)\n    return copy2(source, target)\n"
        "shutil.copy2 = late\ndel sys.argv[:2]\nexec(sys.stdin.read())\n"
    )
    python.chmod(0o755)
    given = environment(PYTHON=str(python))
    command = ["sh", EXAMPLES / "backup.sh", "wd", "kept"]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / done.stdout.strip()) == set(FILES)
    assert not (workdir / "runs" / "r1" / "gone").exists()


def test_the_data_repository_of_another_user_is_cloned_with_its_hooks_and_settings(workdir: Path, tmp_path: Path) -> None:
    repository = workdir / "data-repository"
    git(tmp_path, "init", "--quiet", "--bare", "--template=", repository)
    git(tmp_path, "clone", "--quiet", repository, "clone")
    git(tmp_path / "clone", "commit", "--quiet", "--allow-empty", "-m", "one")
    git(tmp_path / "clone", "push", "--quiet", "origin", "HEAD:main")
    git(repository, "config", "receive.denyDeletes", "true")
    write(repository, "hooks/update")
    foreign = script("backup.sh", "wd", "kept", cwd=tmp_path, GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    assert foreign.returncode == 0, foreign.stderr
    copy = restored(tmp_path / foreign.stdout.strip(), tmp_path / "new") / "data-repository"
    assert git(copy, "rev-parse", "main") == git(repository, "rev-parse", "main")
    assert (copy / "config").read_text() == (repository / "config").read_text()
    assert (copy / "hooks" / "update").exists()
    assert git(copy, "fsck") == ""


def test_an_empty_folder_that_stays_is_filled_be_it_a_mount_point_or_a_link(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    before = (tmp_path / "volume").stat().st_ino
    (tmp_path / "link").symlink_to("volume")
    assert restored(backup, tmp_path / "link") == tmp_path / "link"
    assert files(tmp_path / "volume") == set(FILES)
    assert ((tmp_path / "volume").stat().st_ino, (tmp_path / "link").is_symlink()) == (before, True)
    (tmp_path / "nowhere").symlink_to("gone")
    write(tmp_path, "file")
    for place in ("nowhere", "file"):
        assert "is no folder" in refused("restore.sh", backup, tmp_path / place, cwd=tmp_path)


def test_what_is_left_of_a_restore_that_broke_off_is_named_with_what_to_do(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    for place in ("new", "volume"):
        assert script("restore.sh", backup, place, cwd=tmp_path, SYNC="false").returncode != 0
    assert not (tmp_path / "new").exists()
    assert "remove it, and repeat" in refused("restore.sh", backup, "new", cwd=tmp_path)
    assert "empty it, and repeat" in refused("restore.sh", backup, "volume", cwd=tmp_path)
    shutil.rmtree(tmp_path / "new.part")
    assert files(restored(backup, tmp_path / "new")) == set(FILES)


def test_a_store_at_a_url_is_refused_before_anything_is_made(backup: Path, tmp_path: Path) -> None:
    said = refused("restore.sh", backup, "new", cwd=tmp_path, TUNELINE_STORE="s3://bucket/prefix")
    assert "TUNELINE_STORE is a URL" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "wd"]


@pytest.mark.parametrize(("store", "inside"), [("new/store", "store"), ("new/own/artifacts/", "own/artifacts")])
def test_a_store_within_the_work_folder_is_part_of_it(backup: Path, tmp_path: Path, store: str, inside: str) -> None:
    workdir = restored(backup, tmp_path / "new", TUNELINE_STORE=str(tmp_path / store))
    assert files(workdir) == {name.replace("store/", f"{inside}/") for name in FILES}


def test_a_store_that_others_use_gets_what_it_has_not_and_keeps_what_it_has(backup: Path, tmp_path: Path) -> None:
    other = "b2" * 32
    write(backup / "store", f"{other}/manifest.json", "keys/training/k2")
    shared = write(tmp_path / "shared", f"{DIGEST}/manifest.json", f"{other}/half", "keys/training/k1")
    (shared / "keys" / "training" / "k1").write_text("theirs")
    (shared / DIGEST / "manifest.json").write_text("in use")  # now
    used = (shared / DIGEST / "manifest.json").stat().st_mtime_ns
    began = time.time() - 2
    for place in ("one", "two"):
        workdir = restored(backup, tmp_path / place, TUNELINE_STORE=str(shared))
        assert files(workdir) == {name for name in FILES if not name.startswith("store/")}
    assert files(shared) == {f"{DIGEST}/manifest.json", f"{other}/manifest.json", "keys/training/k1", "keys/training/k2"}
    assert (shared / "keys" / "training" / "k1").read_text() == "theirs"
    assert (shared / DIGEST / "manifest.json").stat().st_mtime_ns == used
    assert (shared / other / "manifest.json").stat().st_mtime > began, "gc would take it for long unused"
    assert [(shared / "unfinished").is_dir(), *(shared / "unfinished").iterdir()] == [True]


def test_an_artifact_is_never_in_a_store_without_all_its_files(backup: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.write_text('#!/bin/sh\ncase $2 in */unfinished/*) cp "$1/manifest.json" "$2" && exit 1 ;; *) cp -Rp "$1" "$2" ;; esac\n')
    half.chmod(0o755)
    broken = script("restore.sh", backup, "new", cwd=tmp_path, TUNELINE_STORE=str(tmp_path / "shared"), SYNC=str(half))
    assert broken.returncode != 0
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["unfinished"]
    assert not (tmp_path / "new").exists(), "what names it comes last"
    shutil.rmtree(tmp_path / "new.part")
    restored(backup, tmp_path / "new", TUNELINE_STORE=str(tmp_path / "shared"))
    assert files(tmp_path / "shared") == {name.removeprefix("store/") for name in FILES if name.startswith("store/")}
