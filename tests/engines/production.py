"""An MLflow server with the configuration and the scripts of mlflow/, as it runs in production: PostgreSQL, users, artifacts of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engines import postgresql
from tests.engines.postgresql import PostgreSQL
from tests.mlflow_server import free_port, running
from tests.pipelines.command import ROOT

ADMIN = ("admin", "a-password-of-nobody")


@dataclass(frozen=True)
class Production:
    """A server with its configuration in a folder, and what the scripts find in their environment."""

    address: str
    folder: Path
    environment: dict[str, str]

    @contextmanager
    def started(self) -> Iterator[Production]:
        """Run the server, by mlflow/serve.sh."""
        with running(["sh", ROOT / "mlflow" / "serve.sh"], self.address, self.folder, self.environment):
            yield self

    def script(self, name: str, *arguments: str, user: tuple[str, str] = ADMIN) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts as its users do."""
        netrc = self.folder / "netrc"
        netrc.write_text(f"machine 127.0.0.1 login {user[0]} password {user[1]}\n")
        given = {**self.environment, "MLFLOW_TRACKING_URI": self.address, "NETRC": str(netrc), "SYNC": "cp -r"}
        command = ["sh", str(ROOT / "mlflow" / name), *arguments]
        return subprocess.run(command, cwd=self.folder, env=given, capture_output=True, text=True, timeout=120, check=False)


def configured(database: PostgreSQL, folder: Path) -> Production:
    """The configuration of mlflow/ in a folder, but for addresses, places and the number of workers; and its two databases, empty."""
    database.do("CREATE DATABASE production", "CREATE DATABASE production_auth")
    port = free_port()
    here = {
        "MLFLOW_BACKEND_STORE_URI": database.store("production"),
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
        "MLFLOW_HOST": "127.0.0.1",
        "MLFLOW_PORT": str(port),
        "MLFLOW_WORKERS": "1",
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port}",
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "basic_auth.ini"),
        "PGPASSFILE": "",
        "PGSSLMODE": "disable",
    }
    lines = (ROOT / "mlflow" / "server.env").read_text().splitlines()
    kept = [line for line in lines if line.partition("=")[0] not in here]
    (folder / "server.env").write_text("\n".join([*kept, *(f"{name}={value}" for name, value in here.items())]) + "\n")
    ini = (ROOT / "mlflow" / "basic_auth.ini").read_text()
    ini = ini.replace("postgresql+psycopg2://mlflow@postgresql.example:5432/mlflow_auth", database.store("production_auth"))
    (folder / "basic_auth.ini").write_text(ini)
    for name, text in (("key", "a key that is the same for all workers"), ("password", ADMIN[1])):
        (folder / name).write_text(text)
    return Production(f"http://127.0.0.1:{port}", folder, _environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    """What the scripts find in their environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")} | {
        "MLFLOW_ENV": str(folder / "server.env"),
        "AUTH_INI": str(folder / "basic_auth.ini"),
        "SECRET_KEY_FILE": str(folder / "key"),
        "ADMIN_PASSWORD_FILE": str(folder / "password"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], *postgresql.folders()]),
    }
