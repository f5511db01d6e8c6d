"""Disaster recovery: restore a customization from backups on another database, server and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import postgresql
from tests.engines.production_mlflow import ADMIN, ProductionServer, create_configuration
from tests.pipelines.backup_restore import back_up, check_restored, move_away, restore
from tests.pipelines.command import answer
from tests.pipelines.project import run, write_project

pytestmark = [
    pytest.mark.stress,
    pytest.mark.postgresql,
    pytest.mark.mlflow,
    pytest.mark.pipeline,
    pytest.mark.daft,
    pytest.mark.dvc,
    pytest.mark.triton,
]


def build_credentials(server: ProductionServer) -> dict[str, str]:
    """Return the environment variables of a signed-in user."""
    return {
        "MLFLOW_TRACKING_URI": server.address,
        "MLFLOW_TRACKING_USERNAME": ADMIN[0],
        "MLFLOW_TRACKING_PASSWORD": ADMIN[1],
    }


def run_and_back_up(project: Path, site: Path, backups: Path) -> tuple[dict[str, Any], Path, Path]:
    """Run a customization on a temporary server; return its result and the backups of the server and of the workdir."""
    with postgresql.run_server() as database, create_configuration(database, site).run() as server:
        original = run(project, "wd", **build_credentials(server))
        process = server.run_script("backup.sh", str(backups / "server"))
        assert process.returncode == 0, process.stderr
        return original, Path(process.stdout.strip()), back_up("wd", backups / "work", cwd=project)


def test_customization_is_restored_from_backups_on_another_site(tmp_path: Path) -> None:
    project, old, new = (tmp_path / name for name in ("project", "old", "new"))
    for folder in (project, old, new):
        folder.mkdir()
    original, server_backup, workdir_backup = run_and_back_up(write_project(project), old, tmp_path / "backups")
    with postgresql.run_server() as database, move_away(old), move_away(project / "wd"):
        server = create_configuration(database, new)
        process = server.run_script("restore.sh", str(server_backup))
        assert process.returncode == 0, process.stderr
        workdir = restore(workdir_backup, tmp_path / "elsewhere" / "wd")
        assert not (workdir / "mlflow.db").exists(), "the registry is in PostgreSQL alone"
        with server.run():
            check_restored(original, project, workdir, tmp_path / "rows", **build_credentials(server))
            history = answer(
                "registry",
                "history",
                original["mlflow"]["model_name"],
                "--workdir",
                workdir,
                cwd=project,
                **build_credentials(server),
            )
            assert [entry["kind"] for entry in history["entries"]][-1] == "promote"
