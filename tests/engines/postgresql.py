"""A real PostgreSQL for tests: Debian's package, on a port and in a folder of its own, ended by its process id.

The server refuses to run as root; there it runs as the user `postgres`, or as `nobody`.
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

PROGRAMS = ("initdb", "postgres", "pg_dump")
READY_WITHIN = 60.0  # seconds
OWNER = "mlflow"
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=100", "listen_addresses=127.0.0.1")


def folders() -> list[str]:
    """Where Debian keeps the programs, the newest version first."""
    return sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)


def program(name: str) -> str:
    """The path of one of PostgreSQL's programs, all of them of one version."""
    found = shutil.which(name, path=os.pathsep.join([*folders(), os.environ.get("PATH", "")]))
    assert found, f"{name} is missing: install Debian's package postgresql"
    return found


@dataclass(frozen=True)
class PostgreSQL:
    """Where the server listens. Everyone on this machine is let in as the owner of all databases."""

    port: int

    def address(self, database: str) -> str:
        """The address of a database."""
        return f"postgresql://{OWNER}@127.0.0.1:{self.port}/{database}"

    def store(self, database: str) -> str:
        """The address of a database as MLflow takes it, with the driver."""
        return self.address(database).replace("postgresql:", "postgresql+psycopg2:")

    def do(self, *statements: str) -> None:
        """Run statements, each for itself."""
        import psycopg2

        connection = psycopg2.connect(self.address("postgres"))
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        connection.close()


@contextmanager
def serving(*more: str) -> Iterator[PostgreSQL]:
    """Start a server with nothing in it but its own databases. `more` are further arguments."""
    folder = Path(tempfile.mkdtemp(prefix="tuneline-postgresql-"))  # one that another user may enter, unlike pytest's
    who = _unprivileged(folder)
    try:
        made = [program("initdb"), "-D", folder / "data", "-U", OWNER, "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run(made, cwd=folder, check=True, capture_output=True, **who)
        port = free_port()
        settings = [part for setting in FAST for part in ("-c", setting)]
        command = [program("postgres"), "-D", folder / "data", "-p", str(port), "-k", folder, *settings, *more]
        with (folder / "server.log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True, **who)
        try:
            found = PostgreSQL(port)
            _wait(server, found, folder / "server.log")
            yield found
        finally:
            server.send_signal(signal.SIGQUIT)  # at once; its children end with it
            server.wait(timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """How to start a process as somebody else than root, who then owns the folder."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _wait(server: subprocess.Popen[bytes], found: PostgreSQL, log: Path) -> None:
    import psycopg2

    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end and server.poll() is None:
        try:
            found.do("SELECT 1")
            return
        except psycopg2.OperationalError:
            time.sleep(0.1)
    raise AssertionError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')[-3000:]}")
