"""Runs in MLflow, on a SQLite store and on a real server alike."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, step, tracking
from components.common.artifacts import Artifact
from components.common.errors import EngineMissingError, InterruptedRunError, UsageError
from components.common.hashing import ROOT
from components.common.places import Workdir
from components.common.progress import Silent
from tests.mlflow_server import free_port, mlflow_server

pytestmark = pytest.mark.mlflow
SOURCE = {"repo": "/data/repository", "path": "datasets/d", "rev": "0123456789abcdef", "md5": "99.dir"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture(params=["sqlite", "server"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = request.getfixturevalue(request.param)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    return uri


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    folder = tmp_path / "artifact"
    artifacts.begin(folder, "key")
    (folder / "train.parquet").write_bytes(b"rows")
    (folder / "report.html").write_text("<p>report</p>")
    config = {"sources": ["a", "b"], "filters": {"min_chars": 3}, "wide": {f"knob{i}": i for i in range(150)}}
    summary = {"rows": {"in": 5, "kept": 4}, "verdict": "accepted", "loss (test)": 1.5, "flag": True}
    return artifacts.publish(folder, "dataset", payload=["train.parquet"], inputs=[], config=config, seed=1, key="key", summary=summary)


def client() -> Any:
    return tracking.connect().MlflowClient()


def test_a_stage_is_a_run_under_the_run_of_its_customization(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tracking.start_run("customization", {"tuneline.run": "r1"})
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    with tracking.stage_run("fine_tuning") as reporter:
        reporter.metrics({"loss": 3.0, "eval:loss": 2.5, "odd (name)%": 1.0}, step=1)
        reporter.metrics({"loss": 2.0}, step=2)
        reporter.note("a note")
    tracking.end_run(parent, "FINISHED", {"tuneline.verdict": "accepted"})
    stage, top = client().get_run(reporter.run_id), client().get_run(parent)
    assert stage.data.tags["mlflow.parentRunId"] == parent
    assert stage.data.metrics == {"loss": 2.0, "eval/loss": 2.5, "odd _name__": 1.0}
    assert [(m.step, m.value) for m in client().get_metric_history(reporter.run_id, "loss")] == [(1, 3.0), (2, 2.0)]
    assert (stage.info.status, stage.info.run_name, stage.data.tags["tuneline.note"]) == ("FINISHED", "fine_tuning", "a note")
    assert (top.info.status, top.info.run_name, top.data.tags["tuneline.verdict"]) == ("FINISHED", "customization", "accepted")
    assert stage.info.experiment_id == top.info.experiment_id


def test_a_customization_nests_under_the_run_of_a_scheduler_in_its_experiment(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = client().get_experiment_by_name("scheduler")
    experiment = elsewhere.experiment_id if elsewhere else client().create_experiment("scheduler")
    outer = client().create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", outer)
    inner = client().get_run(tracking.start_run("customization", {}))
    assert inner.data.tags["mlflow.parentRunId"] == outer
    assert inner.info.experiment_id == experiment


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "FAILED"), (InterruptedRunError("stop"), "KILLED")])
def test_a_stage_that_raises_ends_its_run_and_keeps_its_error(store: str, error: Exception, status: str) -> None:
    with pytest.raises(type(error)), tracking.stage_run("evaluation") as reporter:
        raise error
    assert client().get_run(reporter.run_id).info.status == status


def test_a_result_leaves_its_configuration_figures_manifest_and_report(store: str, artifact: Artifact, tmp_path: Path) -> None:
    with tracking.stage_run("data_curation") as reporter:
        reporter.result(artifact)
    run = client().get_run(reporter.run_id)
    assert run.data.params["filters.min_chars"] == "3"
    assert run.data.params["sources"] == "['a', 'b']"
    assert run.data.params["wide.knob149"] == "149"
    assert run.data.metrics == {"rows.in": 5.0, "rows.kept": 4.0, "loss _test_": 1.5}
    assert run.data.tags["tuneline.dataset_sha256"] == artifact.sha256
    assert sorted(f.path for f in client().list_artifacts(reporter.run_id)) == ["manifest.json", "report.html"]
    got = Path(client().download_artifacts(reporter.run_id, "manifest.json", str(tmp_path)))
    assert got.read_bytes() == (artifact.path / "manifest.json").read_bytes()


def test_a_dataset_version_is_an_input_of_type_dvc(store: str, artifact: Artifact) -> None:
    with tracking.stage_run("data_versioning") as reporter:
        reporter.dataset(artifact, name="dataset-v1", source=SOURCE)
    [logged] = client().get_run(reporter.run_id).inputs.dataset_inputs
    assert (logged.dataset.source_type, logged.dataset.name) == ("dvc", "dataset-v1")
    assert json.loads(logged.dataset.source) == SOURCE
    assert artifact.sha256.startswith(logged.dataset.digest)


def test_the_dvc_input_is_seen_over_rest(server: str, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    with tracking.stage_run("data_versioning") as reporter:
        reporter.dataset(artifact, name="dataset-v1", source=SOURCE)
    query = urllib.parse.urlencode({"run_id": reporter.run_id})
    with urllib.request.urlopen(f"{server}/api/2.0/mlflow/runs/get?{query}", timeout=60) as answer:
        [logged] = json.load(answer)["run"]["inputs"]["dataset_inputs"]
    assert (logged["dataset"]["source_type"], json.loads(logged["dataset"]["source"])) == ("dvc", SOURCE)
    assert logged["tags"] == [{"key": "mlflow.data.context", "value": "training"}]


def test_a_run_that_the_server_does_not_have_is_told_as_such(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(UsageError, match="MLFLOW_RUN_ID"):
        tracking.start_run("customization", {})
    with pytest.raises(UsageError, match="MLFLOW_RUN_ID"), tracking.stage_run("evaluation"):
        pass


def test_a_server_that_is_down_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(EngineMissingError, match="does not answer"):
        tracking.start_run("customization", {})
    assert time.monotonic() - began < 30


def test_a_server_that_accepts_and_says_nothing_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(tracking, "PROBE_SECONDS", 2.0)
        began = time.monotonic()
        with pytest.raises(EngineMissingError, match="does not answer"):
            tracking.connect()
        assert time.monotonic() - began < 20


def test_a_fresh_sqlite_store_is_made_quietly_and_keeps_its_artifacts_beside_it(tmp_path: Path, artifact: Artifact) -> None:
    program = (
        "import sys; from pathlib import Path; from components.common import artifacts, tracking\n"
        "run = tracking.start_run('customization', {})\n"
        "import os; os.environ['MLFLOW_RUN_ID'] = run\n"
        "with tracking.stage_run('s') as reporter: reporter.result(artifacts.read(Path(sys.argv[1])))\n"
    )
    elsewhere = tmp_path / "current-folder"
    elsewhere.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program, str(artifact.path)]
    done = subprocess.run(command, cwd=elsewhere, env=environment, text=True, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert list(elsewhere.iterdir()) == []
    assert list((tmp_path / "mlflow-artifacts").rglob("manifest.json"))


def test_nothing_is_tracked_without_a_server_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert not tracking.enabled()


def test_a_server_named_with_user_and_password_is_found_and_a_missing_one_does_not_repeat_them(server: str) -> None:
    tracking._check_answers(server.replace("http://", "http://ada:s3cret@"))
    with pytest.raises(EngineMissingError) as missing:
        tracking._check_answers("http://ada:s3cret@127.0.0.1:9")
    assert "ada@127.0.0.1:9" in missing.value.message
    assert "s3cret" not in missing.value.message


def test_a_database_whose_driver_is_missing_is_said_with_what_to_install() -> None:
    with pytest.raises(EngineMissingError) as missing:
        tracking._check_answers("mssql+pyodbc://u:s3cret@db/mlflow")
    assert missing.value.message == "the tracking store mssql+pyodbc://u@db/mlflow needs the package pyodbc"
    assert missing.value.hint == "pip install pyodbc"


@pytest.mark.parametrize("name", ["TUNELINE_MLFLOW_UI", "MLFLOW_TRACKING_URI"])
@pytest.mark.parametrize("who", ["ada:s3cret@", "a-token@", "a-token:@", ""])
def test_a_link_leads_to_mlflow_without_user_and_password(monkeypatch: pytest.MonkeyPatch, name: str, who: str) -> None:
    monkeypatch.setenv(name, f"https://{who}mlflow.example/ui/")
    assert tracking.link_to_version("mine", "3") == "[mine version 3](https://mlflow.example/ui/#/models/mine/versions/3)"


def test_a_server_that_is_gone_when_all_is_done_costs_the_link_and_not_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    done = step.Step("s", Silent(), Workdir.from_environment(), tracking.MlflowReporter(None, "f00d"))
    done.show_links(str(tmp_path / "links.md"), model="abc")
    assert (tmp_path / "links.md").read_text() == "- MLflow run f00d\n- model: abc\n"
