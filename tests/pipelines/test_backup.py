"""A workdir restored from its backup at another path works after the old one was moved away."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.backup_restore import back_up, check_restored, list_files, move_away, restore, run_script
from tests.pipelines.project import run

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.daft,
    pytest.mark.dvc,
    pytest.mark.mlflow,
    pytest.mark.triton,
    pytest.mark.stress,
]


@pytest.fixture(scope="module")
def backup(first: dict[str, Any], project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (project / "wd" / "store" / "unfinished" / "job.elsewhere.1.2").mkdir(parents=True)
    (project / "wd" / "store" / "unfinished" / "job.elsewhere.1.2" / "half").write_text("half an artifact")
    return back_up("wd", tmp_path_factory.mktemp("backups"), cwd=project)


def test_restored_workdir_works_and_a_new_run_reuses_all_artifacts(
    first: dict[str, Any], project: Path, backup: Path, tmp_path: Path
) -> None:
    with move_away(project / "wd"):
        workdir = restore(backup, tmp_path / "an other place" / "wd")  # the spaces must survive Triton's shell
        check_restored(first, project, workdir, tmp_path / "rows")
        rerun = run(project, str(workdir))
    assert rerun["verdict"] == "unchanged"
    executed_stages = {stage["name"] for stage in rerun["stages"] if not stage["cached"]}
    assert executed_stages == {"resolve", "registration", "promotion"}
    assert rerun["mlflow"]["model_version"] == "1"


def test_backup_has_finished_items_and_restore_rewrites_addresses(project: Path, backup: Path, tmp_path: Path) -> None:
    old = project / "wd"
    for name in ("mlflow-artifacts", "dvc-remote", "runs"):
        assert list_files(backup / name) == list_files(old / name) != set()
    assert list_files(backup / "store") == {
        file for file in list_files(old / "store") if not file.startswith("unfinished/")
    }
    workdir = restore(backup, tmp_path / "wd")
    with sqlite3.connect(workdir / "mlflow.db") as database:
        uris = [uri for query in URI_QUERIES for (uri,) in database.execute(query)]
    assert len(uris) > len(URI_QUERIES)
    new_prefix = (workdir / "mlflow-artifacts").as_uri()
    assert [uri for uri in uris if not uri.startswith(new_prefix)] == []


URI_QUERIES = (
    "SELECT artifact_location FROM experiments WHERE name = 'tuneline'",
    "SELECT artifact_uri FROM runs",
    "SELECT artifact_location FROM logged_models",
    "SELECT storage_location FROM model_versions WHERE storage_location LIKE 'file:%'",
)


def test_restore_refuses_a_used_folder_and_an_incomplete_backup(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "wd").mkdir()
    (tmp_path / "wd" / "mine").write_text("mine")
    process = run_script("restore.sh", backup, tmp_path / "wd", cwd=tmp_path)
    assert (process.returncode, "is not empty" in process.stderr) == (1, True)
    assert list_files(tmp_path / "wd") == {"mine"}
    incomplete = tmp_path / "20260101T000000Z.part"
    incomplete.mkdir()
    process = run_script("restore.sh", incomplete, tmp_path / "new", cwd=tmp_path)
    assert (process.returncode, "not a complete backup" in process.stderr) == (1, True)
    assert not (tmp_path / "new").exists()


def test_interrupted_backup_keeps_its_part_suffix(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    process = run_script("backup.sh", "wd", tmp_path / "kept", cwd=project, SYNC="false")
    assert process.returncode != 0
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".part"]
    missing = run_script("backup.sh", "nowhere", tmp_path / "kept", cwd=project)
    assert (missing.returncode, "the workdir nowhere does not exist" in missing.stderr) == (1, True)
