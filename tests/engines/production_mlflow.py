"""An MLflow server with the configuration and scripts of mlflow/, as in production: PostgreSQL, users and an artifact folder."""

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
from tests.mlflow_server import free_port, run_server
from tests.pipelines.command import ROOT

ADMIN = ("admin", "a-password-of-nobody")


@dataclass(frozen=True)
class ProductionServer:
    """A server, its configuration folder and the environment of the scripts."""

    address: str
    folder: Path
    environment: dict[str, str]

    @contextmanager
    def run(self) -> Iterator[ProductionServer]:
        """Run the server with mlflow/serve.sh."""
        with run_server(["sh", ROOT / "mlflow" / "serve.sh"], self.address, self.folder, self.environment):
            yield self

    def run_script(self, name: str, *arguments: str, user: tuple[str, str] = ADMIN) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts in mlflow/ with the credentials of `user`."""
        netrc = self.folder / "netrc"
        netrc.write_text(f"machine 127.0.0.1 login {user[0]} password {user[1]}\n")
        env = {**self.environment, "MLFLOW_TRACKING_URI": self.address, "NETRC": str(netrc), "SYNC": "cp -r"}
        command = ["sh", str(ROOT / "mlflow" / name), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120, check=False
        )


def create_configuration(database: PostgreSQL, folder: Path) -> ProductionServer:
    """Create the two empty databases and copy the configuration of mlflow/, with test addresses, folders and one worker.

    The databases have the encoding of a server whose initdb had no locale.
    """
    encoding = "ENCODING 'SQL_ASCII' TEMPLATE template0"
    database.execute(f"CREATE DATABASE production {encoding}", f"CREATE DATABASE production_auth {encoding}")
    port = free_port()
    overrides = {
        "MLFLOW_BACKEND_STORE_URI": database.mlflow_address("production"),
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
    unchanged = [line for line in lines if line.partition("=")[0] not in overrides]
    (folder / "server.env").write_text(
        "\n".join([*unchanged, *(f"{name}={value}" for name, value in overrides.items())]) + "\n"
    )
    ini = (ROOT / "mlflow" / "basic_auth.ini").read_text()
    ini = ini.replace(
        "postgresql+psycopg2://mlflow@postgresql.example:5432/mlflow_auth", database.mlflow_address("production_auth")
    )
    (folder / "basic_auth.ini").write_text(ini)
    for name, text in (("key", "a key that is the same for all workers"), ("password", ADMIN[1])):
        (folder / name).write_text(text)
    return ProductionServer(f"http://127.0.0.1:{port}", folder, _build_environment(folder))


def _build_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of the scripts."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")} | {
        "MLFLOW_ENV": str(folder / "server.env"),
        "AUTH_INI": str(folder / "basic_auth.ini"),
        "SECRET_KEY_FILE": str(folder / "key"),
        "ADMIN_PASSWORD_FILE": str(folder / "password"),
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ["PATH"], *postgresql.list_program_folders()]
        ),
    }
