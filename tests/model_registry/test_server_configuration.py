"""The folder mlflow/ holds what MLflow's server takes, and never hides the package of that name."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.command import ROOT

FOLDER = ROOT / "mlflow"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
OF_OTHERS = ("AWS_", "PG", "MLFLOW_S3_")  # read by boto3 and libpq; MLflow's S3 store reads the last from the environment itself


def environment() -> dict[str, str]:
    """What server.env sets."""
    lines = (FOLDER / "server.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_folder_is_no_python_package() -> None:
    assert not list(FOLDER.rglob("*.py"))
    command = [sys.executable, "-c", "import mlflow; print(mlflow.__file__)"]  # without -P: this folder is looked into first
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).name == "__init__.py"
    assert ROOT / "mlflow" not in Path(found.strip()).parents


def test_the_installed_mlflow_takes_every_option_and_variable() -> None:
    from mlflow import environment_variables
    from mlflow.cli import server

    said = (FOLDER / "serve.sh").read_text(encoding="utf-8")
    [line] = re.findall(r"^exec mlflow server (.*)$", said, re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        given = server.make_context("server", shlex.split(line)).params
    assert (given["app_name"], given["host"], int(given["workers"])) == ("basic-auth", "0.0.0.0", 4)
    assert given["backend_store_uri"] == environment()["MLFLOW_BACKEND_STORE_URI"]
    assert given["artifacts_destination"] == environment()["MLFLOW_ARTIFACTS_DESTINATION"]
    known = {parameter.envvar for parameter in server.params} | set(vars(environment_variables))
    unknown = [name for name in environment() if name not in known and not name.startswith(OF_OTHERS)]
    assert unknown == []


def test_the_users_configuration_has_the_keys_that_mlflow_reads() -> None:
    import mlflow

    ours, theirs = configparser.ConfigParser(), configparser.ConfigParser()
    ours.read(FOLDER / "basic_auth.ini")
    shipped = Path(mlflow.__file__).parent / "server" / "auth" / "basic_auth.ini"
    theirs.read(shipped)
    optional = set(re.findall(r"^# (\w+) = ", shipped.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(ours["mlflow"]) <= set(theirs["mlflow"]) | optional
    assert set(theirs["mlflow"]) <= set(ours["mlflow"])
    assert "password" not in (FOLDER / "basic_auth.ini").read_text(encoding="utf-8").partition("admin_username")[2].partition("\n")[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_one_for_any_shell_and_may_be_run(script: Path) -> None:
    assert subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False).stderr == ""
    assert os.access(script, os.X_OK) == script.read_text(encoding="utf-8").startswith("#!"), "what others read is not run"


def test_no_file_holds_a_secret_or_a_place_that_exists() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"://[^\s/@:*]+:[^\s/@$*]+@", text), f"{path.name} holds a password in an address"
        hosts = re.findall(r"(?:https?|postgresql\+psycopg2)://(?:\w+@)?([a-z][\w.-]+)", text)
        assert all(host.endswith((".example", ".svc")) for host in hosts), f"{path.name} names {hosts}"
