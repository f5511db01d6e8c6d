"""The first step of a pipeline on a cluster: what a pod finds where it runs. Here the pod is this process, and MLflow a file of its own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import pytest
import yaml

from components.common import tracking
from components.common.errors import TunelineError
from components.common.places import Workdir
from components.common.progress import Plain
from pipelines import compiling, place, platform
from pipelines.cluster import access
from pipelines.config import Customization
from pipelines.findings import Finding
from pipelines.place import PlatformError
from pipelines.platform import Platform
from tests import kubernetes_api
from tests.kubernetes_api import KubernetesApi, kubeconfig
from tests.pipelines.command import ROOT, environment

EXAMPLE = ROOT / "deploy" / "overlays" / "xe9680-powerscale" / "platform.yaml"
VARIABLES = {"HF_TOKEN": "the-hub-token", "MLFLOW_TRACKING_TOKEN": "the-mlflow-token"}
RENAME = Path.rename
Break = Callable[[Path, pytest.MonkeyPatch], Any]


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the volume, with the variables of a pod."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "workdir" / "cache"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    shutil.copy(certifi.where(), tmp_path / "authorities.pem")
    return tmp_path


def asked(pod: Path) -> dict[str, Any]:
    return {"mounts": [str(pod)], "variables": sorted(VARIABLES), "authorities": str(pod / "authorities.pem")}


def look(pod: Path) -> list[Finding]:
    """What is found of the place, without MLflow."""
    return list(place._here(asked(pod), Workdir(pod / "workdir"), Plain(sys.stdout)))


def refusing(error: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    return refuse


def replacing(self: Path, target: Path) -> Path:
    """A rename as some file systems in user space do it: what lay there is gone."""
    shutil.rmtree(target, ignore_errors=True)
    return RENAME(self, target)


def full(folder: Path) -> Any:
    return shutil._ntuple_diskusage(10**12, 10**12 - 1000, 1000)  # type: ignore[attr-defined]


def copying(source: Path, target: Path) -> None:
    """A link as an object store does it: a copy, over whatever is there."""
    shutil.copyfile(source, target)


BROKEN: dict[str, tuple[Break, str, str]] = {
    "a secret was not given": (lambda _, patch: patch.delenv("HF_TOKEN"), "variable HF_TOKEN", "is not set"),
    "a secret is empty": (lambda _, patch: patch.setenv("HF_TOKEN", ""), "variable HF_TOKEN", "is empty"),
    "a secret ends with a line break": (
        lambda _, patch: patch.setenv("HF_TOKEN", "x\n"),
        "variable HF_TOKEN",
        "ends with a space or a line break",
    ),
    "the authorities are none": (lambda pod, _: (pod / "authorities.pem").write_text("<html>"), "authorities", "NO_CERTIFICATE"),
    "the authorities are not there": (lambda pod, _: (pod / "authorities.pem").unlink(), "authorities", "No such file"),
    "the volume has no room": (lambda _, patch: patch.setattr(shutil, "disk_usage", full), "space on the volume", "0 GiB free"),
    "a file is where a folder should be": (
        lambda pod, patch: patch.setenv("TUNELINE_STORE", str(pod / "authorities.pem")),
        "folder ",
        "File exists",
    ),
    "no hard links": (
        lambda _, patch: patch.setattr(os, "link", refusing(1)),
        "folder ",
        "no hard link can be made there: Operation not permitted",
    ),
    "a link that is a copy": (lambda _, patch: patch.setattr(os, "link", copying), "folder ", "a link replaced another one there"),
    "a rename that replaces": (
        lambda _, patch: patch.setattr(Path, "rename", replacing),
        "folder ",
        "a rename replaced a folder there that held something",
    ),
    "no folder may be forced out": (lambda _, patch: patch.setattr(os, "fsync", refusing(22)), "folder ", "Invalid argument"),
}


def test_a_place_as_it_should_be_has_no_finding_and_keeps_nothing_of_the_trial(pod: Path) -> None:
    assert [one for one in look(pod) if one["needed"] and not one["ok"]] == []
    left = [path for path in (pod / "workdir").rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_pod_lacks_is_found_and_says_how_it_is_mended(pod: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, called, said = BROKEN[name]
    with monkeypatch.context() as patch:
        change(pod, patch)
        found = [one for one in look(pod) if one["needed"] and not one["ok"]]
    assert found
    assert {one["name"].startswith(called) for one in found} == {True}, found
    assert said in found[0]["found"]
    assert found[0]["hint"]


def test_a_store_in_a_bucket_is_tried_and_its_refusal_said(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one takes the note is tried with a real service: tests/engines/test_s3_place.py."""
    for name, value in {
        "TUNELINE_STORE": "s3://team/tuneline",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "the-key")
    (found,) = (one for one in look(pod) if one["needed"] and not one["ok"])
    assert found["name"] == "store s3://team/tuneline"
    assert "cannot be reached: http://127.0.0.1:9 says" in found["found"]
    assert "`store` in platform.yaml" in found["hint"]
    assert "the-key" not in str(found)


def test_a_volume_that_is_not_mounted_is_found(pod: Path) -> None:
    missing = {**asked(pod), "mounts": [str(pod / "nothing"), "/"]}
    found = list(place._here(missing, Workdir(pod / "workdir"), Plain(sys.stdout)))
    assert (found[0]["needed"], found[0]["found"]) == (True, "there is no such folder")
    assert found[1]["ok"], "the root is a mount"


def test_what_a_pod_should_find_is_names_and_paths() -> None:
    assert place.wanted(platform.load(EXAMPLE)) == {
        "mounts": ["/data", "/corpus", "/etc/tuneline/certificates"],
        "variables": [
            "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GIT_PASSWORD", "GIT_USERNAME", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_USERNAME",
        ],
        "authorities": "/etc/tuneline/certificates/ca-bundle.crt",
    }  # fmt: skip


@contextlib.contextmanager
def cluster(pod: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """The API server of the cluster that this pod runs in."""
    with kubernetes_api.serving(KubernetesApi()) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(pod / "kubeconfig", api.url)))
        monkeypatch.setattr(access, "of_this_pod", access.connect)
        yield api


def test_the_pods_account_is_told_and_what_it_may_not_do_stops_nothing(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(pod, monkeypatch) as api:
        assert place._account()["found"] == kubernetes_api.USER
        api.denied.add(("caller", "create", "workflowtaskresults"))
        found = place._account()
    assert (found["ok"], found["needed"]) == (False, False)
    assert found["found"] == f"{kubernetes_api.USER} may not create workflowtaskresults"


def test_without_an_account_nothing_is_asked(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place._account()["found"] == "none, and none is needed"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setattr(access, "of_this_pod", lambda: access._from_pod())
    assert place._account()["ok"], "a pod without a token is one that asks nothing"


@pytest.mark.mlflow
def test_the_step_writes_to_mlflow_and_tells_everything_that_is_wrong_at_once(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pod / "page" / "findings.md"
    place.check(asked(pod), Workdir(pod / "workdir"), Plain(sys.stdout), page)
    rows = page.read_text(encoding="utf-8").splitlines()
    assert rows[:2] == ["| | what | found | what to do |", "|---|---|---|---|"]
    assert any("| ok | MLflow | a run and a file were written to sqlite:///" in row for row in rows)
    assert list((pod / "workdir").rglob("artifacts/findings.md")), "as every stage writes its report"
    assert not any(value in page.read_text() for value in VARIABLES.values())
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(PlatformError) as error:
        place.check(asked(pod), Workdir(pod / "workdir"), Plain(sys.stdout), page)
    assert error.value.message.startswith("this is not the place that platform.yaml describes: variable HF_TOKEN: is empty; MLflow: ")
    assert "127.0.0.1:9 does not answer: Connection refused" in error.value.message
    assert "printf %s" in error.value.hint
    assert isinstance(error.value, TunelineError)


MLFLOW_ANSWERS = {
    "experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "tuneline"}},
    "runs/create": {"run": {"info": {"run_id": "a" * 32, "experiment_id": "1"}, "data": {}}},
    "runs/get": {
        "run": {"info": {"run_id": "a" * 32, "experiment_id": "1", "artifact_uri": "mlflow-artifacts:/1/a/artifacts"}, "data": {}}
    },
}


@contextlib.contextmanager
def without_artifacts(user: str, password: str) -> Iterator[str]:
    """A stand-in for an MLflow server that takes a run and no file, as a proxy with rights of its own does; yields host and port."""
    known = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            call = urlsplit(self.path).path.partition("/mlflow/")[2]
            status = 401 if self.headers.get("Authorization") != known else 403 if "mlflow-artifacts" in self.path else 200
            body = json.dumps(MLFLOW_ANSWERS.get(call, {})).encode() if status == 200 else b"no"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.mlflow
def test_an_mlflow_that_refuses_a_file_is_told_without_the_password_of_its_address(
    pod: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = pod / "page" / "findings.md"
    with without_artifacts("ada", "s3cr/t word") as host:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:s3cr%2Ft%20word@{host}")
        with pytest.raises(PlatformError) as error:
            place.check(asked(pod), Workdir(pod / "workdir"), Plain(sys.stdout), page)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:s3cr%2Ft%20word@{host}")
        with pytest.raises(Exception, match="403") as raw, tracking.stage_run("stage") as own:
            tracking.log_files(own, page)
    printed = capfd.readouterr()
    chain = "".join(traceback.format_exception(raw.value))
    for told in (page.read_text(encoding="utf-8"), error.value.message, printed.out, printed.err, chain):
        assert "s3cr" not in told
    assert "403" in error.value.message


# In the pipeline


def test_it_comes_first_is_never_cached_and_only_where_there_is_a_platform() -> None:
    pipeline = next(yaml.safe_load_all(compiling.compiled(Customization(), Platform())))
    tasks = pipeline["root"]["dag"]["tasks"]
    assert tasks["resolve"]["dependentTasks"] == ["check-the-platform"]
    assert "enableCache" not in tasks["check-the-platform"]["cachingOptions"]
    assert "dependentTasks" not in tasks["check-the-platform"]
    alone = yaml.safe_load((ROOT / "tests" / "pipelines" / "golden" / "pipeline.yaml").read_text(encoding="utf-8"))
    assert "check-the-platform" not in alone["root"]["dag"]["tasks"]


STEP = """
from kfp import local
from pipelines.customization import check_the_platform
local.init(local.SubprocessRunner(use_venv=False), pipeline_root="runs")
check_the_platform(wanted='{"mounts": ["."], "variables": ["HF_TOKEN"], "authorities": ""}')
"""


def test_the_step_runs_as_kubeflow_runs_it_and_fails_before_any_other(pod: Path) -> None:
    given = environment(HF_TOKEN="x\n", MLFLOW_TRACKING_URI="http://127.0.0.1:9", TUNELINE_WORKDIR=str(pod / "volume"))
    done = subprocess.run([sys.executable, "-P", "-c", STEP], cwd=pod, env=given, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "MISSING: variable HF_TOKEN: begins or ends with a space or a line break" in said
    assert "MISSING: MLflow: " in said
