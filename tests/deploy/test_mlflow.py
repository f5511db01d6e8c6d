"""What the tracking server and its backup are told on a cluster, read by the very shell scripts and the very MLflow."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendering import OVERLAYS, of_kind, rendered

Json = dict[str, Any]


def config(overlay: str, folder: Path) -> dict[str, str]:
    """The config map's files in a folder."""
    (found,) = [one for name, one in of_kind(rendered(overlay), "ConfigMap", "mlflow").items() if name.startswith("mlflow-config")]
    for name, text in found["data"].items():
        (folder / name).write_text(text, encoding="utf-8")
    return dict(found["data"])


def container(overlay: str, kind: str, name: str) -> Json:
    spec = of_kind(rendered(overlay), kind, "mlflow")[name]["spec"]
    return dict((spec["jobTemplate"]["spec"] if kind == "CronJob" else spec)["template"]["spec"]["containers"][0])


def environment(overlay: str, kind: str, name: str, folder: Path, **more: str) -> dict[str, str]:
    """The variables of a pod of it, once cluster.env was read as its script reads it."""
    config(overlay, folder)
    given = {one["name"]: one.get("value", "from-a-secret") for one in container(overlay, kind, name)["env"]}
    given |= {"CONFIG": str(folder), "TMPDIR": str(folder / "tmp"), "PATH": os.environ["PATH"], **more}
    (folder / "tmp").mkdir(exist_ok=True)
    done = subprocess.run(
        ["sh", "-euc", 'set -a; . "$CONFIG/cluster.env"; set +a; env -0'], env=given, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_is_told_the_sites_database_bucket_and_names(overlay: str, tmp_path: Path) -> None:
    told = environment(overlay, "Deployment", "mlflow", tmp_path)
    assert told["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg2://mlflow@postgresql.mlflow.svc:5432/mlflow"
    assert told["PGSSLMODE"] == "verify-full"
    assert told["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")[:3] == ["mlflow.example", "mlflow.mlflow:5000", "mlflow.mlflow.svc:5000"]
    assert told["MLFLOW_S3_ENDPOINT_URL"].startswith("https://")
    assert not {"PGPASSFILE", "AWS_SHARED_CREDENTIALS_FILE"} & told.keys(), "files that are not there"
    users = configparser.ConfigParser()
    users.read(told["MLFLOW_AUTH_CONFIG_PATH"])
    assert users["mlflow"]["database_uri"] == "postgresql+psycopg2://mlflow@postgresql.mlflow.svc:5432/mlflow_auth"
    assert users["mlflow"]["default_permission"] == "READ"
    assert Path(told["MLFLOW_AUTH_CONFIG_PATH"]).stat().st_mode & 0o077 == 0


def test_an_authority_of_the_site_is_trusted_for_s3_where_there_is_one(tmp_path: Path) -> None:
    assert "AWS_CA_BUNDLE" not in environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path)
    server = container("xe9680-powerscale", "Deployment", "mlflow")
    (mount,) = [one["mountPath"] for one in server["volumeMounts"] if one["name"] == "authorities"]
    folder = tmp_path / Path(mount).relative_to("/run/secrets")
    folder.mkdir()
    (folder / "ca-bundle.crt").write_text("an authority")
    told = environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path, SECRETS=str(tmp_path))
    assert told["AWS_CA_BUNDLE"] == str(folder / "ca-bundle.crt")


def test_the_installed_mlflow_takes_what_it_is_told(tmp_path: Path) -> None:
    from mlflow.cli import server

    told = environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path)
    line = (tmp_path / "serve.sh").read_text(encoding="utf-8").rpartition("exec mlflow server ")[2]
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in told if name.startswith("MLFLOW_")):
            patch.setenv(name, told[name])
        given = server.make_context("server", shlex.split(line)).params
    assert (given["app_name"], given["host"], int(given["port"])) == ("basic-auth", "0.0.0.0", 5000)
    assert given["backend_store_uri"] == told["MLFLOW_BACKEND_STORE_URI"]
    (port,) = container("xe9680-powerscale", "Deployment", "mlflow")["ports"]
    assert port["containerPort"] == int(given["port"])


def test_a_host_that_clients_and_browsers_name_is_let_in_and_another_is_not(tmp_path: Path) -> None:
    from mlflow.server.security_utils import is_allowed_host_header, is_health_endpoint

    said = environment("xe9680-powerscale", "Deployment", "mlflow", tmp_path)["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    forwarded = ("localhost:5000", "127.0.0.1:5000")  # docs/install.md has an administrator come that way
    assert all(
        is_allowed_host_header(said, host) for host in ("mlflow.example", "mlflow.mlflow:5000", "mlflow.mlflow.svc:5000", *forwarded)
    )
    assert not is_allowed_host_header(said, "mlflow.elsewhere:5000")
    probes = [container("xe9680-powerscale", "Deployment", "mlflow")[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    assert all(is_health_endpoint(probe["httpGet"]["path"]) for probe in probes), "a probe names no host that is let in"


def test_the_backup_dumps_both_databases_of_the_cluster_and_leaves_the_bucket_alone(tmp_path: Path) -> None:
    """With stand-ins for pg_dump and pg_restore, which note how they are called; tests/engines runs the script with the real ones."""
    config("xe9680-powerscale", tmp_path)
    (tmp_path / "bin").mkdir()
    for program in ("pg_dump", "pg_restore"):
        (tmp_path / "bin" / program).write_text(
            f'#!/bin/sh\necho "{program} $*" >> "{tmp_path}/calls"\nfor one; do\n'
            'case $one in --file=*) : > "${one#--file=}";; esac; done\n'
        )
        (tmp_path / "bin" / program).chmod(0o755)
    backup = container("xe9680-powerscale", "CronJob", "mlflow-backup")
    given = {one["name"]: one.get("value", "from-a-secret") for one in backup["env"]}
    given |= {"CONFIG": str(tmp_path), "TMPDIR": str(tmp_path / "bin"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    given["MLFLOW_ENV"] = str(tmp_path / Path(given["MLFLOW_ENV"]).name)
    script, target = tmp_path / Path(backup["command"][1]).name, tmp_path / "kept"
    done = subprocess.run([backup["command"][0], script, target], env=given, capture_output=True, text=True, check=True)
    kept = Path(done.stdout.strip())
    assert kept.parent == target
    assert {path.name for path in kept.iterdir()} >= {"mlflow.dump", "mlflow_auth.dump"}
    calls = (tmp_path / "calls").read_text(encoding="utf-8")
    assert "postgresql://mlflow@postgresql.mlflow.svc:5432/mlflow\n" in calls
    assert "postgresql://mlflow@postgresql.mlflow.svc:5432/mlflow_auth\n" in calls
    assert not (target / "artifacts").exists()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_database_takes_all_connections_that_the_servers_may_open(overlay: str, tmp_path: Path) -> None:
    told = environment(overlay, "Deployment", "mlflow", tmp_path)
    pool = int(told["MLFLOW_SQLALCHEMYSTORE_POOL_SIZE"]) + int(told["MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW"])
    pods = of_kind(rendered(overlay), "Deployment", "mlflow")["mlflow"]["spec"]["replicas"] + 1  # one more while a new one comes
    arguments = of_kind(rendered(overlay), "StatefulSet", "mlflow")["postgresql"]["spec"]["template"]["spec"]["containers"][0]["args"]
    (most,) = [int(one.partition("=")[2]) for one in arguments if one.startswith("max_connections=")]
    assert most >= pods * int(told["MLFLOW_WORKERS"]) * pool * 2


def test_the_config_map_holds_the_files_of_the_folder_mlflow_as_they_are(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    held = config("one-gpu-node", tmp_path)
    assert held.pop("cluster.env") == (root / "deploy" / "base" / "mlflow" / "cluster.env").read_text(encoding="utf-8")
    assert held == {name: (root / "mlflow" / name).read_text(encoding="utf-8") for name in held}
    (made,) = yaml.safe_load((root / "mlflow" / "kustomization.yaml").read_text(encoding="utf-8"))["configMapGenerator"]
    assert set(made["files"]) == set(held)
