"""The backup of deploy/ as its pod runs it, against a real PostgreSQL started as its own pod starts it: with TLS, and the name checked."""

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

from tests.deploy.rendering import DEPLOY, of_kind, rendered
from tests.deploy.test_mlflow import config, container
from tests.engines import postgresql
from tests.engines.postgresql import PostgreSQL

pytestmark = pytest.mark.postgresql
NAME = "postgresql.mlflow.svc"
OVERLAY = "xe9680-powerscale"


def certificate(folder: Path, name: str) -> None:
    """tls.key and tls.crt by the command of deploy/README.md, for another name."""
    (command,) = re.findall(r"^openssl req .*$", (DEPLOY / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(["sh", "-c", command.replace(NAME, name)], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def tls() -> Iterator[Path]:
    """A folder like the secret's volume: its files belong to root and to the group of the server, who may read them."""
    folder = Path(tempfile.mkdtemp(prefix="tuneline-tls-"))
    folder.chmod(0o755)
    certificate(folder, "localhost")
    who = postgresql._unprivileged(folder)
    (folder / "tls.key").chmod(0o440 if who else 0o400)
    if who:
        os.chown(folder / "tls.key", 0, who["group"])
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def database(tls: Path) -> Iterator[PostgreSQL]:
    stateful = of_kind(rendered(OVERLAY), "StatefulSet", "mlflow")["postgresql"]
    said = [one.replace("/tls/", f"{tls}/") for one in stateful["spec"]["template"]["spec"]["containers"][0]["args"]]
    init = of_kind(rendered(OVERLAY), "ConfigMap", "mlflow")["postgresql-init"]["data"]["users.sql"]
    with postgresql.serving(*said) as server:
        server.do("CREATE DATABASE mlflow", init)
        yield server


def performed(script: str, argument: str, database: PostgreSQL, authority: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """One run of the CronJob's container, or of another script in it. A folder below `folder` is its volume."""
    config(OVERLAY, folder)
    for name in ("secrets/postgresql", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(authority, folder / "secrets" / "postgresql" / "ca.crt")
    backup = container(OVERLAY, "CronJob", "mlflow-backup")
    given: dict[str, Any] = {one["name"]: one.get("value", "a-password") for one in backup["env"]}
    given |= {"POSTGRESQL": f"localhost:{database.port}", "MLFLOW_ENV": str(folder / "cluster.env"), "CONFIG": str(folder)}
    given |= {"SECRETS": str(folder / "secrets"), "TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    given["PATH"] = os.pathsep.join([*postgresql.folders(), os.environ["PATH"]])
    command = ["sh", str(folder / script), argument]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)


def backed_up(database: PostgreSQL, authority: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return performed("backup.sh", str(folder / "kept"), database, authority, folder)


def test_the_nightly_backup_reaches_the_database_over_tls_and_its_pod_restores_it(database: PostgreSQL, tls: Path, tmp_path: Path) -> None:
    import psycopg2

    with psycopg2.connect(database.address("mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    done = backed_up(database, tls / "tls.crt", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {"mlflow.dump", "mlflow.list", "mlflow_auth.dump", "mlflow_auth.list"}
    with psycopg2.connect(database.address("mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE kept")
    restored = performed("restore.sh", str(folder), database, tls / "tls.crt", tmp_path)
    assert restored.returncode == 0, restored.stderr
    with psycopg2.connect(database.address("mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT answer FROM kept")
        assert cursor.fetchall() == [(42,)]


def test_a_database_that_another_authority_vouches_for_is_not_believed_and_no_backup_looks_whole(
    database: PostgreSQL, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    certificate(tmp_path / "other", "localhost")
    done = backed_up(database, tmp_path / "other" / "tls.crt", tmp_path)
    assert done.returncode != 0
    assert "certificate verify failed" in done.stderr
    assert [path.name for path in (tmp_path / "kept").iterdir() if path.suffix != ".part"] == []
