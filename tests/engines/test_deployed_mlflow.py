"""The backup pod of deploy/ against a real PostgreSQL that runs with the arguments of its pod: TLS with host name verification."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import DEPLOY, render_overlay, select_kind
from tests.deploy.test_mlflow import find_container, write_config
from tests.engines import postgresql
from tests.engines.postgresql import PostgreSQL

pytestmark = pytest.mark.postgresql
NAME = "postgresql.mlflow.svc"
OVERLAY = "xe9680-powerscale"


def create_certificate(folder: Path, name: str) -> None:
    """Create tls.key and tls.crt with the command of deploy/README.md, for another host name."""
    (command,) = re.findall(r"^openssl req .*$", (DEPLOY / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(["sh", "-c", command.replace(NAME, name)], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def tls() -> Iterator[Path]:
    """A folder like the secret's volume: files owned by root and readable by the server's group."""
    folder = Path(tempfile.mkdtemp(prefix="tuneline-tls-"))
    folder.chmod(0o755)
    create_certificate(folder, "localhost")
    user_options = postgresql.build_unprivileged_user_options(folder)
    (folder / "tls.key").chmod(0o440 if user_options else 0o400)
    if user_options:
        os.chown(folder / "tls.key", 0, user_options["group"])
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def database(tls: Path) -> Iterator[PostgreSQL]:
    stateful = select_kind(render_overlay(OVERLAY), "StatefulSet", "mlflow")["postgresql"]
    arguments = [
        item.replace("/tls/", f"{tls}/") for item in stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    ]
    init = select_kind(render_overlay(OVERLAY), "ConfigMap", "mlflow")["postgresql-init"]["data"]["users.sql"]
    with postgresql.run_server(*arguments) as server:
        server.execute("CREATE DATABASE mlflow", init)
        yield server


def run_script(
    script: str, argument: str, database: PostgreSQL, authority: Path, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a script as the CronJob's container does, with its volumes below `folder`."""
    write_config(OVERLAY, folder)
    for name in ("secrets/postgresql", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(authority, folder / "secrets" / "postgresql" / "ca.crt")
    backup = find_container(OVERLAY, "CronJob", "mlflow-backup")
    env: dict[str, Any] = {item["name"]: item.get("value", "a-password") for item in backup["env"]}
    env |= {
        "POSTGRESQL": f"localhost:{database.port}",
        "MLFLOW_ENV": str(folder / "cluster.env"),
        "CONFIG": str(folder),
    }
    env |= {"SECRETS": str(folder / "secrets"), "TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    env["PATH"] = os.pathsep.join([*postgresql.list_program_folders(), os.environ["PATH"]])
    command = ["sh", str(folder / script), argument]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def run_backup(database: PostgreSQL, authority: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_script("backup.sh", str(folder / "kept"), database, authority, folder)


def test_nightly_backup_over_tls_can_be_restored(database: PostgreSQL, tls: Path, tmp_path: Path) -> None:
    import psycopg2

    with psycopg2.connect(database.address("mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    process = run_backup(database, tls / "tls.crt", tmp_path)
    assert process.returncode == 0, process.stderr
    folder = Path(process.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {
        "mlflow.dump",
        "mlflow.list",
        "mlflow_auth.dump",
        "mlflow_auth.list",
    }
    with psycopg2.connect(database.address("mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE kept")
    restored = run_script("restore.sh", str(folder), database, tls / "tls.crt", tmp_path)
    assert restored.returncode == 0, restored.stderr
    with psycopg2.connect(database.address("mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT answer FROM kept")
        assert cursor.fetchall() == [(42,)]


def test_backup_rejects_database_of_another_authority(database: PostgreSQL, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    create_certificate(tmp_path / "other", "localhost")
    process = run_backup(database, tmp_path / "other" / "tls.crt", tmp_path)
    assert process.returncode != 0
    assert "certificate verify failed" in process.stderr
    assert [path.name for path in (tmp_path / "kept").iterdir() if path.suffix != ".part"] == []
