"""Files on storage that several hosts mount over NFS. fast: the answers of a server are replaced in this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.workspace import artifact_store, job_folders
from components.common.workspace.artifact_store import Workdir
from pipelines.operations.garbage_collection import inventory
from pipelines.runs import run_folder
from tests.lost_answers import lose_answers


def write_file(folder: Path) -> None:
    artifact_folder.write_atomically(folder / "note", "text")
    assert [path.name for path in folder.iterdir()] == ["note"]


def lock_folder(folder: Path) -> None:
    with job_folders.folder_lock(folder):
        assert job_folders.is_locked(folder)
    assert not list(folder.iterdir())


def lock_workdir(folder: Path) -> None:
    with run_folder.lock_workdir(Workdir(folder)):
        assert (folder / "lock.json").exists()
    assert not list(folder.iterdir())


def use_private_folder(folder: Path) -> None:
    with job_folders.private_folder(folder, "job") as own:
        (own / "file").touch()
    assert not list(folder.iterdir())


def publish_folder(folder: Path) -> None:
    for name in ("made", "target"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "target" / "old").write_text("")
    assert job_folders.move_into_place(folder / "made", folder / "target", lambda: None, folder / "aside") is None
    assert {path.name for path in folder.iterdir()} == {"target", "aside"}
    assert [path.name for path in folder.glob("aside/*/*/*")] == ["old"]


def overwrite_artifact(folder: Path) -> None:
    """Claim the folder of an artifact, which empties it."""
    (folder / "artifact" / "part" / "nested").mkdir(parents=True, exist_ok=True)
    (folder / "artifact" / "part" / "nested" / "file").touch()
    (folder / "artifact" / "manifest.json").write_text('{"api": "tuneline/v1"}')
    artifact_folder.claim_folder(folder / "artifact", "dataset", overwrite=True)
    assert not (folder / "artifact" / "part").exists()


def remove_folder(folder: Path) -> None:
    (folder / "removed" / "nested").mkdir(parents=True, exist_ok=True)
    (folder / "removed" / "nested" / "file").touch()
    filesystem.remove_tree(folder / "removed")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("operation", "calls"),
    [
        (write_file, {"rename"}),
        (lock_folder, {"link", "unlink"}),
        (lock_workdir, {"link", "unlink"}),
        (use_private_folder, {"mkdir"}),
        (publish_folder, {"rename"}),
        (overwrite_artifact, {"unlink", "rmdir"}),
        (remove_folder, {"unlink", "rmdir"}),
    ],
)
def test_operation_whose_answer_is_lost_succeeds(
    tmp_path: Path, operation: Callable[[Path], None], calls: set[str]
) -> None:
    with lose_answers(tmp_path) as lost:
        operation(tmp_path)
    assert lost >= calls


def test_rename_link_and_removal_report_what_was_not_done(tmp_path: Path) -> None:
    first, second, missing = tmp_path / "first", tmp_path / "second", tmp_path / "missing"
    first.write_text("1")
    second.write_text("2")
    with pytest.raises(FileExistsError):
        filesystem.link(first, second)
    with pytest.raises(FileNotFoundError):
        filesystem.rename(missing, second)
    with pytest.raises(FileNotFoundError):
        filesystem.rename(first, missing / "first")
    with pytest.raises(NotADirectoryError):
        filesystem.remove_tree(first)
    assert (first.read_text(), second.read_text()) == ("1", "2")


def test_read_is_repeated_while_another_host_replaces_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    failures = iter([errno.ESTALE] * (filesystem.READ_ATTEMPTS - 1) + [0] + [errno.ESTALE] * 100)
    read = Path.read_text

    def read_stale(path: Path, *arguments: str, **options: str) -> str:
        if number := next(failures):
            raise OSError(number, os.strerror(number), str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_stale)
    assert filesystem.read_text(tmp_path / "file") == "text"
    with pytest.raises(OSError, match="Stale file handle"):
        filesystem.read_text(tmp_path / "file")


def test_listing_of_a_folder_that_another_host_has_removed_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client opens the folder from its cache, and then reports that the handle is stale."""
    (tmp_path / "removed").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    list_files = Path.iterdir

    def list_stale(path: Path) -> NoReturn:
        monkeypatch.setattr(Path, "iterdir", list_files)
        if path.name == "removed":
            path.rmdir()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    for name, expected in (("removed", []), ("kept", [tmp_path / "kept" / "file"])):
        monkeypatch.setattr(Path, "iterdir", list_stale)
        assert job_folders.list_folder(tmp_path / name) == expected


def test_collection_keeps_linked_states_while_another_host_replaces_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is read as empty would release the states of a running sweep."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / artifact_store.LINKED_STATE_FILENAME).write_text('["trial"]')
    failures, read = [errno.ESTALE], Path.read_text

    def read_stale(path: Path, *arguments: str, **options: str) -> str:
        if failures:
            raise OSError(failures.pop(), "Stale file handle", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_stale)
    assert inventory._list_linked_states(tmp_path, tmp_path / "sweep") == ["state:trial"]
