"""A customization on PostgreSQL is lost with its machine and comes back from the backups, on another database, server and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import postgresql
from tests.engines.production import ADMIN, Production, configured
from tests.pipelines.command import answer
from tests.pipelines.project import run, write_project
from tests.pipelines.restoring import away, backed_up, check_restored, restored

pytestmark = [pytest.mark.postgresql, pytest.mark.mlflow, pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.triton]


def signed_in(server: Production) -> dict[str, str]:
    """What a user of the server has in the environment."""
    return {"MLFLOW_TRACKING_URI": server.address, "MLFLOW_TRACKING_USERNAME": ADMIN[0], "MLFLOW_TRACKING_PASSWORD": ADMIN[1]}


def customized_and_backed_up(project: Path, site: Path, backups: Path) -> tuple[dict[str, Any], Path, Path]:
    """The object of a whole run on a server of its own; the backups of that server and of the work folder. Then all servers are gone."""
    with postgresql.serving() as database, configured(database, site).started() as server:
        first = run(project, "wd", **signed_in(server))
        done = server.script("backup.sh", str(backups / "server"))
        assert done.returncode == 0, done.stderr
        return first, Path(done.stdout.strip()), backed_up("wd", backups / "work", cwd=project)


def test_registry_data_repository_and_store_come_back_from_their_backups_where_nothing_was(tmp_path: Path) -> None:
    project, old, new = (tmp_path / name for name in ("project", "old", "new"))
    for folder in (project, old, new):
        folder.mkdir()
    first, of_server, of_work = customized_and_backed_up(write_project(project), old, tmp_path / "backups")
    with postgresql.serving() as database, away(old), away(project / "wd"):
        server = configured(database, new)
        done = server.script("restore.sh", str(of_server))
        assert done.returncode == 0, done.stderr
        workdir = restored(of_work, tmp_path / "elsewhere" / "wd")
        assert not (workdir / "mlflow.db").exists(), "the registry is in PostgreSQL alone"
        with server.started():
            check_restored(first, project, workdir, tmp_path / "rows", **signed_in(server))
            history = answer("registry", "history", first["mlflow"]["model_name"], "--workdir", workdir, cwd=project, **signed_in(server))
            assert [entry["kind"] for entry in history["entries"]][-1] == "promote"
