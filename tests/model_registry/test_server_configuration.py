"""The server configuration in mlflow/; the folder must not shadow the Python package of the same name."""

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
CLIENT_VARIABLE_PREFIXES = (
    "AWS_",
    "PG",
    "MLFLOW_S3_",
)  # read by boto3, libpq and MLflow's S3 store, so not among MLflow's declared variables


def read_server_environment() -> dict[str, str]:
    """Return the variables that server.env sets."""
    lines = (FOLDER / "server.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_mlflow_folder_does_not_shadow_the_package() -> None:
    assert not list(FOLDER.rglob("*.py"))
    command = [
        sys.executable,
        "-c",
        "import mlflow; print(mlflow.__file__)",
    ]  # without -P, so that the working folder comes first on sys.path
    module_path = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert Path(module_path.strip()).name == "__init__.py"
    assert ROOT / "mlflow" not in Path(module_path.strip()).parents


def test_installed_mlflow_accepts_every_option_and_variable() -> None:
    from mlflow import environment_variables
    from mlflow.cli import server

    script = (FOLDER / "serve.sh").read_text(encoding="utf-8")
    [line] = re.findall(r"^exec mlflow server (.*)$", script, re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in read_server_environment().items():
            patch.setenv(name, value)
        parameters = server.make_context("server", shlex.split(line)).params
    assert (parameters["app_name"], parameters["host"], int(parameters["workers"])) == ("basic-auth", "0.0.0.0", 4)
    assert parameters["backend_store_uri"] == read_server_environment()["MLFLOW_BACKEND_STORE_URI"]
    assert parameters["artifacts_destination"] == read_server_environment()["MLFLOW_ARTIFACTS_DESTINATION"]
    known = {parameter.envvar for parameter in server.params} | set(vars(environment_variables))
    unknown = [
        name
        for name in read_server_environment()
        if name not in known and not name.startswith(CLIENT_VARIABLE_PREFIXES)
    ]
    assert unknown == []


def test_auth_configuration_has_the_keys_mlflow_reads() -> None:
    import mlflow

    ours, theirs = configparser.ConfigParser(), configparser.ConfigParser()
    ours.read(FOLDER / "basic_auth.ini")
    shipped = Path(mlflow.__file__).parent / "server" / "auth" / "basic_auth.ini"
    theirs.read(shipped)
    optional = set(re.findall(r"^# (\w+) = ", shipped.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(ours["mlflow"]) <= set(theirs["mlflow"]) | optional
    assert set(theirs["mlflow"]) <= set(ours["mlflow"])
    assert (
        "password"
        not in (FOLDER / "basic_auth.ini").read_text(encoding="utf-8").partition("admin_username")[2].partition("\n")[0]
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_posix_shell_and_executable(script: Path) -> None:
    assert subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False).stderr == ""
    assert os.access(script, os.X_OK) == script.read_text(encoding="utf-8").startswith("#!"), (
        "only scripts with a shebang are executable"
    )


def test_files_contain_no_secrets_and_only_example_hosts() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"://[^\s/@:*]+:[^\s/@$*]+@", text), f"{path.name} holds a password in an address"
        hosts = re.findall(r"(?:https?|postgresql\+psycopg2)://(?:\w+@)?([a-z][\w.-]+)", text)
        assert all(host.endswith((".example", ".svc")) for host in hosts), f"{path.name} names {hosts}"
