"""The first step of a pipeline checks the environment of its pod. This process acts as the pod, with a local MLflow file.

long: compiling the pipeline takes seconds.
"""

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

from components.common.reporting import mlflow_tracking
from components.common.reporting.check_findings import CheckResult
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import PlainTextReporter
from components.common.workspace.artifact_store import Workdir
from pipelines.config import platform_config
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.definition import compilation
from pipelines.kubeflow.preflight import cluster_api
from pipelines.steps import platform_check
from pipelines.steps.platform_check import PlatformError
from tests import kubernetes_api
from tests.kubernetes_api import KubernetesApi, kubeconfig
from tests.pipelines.command import ROOT, environment

EXAMPLE = ROOT / "deploy" / "overlays" / "xe9680-powerscale" / "platform.yaml"
VARIABLES = {"HF_TOKEN": "the-hub-token", "MLFLOW_TRACKING_TOKEN": "the-mlflow-token"}
NOTIFICATION_VARIABLE = "TUNELINE_NOTIFICATION_1"
RENAME = Path.rename
Fault = Callable[[Path, pytest.MonkeyPatch], Any]


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that acts as the volume, and the environment variables of a pod."""
    for name, value in {**VARIABLES, NOTIFICATION_VARIABLE: "json://hooks.example/the-webhook-token"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "workdir" / "cache"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    shutil.copy(certifi.where(), tmp_path / "authorities.pem")
    return tmp_path


def get_expected_environment(pod: Path) -> dict[str, Any]:
    return {
        "mounts": [str(pod)],
        "variables": sorted(VARIABLES),
        "notifications": {NOTIFICATION_VARIABLE: "notify/chat"},
        "authorities": str(pod / "authorities.pem"),
    }


def run_checks(pod: Path) -> list[CheckResult]:
    """Run the checks without MLflow."""
    return platform_check._check_pod(
        get_expected_environment(pod), Workdir(pod / "workdir"), PlainTextReporter(sys.stdout)
    )


def raise_os_error(error: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    return fail


def rename_and_replace(self: Path, target: Path) -> Path:
    """Rename as some FUSE file systems do: replace a non-empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    return RENAME(self, target)


def report_full_disk(folder: Path) -> Any:
    return shutil._ntuple_diskusage(10**12, 10**12 - 1000, 1000)  # type: ignore[attr-defined]


def copy_as_link(source: Path, target: Path) -> None:
    """Link as an object store does: copy over an existing file."""
    shutil.copyfile(source, target)


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "secret missing": (lambda _, patch: patch.delenv("HF_TOKEN"), "variable HF_TOKEN", "is not set"),
    "secret empty": (lambda _, patch: patch.setenv("HF_TOKEN", ""), "variable HF_TOKEN", "is empty"),
    "secret with line break": (
        lambda _, patch: patch.setenv("HF_TOKEN", "x\n"),
        "variable HF_TOKEN",
        "ends with a space or a line break",
    ),
    "notification not set": (
        lambda _, patch: patch.delenv(NOTIFICATION_VARIABLE),
        "notification notify/chat",
        "is not set",
    ),
    "notification of an unknown service": (
        lambda _, patch: patch.setenv(NOTIFICATION_VARIABLE, "chat://the-webhook-token"),
        "notification notify/chat",
        "Apprise does not support the URL",
    ),
    "CA certificates invalid": (
        lambda pod, _: (pod / "authorities.pem").write_text("<html>"),
        "authorities",
        "NO_CERTIFICATE",
    ),
    "CA certificates missing": (lambda pod, _: (pod / "authorities.pem").unlink(), "authorities", "No such file"),
    "volume full": (
        lambda _, patch: patch.setattr(shutil, "disk_usage", report_full_disk),
        "space on the volume",
        "0 GiB free",
    ),
    "file instead of a folder": (
        lambda pod, patch: patch.setenv("TUNELINE_STORE", str(pod / "authorities.pem")),
        "folder ",
        "File exists",
    ),
    "no hard links": (
        lambda _, patch: patch.setattr(os, "link", raise_os_error(1)),
        "folder ",
        "no hard link can be created: Operation not permitted",
    ),
    "link that copies": (
        lambda _, patch: patch.setattr(os, "link", copy_as_link),
        "folder ",
        "a hard link replaced an existing file",
    ),
    "rename that replaces": (
        lambda _, patch: patch.setattr(Path, "rename", rename_and_replace),
        "folder ",
        "a rename replaced a folder that is not empty",
    ),
    "no fsync of folders": (
        lambda _, patch: patch.setattr(os, "fsync", raise_os_error(22)),
        "folder ",
        "Invalid argument",
    ),
}


def test_correct_environment_passes_and_no_trial_file_is_left(pod: Path) -> None:
    assert [finding for finding in run_checks(pod) if finding["needed"] and not finding["ok"]] == []
    files = [path for path in (pod / "workdir").rglob("*") if path.is_file()]
    assert files == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_reported_with_a_hint(pod: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, check, message = FAULTS[name]
    with monkeypatch.context() as patch:
        change(pod, patch)
        findings = [finding for finding in run_checks(pod) if finding["needed"] and not finding["ok"]]
    assert findings
    assert {finding["name"].startswith(check) for finding in findings} == {True}, findings
    assert message in findings[0]["found"]
    assert findings[0]["hint"]


def test_unreachable_bucket_store_is_reported(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/engines/test_s3_environment.py covers an accepted write to a real service."""
    for name, value in {
        "TUNELINE_STORE": "s3://team/tuneline",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "the-key")
    (finding,) = (finding for finding in run_checks(pod) if finding["needed"] and not finding["ok"])
    assert finding["name"] == "store s3://team/tuneline"
    assert "cannot be reached at http://127.0.0.1:9: " in finding["found"]
    assert "`store` in platform.yaml" in finding["hint"]
    assert "the-key" not in str(finding)


def test_missing_mount_is_reported(pod: Path) -> None:
    expected = {**get_expected_environment(pod), "mounts": [str(pod / "nothing"), "/"]}
    findings = platform_check._check_pod(expected, Workdir(pod / "workdir"), PlainTextReporter(sys.stdout))
    assert (findings[0]["needed"], findings[0]["found"]) == (True, "not an existing folder")
    assert findings[1]["ok"], "the root is a mount"


def test_expected_environment_has_names_and_paths_only() -> None:
    assert platform_check.describe_expected(platform_config.load_platform(EXAMPLE)) == {
        "mounts": ["/data", "/corpus", "/etc/tuneline/certificates"],
        "variables": [
            "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GIT_PASSWORD", "GIT_USERNAME", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_USERNAME",
        ],
        "notifications": {},
        "authorities": "/etc/tuneline/certificates/ca-bundle.crt",
    }  # fmt: skip


@contextlib.contextmanager
def serve_cluster(pod: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """Run the API server of the pod's cluster."""
    with kubernetes_api.serving(KubernetesApi()) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(pod / "kubeconfig", api.url)))
        monkeypatch.setattr(cluster_api, "connect_in_cluster", cluster_api.connect)
        yield api


def test_missing_right_of_the_service_account_does_not_fail_the_step(
    pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_cluster(pod, monkeypatch) as api:
        assert platform_check._check_service_account()["found"] == kubernetes_api.USER
        api.denied.add(("caller", "create", "workflowtaskresults"))
        finding = platform_check._check_service_account()
    assert (finding["ok"], finding["needed"]) == (False, False)
    assert finding["found"] == f"{kubernetes_api.USER} may not create workflowtaskresults"


def test_pod_without_a_service_account_passes(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform_check._check_service_account()["found"] == "not set; tuneline does not require a service account"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    assert platform_check._check_service_account()["ok"], "a pod without a token makes no API calls"


@pytest.mark.mlflow
def test_step_writes_to_mlflow_and_reports_all_failures_together(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pod / "page" / "findings.md"
    platform_check.check_platform(
        get_expected_environment(pod), Workdir(pod / "workdir"), PlainTextReporter(sys.stdout), page
    )
    rows = page.read_text(encoding="utf-8").splitlines()
    assert rows[:2] == ["| | check | found | action |", "|---|---|---|---|"]
    assert any("| ok | MLflow | a run and a file were written to sqlite:///" in row for row in rows)
    assert list((pod / "workdir").rglob("artifacts/findings.md")), "logged like the report of a stage"
    assert not any(value in page.read_text() for value in VARIABLES.values())
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(PlatformError) as error:
        platform_check.check_platform(
            get_expected_environment(pod), Workdir(pod / "workdir"), PlainTextReporter(sys.stdout), page
        )
    assert error.value.message.startswith(
        "the environment does not match platform.yaml: variable HF_TOKEN: is empty; MLflow: "
    )
    assert "127.0.0.1:9 does not answer: Connection refused" in error.value.message
    assert "printf %s" in error.value.hint
    assert isinstance(error.value, TunelineError)


MLFLOW_ANSWERS = {
    "experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "tuneline"}},
    "runs/create": {"run": {"info": {"run_id": "a" * 32, "experiment_id": "1"}, "data": {}}},
    "runs/get": {
        "run": {
            "info": {"run_id": "a" * 32, "experiment_id": "1", "artifact_uri": "mlflow-artifacts:/1/a/artifacts"},
            "data": {},
        }
    },
}


@contextlib.contextmanager
def serve_mlflow_without_artifacts(user: str, password: str) -> Iterator[str]:
    """Serve an MLflow API that accepts runs and denies files, as a proxy with separate rights does; yields host and port."""
    authorization = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            call = urlsplit(self.path).path.partition("/mlflow/")[2]
            status = (
                401
                if self.headers.get("Authorization") != authorization
                else 403
                if "mlflow-artifacts" in self.path
                else 200
            )
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
def test_mlflow_file_error_is_reported_without_the_password(
    pod: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = pod / "page" / "findings.md"
    with serve_mlflow_without_artifacts("ada", "s3cr/t word") as host:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:s3cr%2Ft%20word@{host}")
        with pytest.raises(PlatformError) as error:
            platform_check.check_platform(
                get_expected_environment(pod), Workdir(pod / "workdir"), PlainTextReporter(sys.stdout), page
            )
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:s3cr%2Ft%20word@{host}")
        with pytest.raises(Exception, match="403") as upload_error, mlflow_tracking.stage_run("stage") as run:
            mlflow_tracking.log_files(run, page)
    printed = capfd.readouterr()
    chain = "".join(traceback.format_exception(upload_error.value))
    for text in (page.read_text(encoding="utf-8"), error.value.message, printed.out, printed.err, chain):
        assert "s3cr" not in text
    assert "403" in error.value.message


# Compiled pipeline


@pytest.mark.long
def test_step_runs_first_uncached_and_only_with_a_platform() -> None:
    pipeline = next(yaml.safe_load_all(compilation.compile_pipeline(Customization(), Platform())))
    group = pipeline["root"]["dag"]["tasks"]["exit-handler-1"]["componentRef"]["name"]
    tasks = pipeline["components"][group]["dag"]["tasks"]
    assert tasks["resolve"]["dependentTasks"] == ["check-the-platform"]
    assert "enableCache" not in tasks["check-the-platform"]["cachingOptions"]
    assert "dependentTasks" not in tasks["check-the-platform"]
    without_platform = yaml.safe_load(
        (ROOT / "tests" / "pipelines" / "golden" / "pipeline.yaml").read_text(encoding="utf-8")
    )
    assert "check-the-platform" not in without_platform["root"]["dag"]["tasks"]


STEP = """
from kfp import local
from pipelines.definition.customization_pipeline import check_the_platform
local.init(local.SubprocessRunner(use_venv=False), pipeline_root="runs")
check_the_platform(wanted='{"mounts": ["."], "variables": ["HF_TOKEN"], "notifications": {}, "authorities": ""}')
"""


def test_step_run_by_kfp_fails_on_a_wrong_environment(pod: Path) -> None:
    variables = environment(
        HF_TOKEN="x\n", MLFLOW_TRACKING_URI="http://127.0.0.1:9", TUNELINE_WORKDIR=str(pod / "volume")
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", STEP],
        cwd=pod,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = process.stdout + process.stderr
    assert process.returncode != 0
    assert "MISSING: variable HF_TOKEN: begins or ends with a space or a line break" in output
    assert "MISSING: MLflow: " in output
