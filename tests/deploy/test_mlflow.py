"""Configuration of the MLflow server and its backup on a cluster, read by the real shell scripts and the installed MLflow."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import OVERLAYS, render_overlay, select_kind

Json = dict[str, Any]


def write_config(overlay: str, folder: Path) -> dict[str, str]:
    """Write the files of the config map to a folder and return them."""
    (config_map,) = [
        manifest
        for name, manifest in select_kind(render_overlay(overlay), "ConfigMap", "mlflow").items()
        if name.startswith("mlflow-config")
    ]
    for name, text in config_map["data"].items():
        (folder / name).write_text(text, encoding="utf-8")
    return dict(config_map["data"])


def find_container(overlay: str, kind: str, name: str) -> Json:
    spec = select_kind(render_overlay(overlay), kind, "mlflow")[name]["spec"]
    return dict((spec["jobTemplate"]["spec"] if kind == "CronJob" else spec)["template"]["spec"]["containers"][0])


def resolve_environment(overlay: str, kind: str, name: str, folder: Path, **extra: str) -> dict[str, str]:
    """Return the environment variables of a pod after its script has sourced cluster.env."""
    write_config(overlay, folder)
    variables = {
        variable["name"]: variable.get("value", "from-a-secret")
        for variable in find_container(overlay, kind, name)["env"]
    }
    variables |= {"CONFIG": str(folder), "TMPDIR": str(folder / "tmp"), "PATH": os.environ["PATH"], **extra}
    (folder / "tmp").mkdir(exist_ok=True)
    result = subprocess.run(
        ["sh", "-euc", 'set -a; . "$CONFIG/cluster.env"; set +a; env -0'],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in result.stdout.split("\0") if line)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_server_gets_the_sites_database_bucket_and_hosts(overlay: str, tmp_path: Path) -> None:
    variables = resolve_environment(overlay, "Deployment", "mlflow", tmp_path)
    assert variables["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg2://mlflow@postgresql.mlflow.svc:5432/mlflow"
    assert variables["PGSSLMODE"] == "verify-full"
    assert variables["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")[:3] == [
        "mlflow.example",
        "mlflow.mlflow:5000",
        "mlflow.mlflow.svc:5000",
    ]
    assert variables["MLFLOW_S3_ENDPOINT_URL"].startswith("https://")
    assert not {"PGPASSFILE", "AWS_SHARED_CREDENTIALS_FILE"} & variables.keys(), "files that are not there"
    auth_config = configparser.ConfigParser()
    auth_config.read(variables["MLFLOW_AUTH_CONFIG_PATH"])
    assert (
        auth_config["mlflow"]["database_uri"] == "postgresql+psycopg2://mlflow@postgresql.mlflow.svc:5432/mlflow_auth"
    )
    assert auth_config["mlflow"]["default_permission"] == "READ"
    assert Path(variables["MLFLOW_AUTH_CONFIG_PATH"]).stat().st_mode & 0o077 == 0


def test_configured_ca_bundle_is_trusted_for_s3(tmp_path: Path) -> None:
    assert "AWS_CA_BUNDLE" not in resolve_environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path)
    server = find_container("xe9680-powerscale", "Deployment", "mlflow")
    (mount,) = [mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] == "authorities"]
    folder = tmp_path / Path(mount).relative_to("/run/secrets")
    folder.mkdir()
    (folder / "ca-bundle.crt").write_text("an authority")
    variables = resolve_environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path, SECRETS=str(tmp_path))
    assert variables["AWS_CA_BUNDLE"] == str(folder / "ca-bundle.crt")


def test_server_command_is_accepted_by_the_installed_mlflow(tmp_path: Path) -> None:
    from mlflow.cli import server

    variables = resolve_environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path)
    line = (tmp_path / "serve.sh").read_text(encoding="utf-8").rpartition("exec mlflow server ")[2]
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in variables if name.startswith("MLFLOW_")):
            patch.setenv(name, variables[name])
        parameters = server.make_context("server", shlex.split(line)).params
    assert (parameters["app_name"], parameters["host"], int(parameters["port"])) == ("basic-auth", "0.0.0.0", 5000)
    assert parameters["backend_store_uri"] == variables["MLFLOW_BACKEND_STORE_URI"]
    (port,) = find_container("xe9680-powerscale", "Deployment", "mlflow")["ports"]
    assert port["containerPort"] == int(parameters["port"])


def test_only_known_host_headers_are_allowed(tmp_path: Path) -> None:
    from mlflow.server.security_utils import is_allowed_host_header, is_health_endpoint

    allowed_hosts = resolve_environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path)[
        "MLFLOW_SERVER_ALLOWED_HOSTS"
    ].split(",")
    forwarded = ("localhost:5000", "127.0.0.1:5000")  # the port forwarding of docs/how-to/install.md
    assert all(
        is_allowed_host_header(allowed_hosts, host)
        for host in ("mlflow.example", "mlflow.mlflow:5000", "mlflow.mlflow.svc:5000", *forwarded)
    )
    assert not is_allowed_host_header(allowed_hosts, "mlflow.elsewhere:5000")
    probes = [
        find_container("xe9680-powerscale", "Deployment", "mlflow")[f"{name}Probe"]
        for name in ("startup", "readiness", "liveness")
    ]
    assert all(is_health_endpoint(probe["httpGet"]["path"]) for probe in probes), "a probe names no host that is let in"


def test_backup_dumps_both_databases_without_the_bucket(tmp_path: Path) -> None:
    """Fake pg_dump and pg_restore record their arguments; tests/engines runs the script with the real programs."""
    write_config("xe9680-powerscale", tmp_path)
    (tmp_path / "bin").mkdir()
    for program in ("pg_dump", "pg_restore"):
        (tmp_path / "bin" / program).write_text(
            f'#!/bin/sh\necho "{program} $*" >> "{tmp_path}/calls"\nfor one; do\n'
            'case $one in --file=*) : > "${one#--file=}";; esac; done\n'
        )
        (tmp_path / "bin" / program).chmod(0o755)
    backup = find_container("xe9680-powerscale", "CronJob", "mlflow-backup")
    variables = {variable["name"]: variable.get("value", "from-a-secret") for variable in backup["env"]}
    variables |= {
        "CONFIG": str(tmp_path),
        "TMPDIR": str(tmp_path / "bin"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    variables["MLFLOW_ENV"] = str(tmp_path / Path(variables["MLFLOW_ENV"]).name)
    script, target = tmp_path / Path(backup["command"][1]).name, tmp_path / "kept"
    result = subprocess.run(
        [backup["command"][0], script, target], env=variables, capture_output=True, text=True, check=True
    )
    backup_folder = Path(result.stdout.strip())
    assert backup_folder.parent == target
    assert {path.name for path in backup_folder.iterdir()} >= {"mlflow.dump", "mlflow_auth.dump"}
    calls = (tmp_path / "calls").read_text(encoding="utf-8")
    assert "postgresql://mlflow@postgresql.mlflow.svc:5432/mlflow\n" in calls
    assert "postgresql://mlflow@postgresql.mlflow.svc:5432/mlflow_auth\n" in calls
    assert not (target / "artifacts").exists()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_max_connections_covers_the_pools_of_all_servers(overlay: str, tmp_path: Path) -> None:
    variables = resolve_environment(overlay, "Deployment", "mlflow", tmp_path)
    pool = int(variables["MLFLOW_SQLALCHEMYSTORE_POOL_SIZE"]) + int(variables["MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW"])
    server_pods = (
        select_kind(render_overlay(overlay), "Deployment", "mlflow")["mlflow"]["spec"]["replicas"] + 1
    )  # a rollout adds one
    arguments = select_kind(render_overlay(overlay), "StatefulSet", "mlflow")["postgresql"]["spec"]["template"]["spec"][
        "containers"
    ][0]["args"]
    (max_connections,) = [
        int(argument.partition("=")[2]) for argument in arguments if argument.startswith("max_connections=")
    ]
    assert max_connections >= server_pods * int(variables["MLFLOW_WORKERS"]) * pool * 2


def test_config_map_contains_the_files_of_the_mlflow_folder(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    files = write_config("one-gpu-node", tmp_path)
    assert files.pop("cluster.env") == (root / "deploy" / "base" / "mlflow" / "cluster.env").read_text(encoding="utf-8")
    assert files == {name: (root / "mlflow" / name).read_text(encoding="utf-8") for name in files}
    (generator,) = yaml.safe_load((root / "mlflow" / "kustomization.yaml").read_text(encoding="utf-8"))[
        "configMapGenerator"
    ]
    assert set(generator["files"]) == set(files)
