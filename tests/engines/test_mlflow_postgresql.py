"""The registry on a production MLflow server: PostgreSQL, users and permissions, backups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import NotWritableError, RegistryError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import mlflow_retry, registry_history
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import audit
from components.model_registry.stage import Registration, find_champion, promote, register, rollback
from tests.engines import postgresql
from tests.engines.postgresql import PostgreSQL
from tests.engines.production_mlflow import ADMIN, ProductionServer, create_configuration
from tests.mlflow_server import free_port, mlflow_server
from tests.model_registry.conftest import Customization, CustomizationArtifacts, KillableClient, customize
from tests.model_registry.test_server import check_concurrent_promotions

pytestmark = [pytest.mark.postgresql, pytest.mark.mlflow]
__all__ = ["customize"]


@pytest.fixture(scope="module")
def database() -> Iterator[PostgreSQL]:
    with postgresql.run_server() as server:
        yield server


@pytest.fixture(scope="module")
def server_url(database: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server without users."""
    database.execute("CREATE DATABASE mlflow")
    with mlflow_server(tmp_path_factory.mktemp("server"), database.mlflow_address("mlflow")) as address:
        yield address


@pytest.fixture
def client(server_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_url)
    return mlflow_tracking.connect().MlflowClient()


def register_artifacts(artifacts: CustomizationArtifacts, name: str) -> Registration:
    return register(
        artifacts.model,
        artifacts.evaluation,
        artifacts.repository,
        ModelRegistryConfig(name=name),
        reporter=SilentReporter(),
    )


def test_register_promote_roll_back_and_fetch(client: Any, customize: Customization, tmp_path: Path) -> None:
    first = customize("one")
    second = customize("two", incumbent=first.model.sha256)
    for artifacts in (first, second):
        promote("helper", register_artifacts(artifacts, "helper").version, reporter=SilentReporter())
    assert rollback("helper", reporter=SilentReporter()).to == "1"
    assert find_champion("helper").fetch(tmp_path / "fetched").sha256 == first.model.sha256
    result = audit("helper", reporter=SilentReporter())
    assert (result.clean, result.aliases["champion"]) == (True, "1")


def test_concurrent_promotions_leave_one_champion_and_gapless_history(client: Any, server_url: str) -> None:
    check_concurrent_promotions(server_url, "twenty")


def promote_and_kill(name: str, version: str, write: int) -> int:
    """Promote in a process that SIGKILL ends before its n-th write. Return 0 or the negative signal number."""
    child = os.fork()
    if not child:
        client_class = mlflow_retry.RetryingClient
        mlflow_retry.RetryingClient = lambda client: KillableClient(
            client_class(client), write, lambda: os.kill(os.getpid(), signal.SIGKILL)
        )  # type: ignore
        try:
            promote(name, version, force=True, reason="the test", reporter=SilentReporter())
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_promotion_leaves_a_valid_champion_and_clean_audit(client: Any, customize: Customization) -> None:
    versions = [register_artifacts(customize(content), "killed").version for content in ("three", "four")]
    promote("killed", versions[0], reporter=SilentReporter())
    exit_code, write, outcomes = -signal.SIGKILL, 0, set()
    while exit_code:
        target = versions[1] if find_champion("killed").version == versions[0] else versions[0]
        exit_code = promote_and_kill("killed", target, write)
        assert exit_code in (0, -signal.SIGKILL)
        outcomes.add(find_champion("killed").version == target)
        assert find_champion("killed").version in versions
        result = audit("killed", reporter=SilentReporter())
        assert (result.clean, result.findings) == (True, [])
        write += 1
    assert write > 6
    assert outcomes == {True, False}
    promote("killed", versions[0], force=True, reason="the last", reporter=SilentReporter())
    result = audit("killed", reporter=SilentReporter())
    assert (result.clean, result.notes) == (True, [])
    moves = registry_history.list_completed_moves(registry_history.read(client, "killed"), "champion")
    assert [move.from_ for move in moves] == [None, *(move.to for move in moves[:-1])]


def test_read_only_database_is_reported_and_champion_is_unchanged(
    client: Any, database: PostgreSQL, customize: Customization
) -> None:
    first, second = customize("five"), customize("six")
    promote("kept", register_artifacts(first, "kept").version, reporter=SilentReporter())
    end_sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'mlflow'"
    database.execute("ALTER DATABASE mlflow SET default_transaction_read_only = on", end_sessions)
    try:
        with pytest.raises(NotWritableError, match="its database is read-only"):
            register_artifacts(second, "kept")
        with pytest.raises(NotWritableError, match="its database is read-only"):
            promote("kept", "1", alias="staging", force=True, reason="the test", reporter=SilentReporter())
        assert find_champion("kept").version == "1"
    finally:
        database.execute("ALTER DATABASE mlflow SET default_transaction_read_only = off", end_sessions)
    assert register_artifacts(second, "kept").version == "2"
    assert audit("kept", reporter=SilentReporter()).clean


def test_registration_retries_after_dropped_database_connections(
    client: Any, database: PostgreSQL, customize: Customization
) -> None:
    artifacts = customize("seven")
    database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'mlflow'")
    assert register_artifacts(artifacts, "broken").version == "1"


@pytest.fixture(scope="module")
def production_server(database: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProductionServer]:
    """A server with the configuration of mlflow/ and one stored artifact."""
    folder = tmp_path_factory.mktemp("production")
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "kept.txt").write_text("an artifact")
    with create_configuration(database, folder).run() as server:
        yield server


def set_credentials(monkeypatch: pytest.MonkeyPatch, name: str, password: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


def create_user(production_server: ProductionServer, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[str, str]:
    from mlflow.server.auth.client import AuthServiceClient

    set_credentials(monkeypatch, *ADMIN)
    password = f"the-password-of-{name}"
    AuthServiceClient(production_server.address).create_user(name, password)
    return name, password


def test_missing_permission_is_reported_and_nothing_is_written(
    production_server: ProductionServer, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", production_server.address)
    artifacts = customize("eight")
    set_credentials(monkeypatch, "nobody", "whatever")
    with pytest.raises(RegistryError, match="rejected the credentials") as error:
        register_artifacts(artifacts, "guarded")
    assert "MLFLOW_TRACKING_USERNAME" in error.value.hint

    pipeline = create_user(production_server, monkeypatch, "pipeline")
    owner = create_user(production_server, monkeypatch, "owner")
    set_credentials(monkeypatch, *pipeline)
    assert register_artifacts(artifacts, "guarded").version == "1"

    set_credentials(monkeypatch, *owner)
    with pytest.raises(RegistryError, match="denied the request") as error:
        promote("guarded", "1", reporter=SilentReporter())
    assert "EDIT" in error.value.hint
    assert find_champion("guarded") is None
    assert audit("guarded", reporter=SilentReporter()).clean, "read permission suffices for an audit"

    process = production_server.run_script("grant.sh", "guarded", "owner", "EDIT")
    assert process.returncode == 0, process.stderr
    assert promote("guarded", "1", reporter=SilentReporter()).to == "1"
    assert registry_history.read(mlflow_tracking.connect().MlflowClient(), "guarded")[-1].account == "owner"
    assert audit("guarded", reporter=SilentReporter()).clean


def test_health_script_reports_wrong_password_and_missing_server(production_server: ProductionServer) -> None:
    assert production_server.run_script("health.sh").returncode == 0
    wrong_password = production_server.run_script("health.sh", user=("admin", "wrong"))
    assert (wrong_password.returncode, "rejects this user" in wrong_password.stdout) == (1, True)
    no_server = ProductionServer(
        f"http://127.0.0.1:{free_port()}", production_server.folder, production_server.environment
    ).run_script("health.sh")
    assert (no_server.returncode, "does not answer" in no_server.stdout) == (1, True)


def test_backup_contains_both_databases_and_the_artifacts(
    production_server: ProductionServer, database: PostgreSQL, tmp_path: Path
) -> None:
    process = production_server.run_script("backup.sh", str(tmp_path / "backups"))
    assert process.returncode == 0, process.stderr
    folder = Path(process.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {
        "mlflow.dump",
        "mlflow.list",
        "mlflow_auth.dump",
        "mlflow_auth.list",
    }
    assert (tmp_path / "backups" / "artifacts" / "kept.txt").read_text() == "an artifact"
    database.execute("CREATE DATABASE restored")
    command = [
        postgresql.find_program("pg_restore"),
        "--exit-on-error",
        "-d",
        database.address("restored"),
        folder / "mlflow.dump",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_restore_requires_both_databases_to_exist_and_be_empty(
    production_server: ProductionServer, database: PostgreSQL, tmp_path: Path
) -> None:
    process = production_server.run_script("backup.sh", str(tmp_path / "backups"))
    assert process.returncode == 0, process.stderr
    (tmp_path / "new").mkdir()
    database.execute('DROP DATABASE IF EXISTS "production-2"', 'DROP DATABASE IF EXISTS "production-2_auth"')
    target = ProductionServer(
        production_server.address, tmp_path / "new", _copy_configuration(production_server, tmp_path / "new")
    )
    database.execute('CREATE DATABASE "production-2"')
    missing = target.run_script("restore.sh", process.stdout.strip())
    assert (missing.returncode, 'CREATE DATABASE "production-2_auth" OWNER "mlflow";' in missing.stderr) == (1, True), (
        missing.stderr
    )
    assert _list_tables(database, "production-2") == []
    database.execute('CREATE DATABASE "production-2_auth"')
    _execute(database, "production-2_auth", "CREATE TABLE of_a_newer_version ()")
    occupied = target.run_script("restore.sh", process.stdout.strip())
    assert (occupied.returncode, 'DROP DATABASE IF EXISTS "production-2_auth"' in occupied.stderr) == (1, True), (
        occupied.stderr
    )
    assert (_list_tables(database, "production-2"), (tmp_path / "new" / "artifacts").exists()) == ([], False)
    (statements,) = re.findall(r"(DROP DATABASE .*?;) (CREATE DATABASE .*?;)", occupied.stderr)
    database.execute(*statements)
    restored = target.run_script("restore.sh", process.stdout.strip())
    assert restored.returncode == 0, restored.stderr
    assert "registered_models" in _list_tables(database, "production-2")
    assert (tmp_path / "new" / "artifacts" / "kept.txt").read_text() == "an artifact"


def _copy_configuration(production_server: ProductionServer, folder: Path) -> dict[str, str]:
    """Copy the configuration for other databases and another artifact folder; return the environment of the scripts."""
    for name in ("server.env", "basic_auth.ini"):
        text = (production_server.folder / name).read_text().replace(str(production_server.folder), str(folder))
        (folder / name).write_text(re.sub(r"/production(_auth)?$", r"/production-2\1", text, flags=re.MULTILINE))
    return {
        **production_server.environment,
        "MLFLOW_ENV": str(folder / "server.env"),
        "AUTH_INI": str(folder / "basic_auth.ini"),
    }


def _execute(database: PostgreSQL, name: str, statement: str) -> list[tuple[Any, ...]]:
    import psycopg2

    with psycopg2.connect(database.address(name)) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def _list_tables(database: PostgreSQL, name: str) -> list[str]:
    return [
        table for (table,) in _execute(database, name, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    ]
