"""A real PostgreSQL server for tests, from Debian's package, on a free port and with a temporary data folder.

PostgreSQL refuses to run as root; as root, the tests start it as the user `postgres` or `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mlflow_server import free_port

REQUIRED_PROGRAMS = ("initdb", "postgres", "pg_dump")
START_TIMEOUT_SECONDS = 60.0
OWNER = "mlflow"
FAST_SETTINGS = (
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "max_connections=100",
    "listen_addresses=127.0.0.1",
)


def list_program_folders() -> list[str]:
    """Return the folders of Debian's PostgreSQL programs, newest version first."""
    return sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)


def find_program(name: str) -> str:
    """Return the path of a PostgreSQL program, from the same version for all programs."""
    path = shutil.which(name, path=os.pathsep.join([*list_program_folders(), os.environ.get("PATH", "")]))
    assert path, f"{name} is missing: install Debian's package postgresql"
    return path


@dataclass(frozen=True)
class PostgreSQL:
    """A running server. Local users connect as the owner of all databases without a password."""

    port: int

    def address(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{OWNER}@127.0.0.1:{self.port}/{database}"

    def mlflow_address(self, database: str) -> str:
        """Return the URL of a database for MLflow, with the driver."""
        return self.address(database).replace("postgresql:", "postgresql+psycopg2:")

    def execute(self, *statements: str) -> None:
        """Run statements, each in its own transaction."""
        import psycopg2

        connection = psycopg2.connect(self.address("postgres"))
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        connection.close()


@contextmanager
def run_server(*extra_arguments: str) -> Iterator[PostgreSQL]:
    """Start a server without user databases; `extra_arguments` are passed to it."""
    folder = Path(tempfile.mkdtemp(prefix="tuneline-postgresql-"))  # readable by other users, unlike pytest's folders
    user_options = build_unprivileged_user_options(folder)
    try:
        initdb_command = [
            find_program("initdb"),
            "-D",
            folder / "data",
            "-U",
            OWNER,
            "--auth=trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        subprocess.run(initdb_command, cwd=folder, check=True, capture_output=True, **user_options)
        port = free_port()
        settings = [argument for setting in FAST_SETTINGS for argument in ("-c", setting)]
        command = [
            find_program("postgres"),
            "-D",
            folder / "data",
            "-p",
            str(port),
            "-k",
            folder,
            *settings,
            *extra_arguments,
        ]
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, start_new_session=True, **user_options
            )
        try:
            postgresql = PostgreSQL(port)
            _wait_until_ready(process, postgresql, folder / "server.log")
            yield postgresql
        finally:
            process.send_signal(signal.SIGQUIT)  # immediate shutdown, which also stops its children
            process.wait(timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_unprivileged_user_options(folder: Path) -> dict[str, Any]:
    """Return Popen options that drop root privileges, and give the folder to that user."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _wait_until_ready(process: subprocess.Popen[bytes], postgresql: PostgreSQL, log: Path) -> None:
    import psycopg2

    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            postgresql.execute("SELECT 1")
            return
        except psycopg2.OperationalError:
            time.sleep(0.1)
    raise AssertionError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')[-3000:]}")
