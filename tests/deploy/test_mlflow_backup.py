"""What mlflow/backup.sh and restore.sh do around PostgreSQL's programs, of which these are stand-ins; tests/engines has the real ones."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

MLFLOW = Path(__file__).parents[2] / "mlflow"
DATABASE = "postgresql+psycopg2://mlflow@db.example:5432"
NOTE = '#!/bin/sh\necho "${0##*/} $*" >> "$CALLS"\n'
STAND_INS = {
    "pg_dump": 'for one; do case $one in --file=*) echo dump > "${one#--file=}" ;; esac; done\n',
    "pg_restore": "echo list\n",
    "psql": 'case $* in *"$FULL"*) echo 3 ;; *"$GONE"*) exit 2 ;; *) echo 0 ;; esac\n',
    "aws": "",
}


class Site:
    """A folder with the configuration and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, folder / "kept"
        (folder / "bin").mkdir()
        for name, text in STAND_INS.items():
            (folder / "bin" / name).write_text(NOTE + text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "artifacts").mkdir()
        (folder / "artifacts" / "model").write_text("a model")
        self.configure()

    def configure(self, uri: str = f"{DATABASE}/registry", ini: str = f"database_uri = {DATABASE}/users", **more: str) -> None:
        """Write server.env and basic_auth.ini."""
        told = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_ARTIFACTS_DESTINATION": str(self.folder / "artifacts"), **more}
        (self.folder / "server.env").write_text("".join(f"{name}='{value}'\n" for name, value in told.items()))
        (self.folder / "basic_auth.ini").write_text(f"[mlflow]\ndefault_permission = READ\n{ini}\n")

    def script(self, name: str, argument: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts."""
        given = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(self.folder / "calls"), "SYNC": "cp -Rp"}
        given |= {"MLFLOW_ENV": str(self.folder / "server.env"), "AUTH_INI": str(self.folder / "basic_auth.ini")}
        given |= {"FULL": "none", "GONE": "none", **more}
        command = ["sh", str(MLFLOW / name), str(argument)]
        return subprocess.run(command, cwd=cwd or self.folder, env=given, capture_output=True, text=True, timeout=60, check=False)

    def backed_up(self, **more: str) -> Path:
        """A backup."""
        done = self.script("backup.sh", self.kept, **more)
        assert (done.returncode, done.stderr) == (0, "")
        return Path(done.stdout.strip())

    def calls(self) -> list[str]:
        """How the stand-ins were called since this was asked last."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("name", ["backup.sh", "restore.sh"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ini": "admin_username = admin"}, "database_uri of"),
        ({"ini": "database_uri ="}, "names no PostgreSQL database"),
        ({"uri": "sqlite:///mlflow.db"}, "MLFLOW_BACKEND_STORE_URI names no PostgreSQL database"),
        ({"uri": "postgresql://mlflow:hunter2@db.example/mlflow"}, "MLFLOW_BACKEND_STORE_URI holds a password"),
        ({"ini": "database_uri: postgresql://db.example/a?password=hunter2"}, "holds a password"),
        ({"MLFLOW_S3_ENDPOINT_URL": "https://key:hunter2@s3.example"}, "MLFLOW_S3_ENDPOINT_URL holds a password"),
    ],
)
def test_an_address_that_is_none_or_has_a_password_is_refused_before_anything_is_called(
    site: Site, name: str, wrong: dict[str, str], said: str
) -> None:
    whole = site.backed_up()
    site.calls()
    site.configure(**wrong)
    done = site.script(name, whole if name == "restore.sh" else site.folder / "new")
    assert (done.returncode, said in done.stderr, "hunter2" in done.stderr) == (1, True, False), done.stderr
    assert (site.calls(), (site.folder / "new").exists()) == ([], False)


def test_the_endpoint_is_named_to_aws_where_there_is_one_and_only_there(site: Site) -> None:
    site.script("backup.sh", site.kept, SYNC="")
    assert [line for line in site.calls() if line.startswith("aws")] == [
        f"aws s3 sync --only-show-errors {site.folder}/artifacts {site.kept}/artifacts"
    ]
    site.configure(MLFLOW_S3_ENDPOINT_URL="https://s3.example:9021")
    site.script("backup.sh", site.folder / "other", SYNC="")
    assert "aws s3 sync --only-show-errors --endpoint-url https://s3.example:9021 " in "\n".join(site.calls())


def test_artifacts_come_back_by_whatever_name_the_backup_has_and_it_is_said_where_they_do_not(site: Site) -> None:
    whole = site.backed_up()
    for name, place in ((f"{whole}/", site.folder), (whole.name, site.kept), (".", whole)):
        (site.folder / "artifacts" / "artifacts" / "model").unlink(missing_ok=True)
        done = site.script("restore.sh", name, place)
        assert (done.returncode, done.stderr) == (0, "")
        assert (site.folder / "artifacts" / "artifacts" / "model").read_text() == "a model"  # beside, as cp does it
    (site.kept / "artifacts").rename(site.folder / "elsewhere")
    done = site.script("restore.sh", whole)
    assert (done.returncode, "artifacts are not restored" in done.stderr) == (0, True)


def test_half_a_backup_is_refused_by_whatever_name(site: Site) -> None:
    half = site.backed_up().rename(site.kept / "x.part")
    site.calls()
    for name, place in ((f"{half}/", site.folder), ("x.part", site.kept), (".", half)):
        done = site.script("restore.sh", name, place)
        assert (done.returncode, "no whole backup" in done.stderr) == (1, True)
    assert site.calls() == []


@pytest.mark.parametrize("state", ["FULL", "GONE"])
@pytest.mark.parametrize("database", ["registry", "users"])
def test_where_one_database_is_not_empty_or_not_there_neither_is_touched(site: Site, state: str, database: str) -> None:
    whole = site.backed_up()
    site.calls()
    done = site.script("restore.sh", whole, **{state: f":5432/{database}"})
    assert done.returncode == 1
    assert f'DROP DATABASE IF EXISTS "{database}"; CREATE DATABASE "{database}" OWNER "mlflow";' in done.stderr
    assert done.stderr.count("DROP DATABASE") == 1
    assert {line.partition(" ")[0] for line in site.calls()} == {"psql"}


def test_a_second_backup_in_the_same_second_is_refused(site: Site) -> None:
    (site.folder / "bin" / "date").write_text("#!/bin/sh\necho 20260101T000000Z\n")
    (site.folder / "bin" / "date").chmod(0o755)
    first = site.backed_up()
    done = site.script("backup.sh", site.kept)
    assert (done.returncode, "is there already" in done.stderr) == (1, True)
    assert {path.name for path in site.kept.iterdir()} == {first.name, "artifacts"}
    assert {path.name for path in first.iterdir()} == {"mlflow.dump", "mlflow.list", "mlflow_auth.dump", "mlflow_auth.list"}


def test_nobody_else_may_read_a_dump(site: Site) -> None:
    whole = site.backed_up()
    assert [path.stat().st_mode & 0o077 for path in (whole, *whole.iterdir())] == [0] * 5


def test_backups_are_kept_for_so_many_days_and_for_ever_where_none_are_said(site: Site) -> None:
    ages = {"20260101T000000Z": 40, "20260102T000000Z": 20, "20260103T000000Z.part": 2, "20260104T000000Z.part": 0.5, "mine": 400}
    for name, days in ages.items():
        (site.kept / name).mkdir(parents=True)
        os.utime(site.kept / name, (time.time() - days * 86400,) * 2)
    first = site.backed_up()
    assert {path.name for path in site.kept.iterdir()} == {*ages, first.name, "artifacts"}
    os.utime(first, (time.time() - 31 * 86400,) * 2)
    time.sleep(1.1)  # names are by the second
    second = site.backed_up(KEEP_DAYS="30")
    left = {"20260102T000000Z", "20260104T000000Z.part", "mine", "artifacts", second.name}
    assert {path.name for path in site.kept.iterdir()} == left
    done = site.script("backup.sh", site.kept, KEEP_DAYS="a month")
    assert (done.returncode, "no number of days" in done.stderr) == (1, True)


def test_a_backup_that_breaks_off_removes_none(site: Site) -> None:
    (site.kept / "20260101T000000Z").mkdir(parents=True)
    os.utime(site.kept / "20260101T000000Z", (1, 1))
    assert site.script("backup.sh", site.kept, KEEP_DAYS="30", SYNC="false").returncode == 1
    assert (site.kept / "20260101T000000Z").is_dir()
