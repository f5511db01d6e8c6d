"""The whole customization through kfp.local, with a tiny random Llama and every real engine: DVC, Daft, MLflow, Triton."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from components.common import artifacts
from tests.pipelines.command import COMMAND, ROOT, environment, refusal, tuneline
from tests.pipelines.project import run, write_rows

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
KINDS = {"dataset", "model", "evaluation", "repository"}


def cached(result: dict[str, Any]) -> set[str]:
    return {stage["name"] for stage in result["stages"] if stage["cached"]}


def digests(result: dict[str, Any]) -> dict[str, str]:
    return {kind: artifacts.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items() if path}


STAGES = {"data_curation", "data_versioning", "fine_tuning", "evaluation", "triton_packaging"}


def test_a_run_ends_with_a_promoted_model_and_says_where_everything_is(first: dict[str, Any], project: Path) -> None:
    assert first["verdict"] == "accepted"
    assert first["workdir"] == str(project / "wd")
    assert set(digests(first)) == KINDS
    assert cached(first) == set()
    assert [stage["name"] for stage in first["stages"]] == [
        "resolve", "data_curation", "data_versioning", "fine_tuning", "evaluation", "triton_packaging", "registration", "promotion",
    ]  # fmt: skip
    assert first["mlflow"]["model_name"] == "tiny-helper"
    assert first["mlflow"]["model_version"] == "1"
    assert set(first["mlflow"]["aliases"]) == {"candidate", "challenger", "champion"}
    assert Path(first["report"]).read_text().startswith("<!doctype html>")
    assert first["seconds"] > sum(stage["seconds"] for stage in first["stages"]) * 0.9


def test_lineage_goes_from_the_repository_to_the_raw_file(first: dict[str, Any], project: Path) -> None:
    found = {kind: artifacts.read(Path(path), kind).manifest for kind, path in first["artifacts"].items()}
    repository_of = found["repository"].input("model")
    model_of = found["model"].input("dataset")
    assert repository_of is not None
    assert model_of is not None
    assert repository_of.content_sha256 == found["model"].content_sha256
    assert model_of.content_sha256 == found["dataset"].content_sha256
    assert model_of.uri.startswith("dvc://")
    assert any(i.uri.endswith("raw.jsonl") for i in found["dataset"].inputs)


def test_one_mlflow_run_holds_a_nested_run_a_stage_with_metrics_and_the_dataset_version(first: dict[str, Any]) -> None:
    import mlflow

    client = mlflow.MlflowClient(first["mlflow"]["tracking_uri"])
    parent = client.get_run(first["mlflow"]["run_id"])
    assert parent.info.status == "FINISHED"
    [dataset] = parent.inputs.dataset_inputs
    assert dataset.dataset.source_type == "dvc"
    assert {"repo", "path", "rev", "md5"} <= set(json.loads(dataset.dataset.source))
    nested = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    by_stage = {r.data.tags["tuneline.stage"]: r for r in nested}
    assert STAGES | {"resolve", "registration", "promotion", "report"} == set(by_stage)
    assert len(client.get_metric_history(by_stage["fine_tuning"].info.run_id, "train_loss")) >= 30
    tags = client.get_model_version("tiny-helper", "1").tags
    assert tags["tuneline.model_sha256"] == artifacts.read(Path(first["artifacts"]["model"])).sha256
    assert (tags["tuneline.verdict"], tags["tuneline.proof"]) == ("accepted", "proven")


def test_the_packaged_model_is_served_over_http_and_grpc_until_it_is_asked_to_stop(first: dict[str, Any], project: Path) -> None:
    from tritonclient import grpc

    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command = [*COMMAND, "serve", first["artifacts"]["repository"], *ports, "--json"]
    server = subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        name, streaming = ready["models"]
        assert streaming == f"{name}_stream"
        body = json.dumps({"text_input": "What opens a file in case 0?", "max_tokens": 4}).encode()
        with urllib.request.urlopen(f"{ready['http']}/v2/models/{name}/generate", body, timeout=60) as response:
            over_http = json.loads(response.read())
        text = grpc.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"What opens a file in case 0?"], dtype=object))
        tokens = grpc.InferInput("max_tokens", [1], "INT32")
        tokens.set_data_from_numpy(np.array([4], dtype=np.int32))
        over_grpc = grpc.InferenceServerClient(ready["grpc"]).infer(name, [text, tokens]).as_numpy("text_output")[0]
        assert over_grpc.decode() == over_http["text_output"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


def test_the_second_run_finds_every_stage_cached_and_nothing_moves(first: dict[str, Any], project: Path) -> None:
    again = run(project, "wd")
    assert again["verdict"] == "unchanged"
    assert cached(again) == STAGES
    assert digests(again) == digests(first)
    assert again["mlflow"]["model_version"] == "1"


@pytest.mark.long
def test_another_learning_rate_runs_again_from_fine_tuning_on(first: dict[str, Any], project: Path) -> None:
    result = run(project, "wd", "--set", "fine_tuning.learning_rate=1e-6")
    assert cached(result) == {"data_curation", "data_versioning"}
    assert result["verdict"] == "refused", "a model that learned almost nothing does not replace one that learned"
    assert result["artifacts"]["repository"] is None
    assert result["mlflow"]["aliases"] == ["candidate"]
    loss = json.loads((Path(result["artifacts"]["evaluation"]) / "evaluation.json").read_text())["metrics"]["held_out"]["loss"]
    assert loss["incumbent"] is not None
    done = tuneline(
        "run", "-c", "customization.yaml", "--workdir", "wd", "--set", "fine_tuning.learning_rate=1e-6", "--fail-on-refusal", cwd=project
    )
    assert done.returncode == 3
    assert "verdict: refused" in done.stdout
    assert "from the cache: data_curation, data_versioning, fine_tuning, evaluation" in done.stdout


@pytest.mark.long
def test_another_raw_row_runs_again_from_curation_on(first: dict[str, Any], project: Path) -> None:
    write_rows(project / "raw.jsonl", changed=a_training_row(first))
    try:
        result = run(project, "wd", "--set", "model_registry.auto_promote=false")
    finally:
        write_rows(project / "raw.jsonl")
    assert cached(result) == set()
    assert digests(result)["dataset"] != digests(first)["dataset"]
    assert "champion" not in result["mlflow"]["aliases"]


def a_training_row(result: dict[str, Any]) -> int:
    """The number of a raw row that the model learned from."""
    train = parquet.read_table(Path(result["artifacts"]["dataset"]) / "train.parquet").to_pylist()
    return int(re.findall(r"in case (\d+)\?", train[0]["messages"][0]["content"])[0])


@pytest.mark.long
def test_an_edited_stage_runs_again_and_only_that_one(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for name in ("components", "pipelines", "data"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert cached(run(project, "wd", code=code)) == STAGES
    with (code / "components" / "evaluation" / "gate.py").open("a") as file:
        file.write("\n# a remark that changes nothing\n")
    result = run(project, "wd", code=code)
    assert cached(result) == STAGES - {"evaluation"}
    assert digests(result) == digests(first)


@pytest.mark.stress
def test_a_run_from_scratch_gives_the_same_digests(first: dict[str, Any], project: Path) -> None:
    again = run(project, "scratch")
    assert cached(again) == set()
    assert {k: v for k, v in digests(again).items() if k != "evaluation"} == {k: v for k, v in digests(first).items() if k != "evaluation"}
    assert digests(again)["evaluation"] == digests(first)["evaluation"]


def events(workdir: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(workdir.glob("runs/*/events.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def kill_in(stage: str, project: Path, workdir: str, after: str, sent: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
    """Start a run and end its process while `stage` is at work; its steps must end with it. Returns its exit status and output."""
    before = len(events(project / workdir))
    command = [*COMMAND, "run", "-c", "customization.yaml", "--workdir", workdir, "--json"]
    child = subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = []
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        new = events(project / workdir)[before:]
        pids = [event["pid"] for event in new if event["event"] == "started"]
        if any(event["stage"] == stage and event["event"] == after for event in new):
            break
        assert child.poll() is None, f"the run ended before {stage} reached {after}"
        time.sleep(0.02)
    child.send_signal(sent)
    said = child.communicate(timeout=120)[0]
    wait_until_gone(pids)
    return child.returncode, said


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and "Z" not in status(pid) for pid in pids):
        assert time.monotonic() < deadline, "a step outlived its run"
        time.sleep(0.1)


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.stress
def test_killed_in_each_stage_the_same_command_finishes_with_the_same_digests(first: dict[str, Any], project: Path) -> None:
    moments = {
        "resolve": "step",
        "data_curation": "step",
        "data_versioning": "step",
        "fine_tuning": "metrics",
        "evaluation": "step",
        "triton_packaging": "step",
        "registration": "step",
        "promotion": "started",
    }
    for stage, after in moments.items():
        assert kill_in(stage, project, "killed", after)[0] == -signal.SIGKILL
        if stage == "fine_tuning":
            status, said = kill_in(stage, project, "killed", after, signal.SIGTERM)
            assert (status, json.loads(said)["error"]["kind"]) == (75, "interrupted")
    result = run(project, "killed")
    assert digests(result) == digests(first)
    assert "champion" in result["mlflow"]["aliases"]
    assert not list((project / "killed" / "store" / "unfinished").glob("*"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_changed_byte_in_an_artifact_is_refused_by_name(first: dict[str, Any], project: Path, tmp_path: Path, kind: str) -> None:
    artifact = artifacts.read(Path(first["artifacts"][kind]))
    payload = max((file for file in artifact.manifest.files if file.payload), key=lambda file: file.bytes)
    path = artifact.path / payload.path
    flip(path)
    try:
        error = refusal(1, "run", "-c", "customization.yaml", "--workdir", "wd", cwd=project)
    finally:
        flip(path)
    assert error["kind"] == "artifact_damaged"
    assert payload.path in error["message"]
    assert kind in error["message"]
    assert error["stage"]


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file; twice restores it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
