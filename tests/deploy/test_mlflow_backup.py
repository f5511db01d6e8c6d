"""mlflow/backup.sh and restore.sh with fake PostgreSQL programs; tests/engines runs them with the real ones."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

MLFLOW = Path(__file__).parents[2] / "mlflow"
DATABASE = "postgresql+psycopg2://mlflow@db.example:5432"
RECORD_CALL = '#!/bin/sh\necho "${0##*/} $*" >> "$CALLS"\n'
FAKE_PROGRAMS = {
    "pg_dump": 'for one; do case $one in --file=*) echo dump > "${one#--file=}" ;; esac; done\n',
    "pg_restore": "echo list\n",
    "psql": 'case $* in *"$FULL"*) echo 3 ;; *"$GONE"*) exit 2 ;; *) echo 0 ;; esac\n',
    "aws": "",
}


class Site:
    """A folder with the configuration and the fake programs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.backup_folder = folder, folder / "kept"
        (folder / "bin").mkdir()
        for name, text in FAKE_PROGRAMS.items():
            (folder / "bin" / name).write_text(RECORD_CALL + text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "artifacts").mkdir()
        (folder / "artifacts" / "model").write_text("a model")
        self.configure()

    def configure(
        self, uri: str = f"{DATABASE}/registry", ini: str = f"database_uri = {DATABASE}/users", **extra: str
    ) -> None:
        """Write server.env and basic_auth.ini."""
        variables = {
            "MLFLOW_BACKEND_STORE_URI": uri,
            "MLFLOW_ARTIFACTS_DESTINATION": str(self.folder / "artifacts"),
            **extra,
        }
        (self.folder / "server.env").write_text("".join(f"{name}='{value}'\n" for name, value in variables.items()))
        (self.folder / "basic_auth.ini").write_text(f"[mlflow]\ndefault_permission = READ\n{ini}\n")

    def script(
        self, name: str, argument: object, cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts."""
        variables = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "SYNC": "cp -Rp",
        }
        variables |= {"MLFLOW_ENV": str(self.folder / "server.env"), "AUTH_INI": str(self.folder / "basic_auth.ini")}
        variables |= {"FULL": "none", "GONE": "none", **extra}
        command = ["sh", str(MLFLOW / name), str(argument)]
        return subprocess.run(
            command, cwd=cwd or self.folder, env=variables, capture_output=True, text=True, timeout=60, check=False
        )

    def back_up(self, **extra: str) -> Path:
        """Create a backup and return its folder."""
        result = self.script("backup.sh", self.backup_folder, **extra)
        assert (result.returncode, result.stderr) == (0, "")
        return Path(result.stdout.strip())

    def take_calls(self) -> list[str]:
        """Return the calls of the fake programs since the last time."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("name", ["backup.sh", "restore.sh"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ini": "admin_username = admin"}, "database_uri of"),
        ({"ini": "database_uri ="}, "is not the address of a PostgreSQL database"),
        ({"uri": "sqlite:///mlflow.db"}, "MLFLOW_BACKEND_STORE_URI is not the address of a PostgreSQL database"),
        ({"uri": "postgresql://mlflow:hunter2@db.example/mlflow"}, "MLFLOW_BACKEND_STORE_URI contains a password"),
        ({"ini": "database_uri: postgresql://db.example/a?password=hunter2"}, "contains a password"),
        ({"MLFLOW_S3_ENDPOINT_URL": "https://key:hunter2@s3.example"}, "MLFLOW_S3_ENDPOINT_URL contains a password"),
    ],
)
def test_invalid_uri_or_password_is_refused_before_any_call(
    site: Site, name: str, changes: dict[str, str], message: str
) -> None:
    backup = site.back_up()
    site.take_calls()
    site.configure(**changes)
    result = site.script(name, backup if name == "restore.sh" else site.folder / "new")
    assert (result.returncode, message in result.stderr, "hunter2" in result.stderr) == (1, True, False), result.stderr
    assert (site.take_calls(), (site.folder / "new").exists()) == ([], False)


def test_aws_gets_the_endpoint_only_if_configured(site: Site) -> None:
    site.script("backup.sh", site.backup_folder, SYNC="")
    assert [line for line in site.take_calls() if line.startswith("aws")] == [
        f"aws s3 sync --only-show-errors {site.folder}/artifacts {site.backup_folder}/artifacts"
    ]
    site.configure(MLFLOW_S3_ENDPOINT_URL="https://s3.example:9021")
    site.script("backup.sh", site.folder / "other", SYNC="")
    assert "aws s3 sync --only-show-errors --endpoint-url https://s3.example:9021 " in "\n".join(site.take_calls())


def test_artifacts_are_restored_from_any_path_spelling_or_reported(site: Site) -> None:
    backup = site.back_up()
    for name, cwd in ((f"{backup}/", site.folder), (backup.name, site.backup_folder), (".", backup)):
        (site.folder / "artifacts" / "artifacts" / "model").unlink(missing_ok=True)
        result = site.script("restore.sh", name, cwd)
        assert (result.returncode, result.stderr) == (0, "")
        # cp copies into the existing folder.
        assert (site.folder / "artifacts" / "artifacts" / "model").read_text() == "a model"
    (site.backup_folder / "artifacts").rename(site.folder / "elsewhere")
    result = site.script("restore.sh", backup)
    assert (result.returncode, "artifacts are not restored" in result.stderr) == (0, True)


def test_partial_backup_is_refused_for_any_path_spelling(site: Site) -> None:
    partial = site.back_up().rename(site.backup_folder / "x.part")
    site.take_calls()
    for name, cwd in ((f"{partial}/", site.folder), ("x.part", site.backup_folder), (".", partial)):
        result = site.script("restore.sh", name, cwd)
        assert (result.returncode, "is not a complete backup" in result.stderr) == (1, True)
    assert site.take_calls() == []


@pytest.mark.parametrize("state", ["FULL", "GONE"])
@pytest.mark.parametrize("database", ["registry", "users"])
def test_restore_stops_if_one_database_is_missing_or_not_empty(site: Site, state: str, database: str) -> None:
    backup = site.back_up()
    site.take_calls()
    result = site.script("restore.sh", backup, **{state: f":5432/{database}"})
    assert result.returncode == 1
    assert f'DROP DATABASE IF EXISTS "{database}"; CREATE DATABASE "{database}" OWNER "mlflow";' in result.stderr
    assert result.stderr.count("DROP DATABASE") == 1
    assert {line.partition(" ")[0] for line in site.take_calls()} == {"psql"}


def test_second_backup_in_the_same_second_is_refused(site: Site) -> None:
    (site.folder / "bin" / "date").write_text("#!/bin/sh\necho 20260101T000000Z\n")
    (site.folder / "bin" / "date").chmod(0o755)
    first = site.back_up()
    result = site.script("backup.sh", site.backup_folder)
    assert (result.returncode, "already exists" in result.stderr) == (1, True)
    assert {path.name for path in site.backup_folder.iterdir()} == {first.name, "artifacts"}
    assert {path.name for path in first.iterdir()} == {
        "mlflow.dump",
        "mlflow.list",
        "mlflow_auth.dump",
        "mlflow_auth.list",
    }


def test_dumps_are_readable_only_by_the_owner(site: Site) -> None:
    backup = site.back_up()
    assert [path.stat().st_mode & 0o077 for path in (backup, *backup.iterdir())] == [0] * 5


def test_backups_older_than_keep_days_are_deleted(site: Site) -> None:
    ages = {
        "20260101T000000Z": 40,
        "20260102T000000Z": 20,
        "20260103T000000Z.part": 2,
        "20260104T000000Z.part": 0.5,
        "mine": 400,
    }
    for name, days in ages.items():
        (site.backup_folder / name).mkdir(parents=True)
        os.utime(site.backup_folder / name, (time.time() - days * 86400,) * 2)
    first = site.back_up()
    assert {path.name for path in site.backup_folder.iterdir()} == {*ages, first.name, "artifacts"}
    os.utime(first, (time.time() - 31 * 86400,) * 2)
    time.sleep(1.1)  # backup names have a resolution of one second
    second = site.back_up(KEEP_DAYS="30")
    remaining = {"20260102T000000Z", "20260104T000000Z.part", "mine", "artifacts", second.name}
    assert {path.name for path in site.backup_folder.iterdir()} == remaining
    result = site.script("backup.sh", site.backup_folder, KEEP_DAYS="a month")
    assert (result.returncode, "expected a number of days" in result.stderr) == (1, True)


def test_failed_backup_deletes_nothing(site: Site) -> None:
    (site.backup_folder / "20260101T000000Z").mkdir(parents=True)
    os.utime(site.backup_folder / "20260101T000000Z", (1, 1))
    assert site.script("backup.sh", site.backup_folder, KEEP_DAYS="30", SYNC="false").returncode == 1
    assert (site.backup_folder / "20260101T000000Z").is_dir()
