"""A work folder comes back from its backup: at another place, with the old one gone."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.project import run
from tests.pipelines.restoring import away, backed_up, check_restored, files, restored, script

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton, pytest.mark.stress]


@pytest.fixture(scope="module")
def backup(first: dict[str, Any], project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (project / "wd" / "store" / "unfinished" / "job.elsewhere.1.2").mkdir(parents=True)
    (project / "wd" / "store" / "unfinished" / "job.elsewhere.1.2" / "half").write_text("half an artifact")
    return backed_up("wd", tmp_path_factory.mktemp("backups"), cwd=project)


def test_lineage_audit_rows_and_serving_work_where_a_backup_was_restored_and_a_run_finds_all_of_it_made(
    first: dict[str, Any], project: Path, backup: Path, tmp_path: Path
) -> None:
    with away(project / "wd"):
        workdir = restored(backup, tmp_path / "an other place" / "wd")  # which Triton's own shell would take for three
        check_restored(first, project, workdir, tmp_path / "rows")
        again = run(project, str(workdir))
    assert again["verdict"] == "unchanged"
    made = {stage["name"] for stage in again["stages"] if not stage["cached"]}
    assert made == {"resolve", "registration", "promotion"}
    assert again["mlflow"]["model_version"] == "1"


def test_a_backup_holds_what_was_made_and_nothing_half_made_and_no_address_of_the_old_place_stays(
    project: Path, backup: Path, tmp_path: Path
) -> None:
    old = project / "wd"
    for name in ("mlflow-artifacts", "dvc-remote", "runs"):
        assert files(backup / name) == files(old / name) != set()
    assert files(backup / "store") == {file for file in files(old / "store") if not file.startswith("unfinished/")}
    workdir = restored(backup, tmp_path / "wd")
    with sqlite3.connect(workdir / "mlflow.db") as database:
        places = [place for query in PLACES for (place,) in database.execute(query)]
    assert len(places) > len(PLACES)
    new = (workdir / "mlflow-artifacts").as_uri()
    assert [place for place in places if not place.startswith(new)] == []


PLACES = (
    "SELECT artifact_location FROM experiments WHERE name = 'tuneline'",
    "SELECT artifact_uri FROM runs",
    "SELECT artifact_location FROM logged_models",
    "SELECT storage_location FROM model_versions WHERE storage_location LIKE 'file:%'",
)


def test_what_is_there_is_never_restored_over_and_half_a_backup_is_refused(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "wd").mkdir()
    (tmp_path / "wd" / "mine").write_text("mine")
    done = script("restore.sh", backup, tmp_path / "wd", cwd=tmp_path)
    assert (done.returncode, "is not empty" in done.stderr) == (1, True)
    assert files(tmp_path / "wd") == {"mine"}
    half = tmp_path / "20260101T000000Z.part"
    half.mkdir()
    done = script("restore.sh", half, tmp_path / "new", cwd=tmp_path)
    assert (done.returncode, "no whole backup" in done.stderr) == (1, True)
    assert not (tmp_path / "new").exists()


def test_a_backup_that_breaks_off_does_not_look_like_one(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    done = script("backup.sh", "wd", tmp_path / "kept", cwd=project, SYNC="false")
    assert done.returncode != 0
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".part"]
    none = script("backup.sh", "nowhere", tmp_path / "kept", cwd=project)
    assert (none.returncode, "no work folder nowhere" in none.stderr) == (1, True)
