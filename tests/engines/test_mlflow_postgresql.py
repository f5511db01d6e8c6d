"""The registry on an MLflow server as it runs in production: PostgreSQL, users and permissions, backups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import tracking
from components.common.errors import NotWritableError, RegistryError
from components.common.progress import Silent
from components.model_registry import history, patience
from components.model_registry.audit import audit
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Registration, champion, promote, register, rollback
from tests.engines import postgresql
from tests.engines.postgresql import PostgreSQL
from tests.engines.production import ADMIN, Production, configured
from tests.mlflow_server import free_port, mlflow_server
from tests.model_registry.conftest import Customization, Made, Mortal, customize
from tests.model_registry.test_server import check_twenty_at_once

pytestmark = [pytest.mark.postgresql, pytest.mark.mlflow]
__all__ = ["customize"]


@pytest.fixture(scope="module")
def database() -> Iterator[PostgreSQL]:
    with postgresql.serving() as server:
        yield server


@pytest.fixture(scope="module")
def server(database: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server without users."""
    database.do("CREATE DATABASE mlflow")
    with mlflow_server(tmp_path_factory.mktemp("server"), database.store("mlflow")) as address:
        yield address


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    return tracking.connect().MlflowClient()


def registered(made: Made, name: str) -> Registration:
    return register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=name), reporter=Silent())


def test_a_model_is_registered_promoted_rolled_back_and_fetched(client: Any, customize: Customization, tmp_path: Path) -> None:
    one = customize("one")
    two = customize("two", incumbent=one.model.sha256)
    for made in (one, two):
        promote("helper", registered(made, "helper").version, reporter=Silent())
    assert rollback("helper", reporter=Silent()).to == "1"
    assert champion("helper").fetch(tmp_path / "fetched").sha256 == one.model.sha256
    found = audit("helper", reporter=Silent())
    assert (found.clean, found.aliases["champion"]) == (True, "1")


def test_twenty_promotions_at_once_leave_one_champion_and_a_history_without_a_gap(client: Any, server: str) -> None:
    check_twenty_at_once(server, "twenty")


def promoted_and_killed(name: str, version: str, write: int) -> int:
    """Promote in a process that is killed by SIGKILL before its n-th write. Returns how it ended: 0, or minus the signal."""
    child = os.fork()
    if not child:
        whole = patience.Patient
        patience.Patient = lambda client: Mortal(whole(client), write, lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore
        try:
            promote(name, version, force=True, reason="the test", reporter=Silent())
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_between_any_two_steps_leaves_the_old_or_the_new_champion_and_a_clean_audit(client: Any, customize: Customization) -> None:
    versions = [registered(customize(content), "killed").version for content in ("three", "four")]
    promote("killed", versions[0], reporter=Silent())
    ended, write, seen = -signal.SIGKILL, 0, set()
    while ended:
        to = versions[1] if champion("killed").version == versions[0] else versions[0]
        ended = promoted_and_killed("killed", to, write)
        assert ended in (0, -signal.SIGKILL)
        seen.add(champion("killed").version == to)
        assert champion("killed").version in versions
        found = audit("killed", reporter=Silent())
        assert (found.clean, found.findings) == (True, [])
        write += 1
    assert write > 6
    assert seen == {True, False}
    promote("killed", versions[0], force=True, reason="the last", reporter=Silent())
    found = audit("killed", reporter=Silent())
    assert (found.clean, found.notes) == (True, [])
    moves = history.moves(history.read(client, "killed"), "champion")
    assert [move.from_ for move in moves] == [None, *(move.to for move in moves[:-1])]


def test_a_read_only_database_is_told_at_once_and_the_champion_stays(client: Any, database: PostgreSQL, customize: Customization) -> None:
    one, two = customize("five"), customize("six")
    promote("kept", registered(one, "kept").version, reporter=Silent())
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'mlflow'"
    database.do("ALTER DATABASE mlflow SET default_transaction_read_only = on", end)
    try:
        with pytest.raises(NotWritableError, match="its database is read-only"):
            registered(two, "kept")
        with pytest.raises(NotWritableError, match="its database is read-only"):
            promote("kept", "1", alias="staging", force=True, reason="the test", reporter=Silent())
        assert champion("kept").version == "1"
    finally:
        database.do("ALTER DATABASE mlflow SET default_transaction_read_only = off", end)
    assert registered(two, "kept").version == "2"
    assert audit("kept", reporter=Silent()).clean


def test_a_database_that_breaks_off_every_connection_once_is_waited_for(
    client: Any, database: PostgreSQL, customize: Customization
) -> None:
    made = customize("seven")
    database.do("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'mlflow'")
    assert registered(made, "broken").version == "1"


@pytest.fixture(scope="module")
def production(database: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    """The configuration of mlflow/ as it stands, but for addresses, places and the number of workers."""
    folder = tmp_path_factory.mktemp("production")
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "kept.txt").write_text("an artifact")
    with configured(database, folder).started() as running_server:
        yield running_server


def sign_in(monkeypatch: pytest.MonkeyPatch, name: str, password: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


def new_user(production: Production, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[str, str]:
    from mlflow.server.auth.client import AuthServiceClient

    sign_in(monkeypatch, *ADMIN)
    password = f"the-password-of-{name}"
    AuthServiceClient(production.address).create_user(name, password)
    return name, password


def test_who_may_not_is_told_what_to_ask_for_and_leaves_nothing_behind(
    production: Production, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", production.address)
    made = customize("eight")
    sign_in(monkeypatch, "nobody", "whatever")
    with pytest.raises(RegistryError, match="does not know you") as unknown:
        registered(made, "guarded")
    assert "MLFLOW_TRACKING_USERNAME" in unknown.value.hint

    pipeline = new_user(production, monkeypatch, "pipeline")
    owner = new_user(production, monkeypatch, "owner")
    sign_in(monkeypatch, *pipeline)
    assert registered(made, "guarded").version == "1"

    sign_in(monkeypatch, *owner)
    with pytest.raises(RegistryError, match="does not permit this") as refused:
        promote("guarded", "1", reporter=Silent())
    assert "EDIT" in refused.value.hint
    assert champion("guarded") is None
    assert audit("guarded", reporter=Silent()).clean, "who only reads may audit"

    granted = production.script("grant.sh", "guarded", "owner", "EDIT")
    assert granted.returncode == 0, granted.stderr
    assert promote("guarded", "1", reporter=Silent()).to == "1"
    assert history.read(tracking.connect().MlflowClient(), "guarded")[-1].account == "owner"
    assert audit("guarded", reporter=Silent()).clean


def test_health_tells_a_server_that_works_from_one_that_does_not(production: Production) -> None:
    assert production.script("health.sh").returncode == 0
    wrong = production.script("health.sh", user=("admin", "wrong"))
    assert (wrong.returncode, "does not let this user in" in wrong.stdout) == (1, True)
    away = Production(f"http://127.0.0.1:{free_port()}", production.folder, production.environment).script("health.sh")
    assert (away.returncode, "does not answer" in away.stdout) == (1, True)


def test_a_backup_holds_both_databases_and_the_artifacts(production: Production, database: PostgreSQL, tmp_path: Path) -> None:
    done = production.script("backup.sh", str(tmp_path / "backups"))
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {"mlflow.dump", "mlflow.list", "mlflow_auth.dump", "mlflow_auth.list"}
    assert (tmp_path / "backups" / "artifacts" / "kept.txt").read_text() == "an artifact"
    database.do("CREATE DATABASE restored")
    command = [postgresql.program("pg_restore"), "--exit-on-error", "-d", database.address("restored"), folder / "mlflow.dump"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_where_one_database_holds_something_or_is_missing_neither_is_restored(
    production: Production, database: PostgreSQL, tmp_path: Path
) -> None:
    done = production.script("backup.sh", str(tmp_path / "backups"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "new").mkdir()
    database.do('DROP DATABASE IF EXISTS "production-2"', 'DROP DATABASE IF EXISTS "production-2_auth"')
    elsewhere = Production(production.address, tmp_path / "new", _renamed(production, tmp_path / "new"))
    database.do('CREATE DATABASE "production-2"')
    missing = elsewhere.script("restore.sh", done.stdout.strip())
    assert (missing.returncode, 'CREATE DATABASE "production-2_auth" OWNER "mlflow";' in missing.stderr) == (1, True), missing.stderr
    assert _tables(database, "production-2") == []
    database.do('CREATE DATABASE "production-2_auth"')
    _do(database, "production-2_auth", "CREATE TABLE of_a_newer_version ()")
    occupied = elsewhere.script("restore.sh", done.stdout.strip())
    assert (occupied.returncode, 'DROP DATABASE IF EXISTS "production-2_auth"' in occupied.stderr) == (1, True), occupied.stderr
    assert (_tables(database, "production-2"), (tmp_path / "new" / "artifacts").exists()) == ([], False)
    (said,) = re.findall(r"(DROP DATABASE .*?;) (CREATE DATABASE .*?;)", occupied.stderr)
    database.do(*said)
    whole = elsewhere.script("restore.sh", done.stdout.strip())
    assert whole.returncode == 0, whole.stderr
    assert "registered_models" in _tables(database, "production-2")
    assert (tmp_path / "new" / "artifacts" / "kept.txt").read_text() == "an artifact"


def _renamed(production: Production, folder: Path) -> dict[str, str]:
    """The environment of the same site, with other databases and another folder of artifacts."""
    for name in ("server.env", "basic_auth.ini"):
        text = (production.folder / name).read_text().replace(str(production.folder), str(folder))
        (folder / name).write_text(re.sub(r"/production(_auth)?$", r"/production-2\1", text, flags=re.MULTILINE))
    return {**production.environment, "MLFLOW_ENV": str(folder / "server.env"), "AUTH_INI": str(folder / "basic_auth.ini")}


def _do(database: PostgreSQL, name: str, statement: str) -> list[tuple[Any, ...]]:
    import psycopg2

    with psycopg2.connect(database.address(name)) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def _tables(database: PostgreSQL, name: str) -> list[str]:
    return [table for (table,) in _do(database, name, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
