"""MLflow tracking on a SQLite store and on a real server."""

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

from components.common import pipeline_step
from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.artifacts.code_digest import ROOT
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import EngineMissingError, InterruptedRunError, UsageError
from components.common.runtime.reporters import SilentReporter
from components.common.runtime.user_name import get_user_name
from components.common.workspace.artifact_store import Workdir
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
    artifact_folder.claim_folder(folder, "key")
    (folder / "train.parquet").write_bytes(b"rows")
    (folder / "report.html").write_text("<p>report</p>")
    config = {"sources": ["a", "b"], "filters": {"min_chars": 3}, "wide": {f"knob{i}": i for i in range(150)}}
    summary = {
        "rows": {"in": 5, "kept": 4},
        "splits": {"train": 4},
        "verdict": "accepted",
        "loss (test)": 1.5,
        "flag": True,
    }
    return artifact_folder.publish(
        folder, "dataset", payload=["train.parquet"], inputs=[], config=config, seed=1, key="key", summary=summary
    )


def client() -> Any:
    return mlflow_tracking.connect().MlflowClient()


def test_stage_run_is_nested_under_customization_run(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = mlflow_tracking.start_run("customization", {"tuneline.run": "r1"})
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    with mlflow_tracking.stage_run("fine_tuning") as reporter:
        reporter.metrics({"loss": 3.0, "eval:loss": 2.5, "odd (name)%": 1.0}, step=1)
        reporter.metrics({"loss": 2.0}, step=2)
        reporter.note("a note")
    mlflow_tracking.end_run(parent, "FINISHED")
    stage, top = client().get_run(reporter.run_id), client().get_run(parent)
    assert stage.data.tags["mlflow.parentRunId"] == parent
    assert stage.data.metrics == {"loss": 2.0, "eval/loss": 2.5, "odd _name__": 1.0}
    assert [(m.step, m.value) for m in client().get_metric_history(reporter.run_id, "loss")] == [(1, 3.0), (2, 2.0)]
    assert (stage.info.status, stage.info.run_name, stage.data.tags["tuneline.note"]) == (
        "FINISHED",
        "fine_tuning",
        "a note",
    )
    assert (top.info.status, top.info.run_name) == ("FINISHED", "customization")
    assert stage.info.experiment_id == top.info.experiment_id


def test_customization_run_is_nested_under_scheduler_run(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    existing = client().get_experiment_by_name("scheduler")
    experiment = existing.experiment_id if existing else client().create_experiment("scheduler")
    outer = client().create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", outer)
    inner = client().get_run(mlflow_tracking.start_run("customization", {}))
    assert inner.data.tags["mlflow.parentRunId"] == outer
    assert inner.info.experiment_id == experiment


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "FAILED"), (InterruptedRunError("stop"), "KILLED")])
def test_stage_error_sets_run_status_and_is_raised(store: str, error: Exception, status: str) -> None:
    with pytest.raises(type(error)), mlflow_tracking.stage_run("evaluation") as reporter:
        raise error
    assert client().get_run(reporter.run_id).info.status == status


def test_result_logs_params_metrics_manifest_and_report(store: str, artifact: Artifact, tmp_path: Path) -> None:
    with mlflow_tracking.stage_run("data_curation") as reporter:
        reporter.log_result(artifact)
    run = client().get_run(reporter.run_id)
    assert run.data.params["filters.min_chars"] == "3"
    assert run.data.params["sources"] == "['a', 'b']"
    assert run.data.params["wide.knob149"] == "149"
    assert run.data.metrics == {"rows.in": 5.0, "rows.kept": 4.0, "splits.train": 4.0, "loss _test_": 1.5}
    assert run.data.tags["tuneline.dataset_sha256"] == artifact.sha256
    assert sorted(f.path for f in client().list_artifacts(reporter.run_id)) == ["manifest.json", "report.html"]
    downloaded = Path(client().download_artifacts(reporter.run_id, "manifest.json", str(tmp_path)))
    assert downloaded.read_bytes() == (artifact.path / "manifest.json").read_bytes()


def test_splits_are_logged_as_dvc_inputs(store: str, artifact: Artifact) -> None:
    with mlflow_tracking.stage_run("data_versioning") as reporter:
        reporter.log_dataset(artifact, name="dataset-v1", source=SOURCE)
        reporter.log_dataset(artifact, name="dataset-v1", source=SOURCE)
    inputs = client().get_run(reporter.run_id).inputs.dataset_inputs
    by_context = {one.tags[0].value: one.dataset for one in inputs}
    assert len(inputs) == 3
    assert set(by_context) == {"train", "validation", "test"}
    for split, dataset in by_context.items():
        assert (dataset.source_type, dataset.name) == ("dvc", f"dataset-v1/{split}")
        assert artifact.sha256.startswith(dataset.digest)
        store_uri = f"{artifact.path.as_uri()}/{split}.parquet"
        assert json.loads(dataset.source) == {**SOURCE, "store_uri": store_uri}
    assert json.loads(by_context["train"].profile) == {"num_rows": 4}


def test_dvc_input_is_returned_by_rest_api(server: str, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    with mlflow_tracking.stage_run("data_versioning") as reporter:
        reporter.log_dataset(artifact, name="dataset-v1", source=SOURCE)
    query = urllib.parse.urlencode({"run_id": reporter.run_id})
    with urllib.request.urlopen(f"{server}/api/2.0/mlflow/runs/get?{query}", timeout=60) as response:
        inputs = json.load(response)["run"]["inputs"]["dataset_inputs"]
    assert {one["dataset"]["source_type"] for one in inputs} == {"dvc"}
    contexts = sorted(tag["value"] for one in inputs for tag in one["tags"] if tag["key"] == "mlflow.data.context")
    assert contexts == ["test", "train", "validation"]


def test_runs_name_user_program_and_commit(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance = {"tuneline": "0.1.0", "git_commit": f"{'c0ffee' * 6}c0ff+changes"}
    monkeypatch.setattr(artifact_folder, "collect_provenance", lambda: provenance)
    with mlflow_tracking.stage_run("fine_tuning") as stage, mlflow_tracking.nested_run(stage, "recipe") as nested:
        pass
    for reporter in (stage, nested):
        run = client().get_run(reporter.run_id)
        assert run.data.tags["mlflow.user"] == get_user_name()
        assert run.data.tags["mlflow.source.name"] == "tuneline 0.1.0"
        assert run.data.tags["mlflow.source.type"] == "LOCAL"
        assert run.data.tags["mlflow.source.git.commit"] == f"{'c0ffee' * 6}c0ff"
        assert run.data.tags["mlflow.git.dirty"] == "true"


def test_reused_result_links_the_run_that_built_it(store: str, artifact: Artifact) -> None:
    with mlflow_tracking.stage_run("data_curation") as first:
        first.metrics({"rows_per_second": 5.0}, step=1)
        first.log_result(artifact)
    runs = []
    for _ in range(2):
        with mlflow_tracking.stage_run("data_curation") as reporter:
            reporter.log_reuse("data_curation", artifact)
            reporter.log_result(artifact)
        runs.append(client().get_run(reporter.run_id))
    original = min(find_original(artifact), key=lambda run: run.info.start_time).info.run_id
    for run in runs:
        assert (run.data.tags["tuneline.reused"], run.data.tags["tuneline.original_run"]) == ("true", original)
        assert original in run.data.tags["mlflow.note.content"]
        assert "rows_per_second" not in run.data.metrics
        assert run.data.metrics["rows.kept"] == 4.0


def find_original(artifact: Artifact) -> list[Any]:
    experiment = client().get_experiment_by_name(mlflow_tracking.EXPERIMENT).experiment_id
    return list(client().search_runs([experiment], f"tags.`tuneline.dataset_sha256` = '{artifact.sha256}'"))


def test_reused_result_without_original_run_is_marked(store: str, artifact: Artifact) -> None:
    with mlflow_tracking.stage_run("evaluation") as reporter:
        reporter.log_reuse("another_stage", artifact)
    tags = client().get_run(reporter.run_id).data.tags
    assert (tags["tuneline.stage"], tags["tuneline.reused"]) == ("another_stage", "true")
    assert "tuneline.original_run" not in tags


def test_logged_parameter_keeps_its_first_value(store: str) -> None:
    with mlflow_tracking.stage_run("evaluation") as reporter:
        reporter.log_params({"seed": 1})
        reporter.log_params({"seed": 2, "rate": 0.5})
    assert client().get_run(reporter.run_id).data.params == {"seed": "1", "rate": "0.5"}


def test_interval_gives_two_metrics() -> None:
    scores = {"held_out": {"loss": {"candidate": 1.0, "base": 2, "incumbent": None, "ci95": [-1.5, -0.5], "n": 9}}}
    assert mlflow_tracking.extract_metrics(scores) == {
        "held_out.loss.candidate": 1.0,
        "held_out.loss.base": 2.0,
        "held_out.loss.ci95.low": -1.5,
        "held_out.loss.ci95.high": -0.5,
        "held_out.loss.n": 9.0,
    }
    assert mlflow_tracking.extract_metrics({"loss": {"ci95": None}}) == {}


def test_unknown_parent_run_is_usage_error(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(UsageError, match="MLFLOW_RUN_ID"):
        mlflow_tracking.start_run("customization", {})
    with pytest.raises(UsageError, match="MLFLOW_RUN_ID"), mlflow_tracking.stage_run("evaluation"):
        pass


def test_unreachable_server_is_reported_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(EngineMissingError, match="does not answer"):
        mlflow_tracking.start_run("customization", {})
    assert time.monotonic() - began < 30


def test_unresponsive_server_is_reported_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(mlflow_tracking, "PROBE_TIMEOUT_SECONDS", 2.0)
        began = time.monotonic()
        with pytest.raises(EngineMissingError, match="does not answer"):
            mlflow_tracking.connect()
        assert time.monotonic() - began < 20


def test_new_sqlite_store_is_silent_with_artifacts_beside_it(tmp_path: Path, artifact: Artifact) -> None:
    program = (
        "import sys; from pathlib import Path; from components.common.artifacts import artifact_folder\n"
        "from components.common.reporting import mlflow_tracking\n"
        "run = mlflow_tracking.start_run('customization', {})\n"
        "import os; os.environ['MLFLOW_RUN_ID'] = run\n"
        "with mlflow_tracking.stage_run('s') as reporter: reporter.log_result(artifact_folder.read(Path(sys.argv[1])))\n"
    )
    current_folder = tmp_path / "current-folder"
    current_folder.mkdir()
    environment = {
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", program, str(artifact.path)]
    result = subprocess.run(command, cwd=current_folder, env=environment, text=True, capture_output=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
    assert list(current_folder.iterdir()) == []
    assert list((tmp_path / "mlflow-artifacts").rglob("manifest.json"))


def test_tracking_is_disabled_without_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert not mlflow_tracking.is_enabled()


def test_credentials_in_uri_work_and_stay_out_of_errors(server: str) -> None:
    mlflow_tracking._check_server(server.replace("http://", "http://ada:s3cret@"))
    with pytest.raises(EngineMissingError) as error:
        mlflow_tracking._check_server("http://ada:s3cret@127.0.0.1:9")
    assert "ada@127.0.0.1:9" in error.value.message
    assert "s3cret" not in error.value.message


def test_missing_database_driver_error_names_module() -> None:
    with pytest.raises(EngineMissingError) as error:
        mlflow_tracking._check_server("mssql+pyodbc://u:s3cret@db/mlflow")
    assert (
        error.value.message
        == "the tracking store mssql+pyodbc://u@db/mlflow requires the Python module pyodbc, which is not installed"
    )
    assert error.value.hint == "Install the database driver that provides the module pyodbc."


@pytest.mark.parametrize("variable", ["TUNELINE_MLFLOW_UI", "MLFLOW_TRACKING_URI"])
@pytest.mark.parametrize("credentials", ["ada:s3cret@", "a-token@", "a-token:@", ""])
def test_version_link_contains_no_credentials(monkeypatch: pytest.MonkeyPatch, variable: str, credentials: str) -> None:
    monkeypatch.setenv(variable, f"https://{credentials}mlflow.example/ui/")
    assert (
        mlflow_tracking.format_version_link("mine", "3")
        == "[mine version 3](https://mlflow.example/ui/#/models/mine/versions/3)"
    )


def test_links_are_written_without_reachable_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    step = pipeline_step.Step(
        "s", SilentReporter(), Workdir.from_environment(), mlflow_tracking.MlflowReporter(None, "f00d")
    )
    step.write_links(str(tmp_path / "links.md"), model="abc")
    assert (tmp_path / "links.md").read_text() == "- MLflow run f00d\n- model: abc\n"
