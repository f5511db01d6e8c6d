"""The whole customization through kfp.local, with a tiny random Llama and every real engine: DVC, Daft, MLflow, Triton.

Long tier: tests that run the pipeline once more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as parquet
import pytest

from components.common.artifacts import artifact_folder
from components.triton_packaging.triton_server import ServerAddress
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal, tuneline
from tests.pipelines.project import run, write_rows
from tests.triton_packaging.triton_clients import infer_grpc, stream_grpc

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
KINDS = {"dataset", "model", "evaluation", "repository"}


def get_cached_stages(result: dict[str, Any]) -> set[str]:
    return {stage["name"] for stage in result["stages"] if stage["cached"]}


def read_digests(result: dict[str, Any]) -> dict[str, str]:
    return {kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items() if path}


STAGES = {"data_curation", "data_versioning", "fine_tuning", "evaluation", "triton_packaging"}


def test_run_promotes_the_model_and_lists_its_outputs(first: dict[str, Any], project: Path) -> None:
    assert first["verdict"] == "accepted"
    assert first["workdir"] == str(project / "wd")
    assert set(read_digests(first)) == KINDS
    assert get_cached_stages(first) == set()
    assert [stage["name"] for stage in first["stages"]] == [
        "resolve", "data_curation", "data_versioning", "fine_tuning", "evaluation", "triton_packaging", "registration", "promotion",
    ]  # fmt: skip
    assert first["mlflow"]["model_name"] == "tiny-helper"
    assert first["mlflow"]["model_version"] == "1"
    assert set(first["mlflow"]["aliases"]) == {"candidate", "challenger", "champion"}
    assert Path(first["report"]).read_text().startswith("<!doctype html>")
    assert first["seconds"] > sum(stage["seconds"] for stage in first["stages"]) * 0.9


def test_files_of_a_run_are_for_owner_and_group_only(first: dict[str, Any], project: Path) -> None:
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (project / "wd").rglob("*") if not path.is_symlink()}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o770}
    # DVC makes its objects read-only for everyone, whatever the umask; their folders admit owner and group.
    files = {path: mode for path, mode in modes.items() if path.is_file() and mode != 0o444}
    assert [path for path, mode in files.items() if mode & 0o007] == []
    # SQLite and kfp set their own permissions; packaged weights are readable.
    fixed = {
        path for path in files if path.name in ("mlflow.db", "model.safetensors") or path.parent.name == "kfp-cache"
    }
    assert [path for path, mode in files.items() if path not in fixed and mode & 0o200 and not mode & 0o020] == []


def test_manifests_link_the_repository_to_the_raw_file(first: dict[str, Any], project: Path) -> None:
    manifests = {kind: artifact_folder.read(Path(path), kind).manifest for kind, path in first["artifacts"].items()}
    model_input = manifests["repository"].find_input("model")
    dataset_input = manifests["model"].find_input("dataset")
    assert model_input is not None
    assert dataset_input is not None
    assert model_input.content_sha256 == manifests["model"].content_sha256
    assert dataset_input.content_sha256 == manifests["dataset"].content_sha256
    assert dataset_input.uri.startswith("dvc://")
    assert any(i.uri.endswith("raw.jsonl") for i in manifests["dataset"].inputs)


def test_mlflow_run_has_stage_runs_metrics_and_dataset_version(first: dict[str, Any]) -> None:
    import mlflow

    client = mlflow.MlflowClient(first["mlflow"]["tracking_uri"])
    parent = client.get_run(first["mlflow"]["run_id"])
    assert parent.info.status == "FINISHED"
    contexts = {one.tags[0].value: one.dataset for one in parent.inputs.dataset_inputs}
    assert set(contexts) == {"train", "validation", "test"}
    for dataset in contexts.values():
        assert dataset.source_type == "dvc"
        assert {"repo", "path", "rev", "md5", "store_uri"} <= set(json.loads(dataset.source))
    assert parent.data.params["fine_tuning.learning_rate"] == "0.002"
    assert {"validation_loss", "tokens_per_second", "held_out.loss.candidate", "held_out.loss.ci95.low"} <= set(
        parent.data.metrics
    )
    assert "evaluation_items.json" in {file.path for file in client.list_artifacts(parent.info.run_id)}
    nested = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    by_stage = {r.data.tags["tuneline.stage"]: r for r in nested}
    assert STAGES | {"resolve", "registration", "promotion", "report"} == set(by_stage)
    assert len(client.get_metric_history(by_stage["fine_tuning"].info.run_id, "train_loss")) >= 30
    tags = client.get_model_version("tiny-helper", "1").tags
    assert tags["tuneline.model_sha256"] == artifact_folder.read(Path(first["artifacts"]["model"])).sha256
    assert (tags["tuneline.verdict"], tags["tuneline.proof"]) == ("accepted", "proven")


def test_package_is_served_until_sigterm(first: dict[str, Any], project: Path) -> None:
    repository = first["artifacts"]["repository"]
    expected = json.loads((Path(repository) / "proof.json").read_text(encoding="utf-8"))["answers"][0]
    command = [*COMMAND, "serve", repository, "--http-port", "0", "--json"]
    server = subprocess.Popen(
        command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        name, streaming = ready["models"]
        assert streaming == f"{name}_stream"
        fields = {"text_input": expected["prompt"], "max_tokens": 4}
        answer = infer_grpc(ServerAddress(ready["grpc"]), name, **fields)
        assert expected["text"].startswith(answer["text_output"])
        assert stream_grpc(ServerAddress(ready["grpc"]), streaming, **fields).text == answer["text_output"]
        with openai.OpenAI(base_url=ready["openai_url"], api_key="unused") as client:
            question: Any = [{"role": "user", "content": expected["prompt"]}]
            chat = client.chat.completions.create(model=ready["model"], messages=question, max_tokens=4)
        assert chat.choices[0].message.content == answer["text_output"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.mark.long
def test_second_run_is_cached_and_unchanged(first: dict[str, Any], project: Path) -> None:
    import mlflow

    second = run(project, "wd")
    assert second["verdict"] == "unchanged"
    assert get_cached_stages(second) == STAGES
    assert read_digests(second) == read_digests(first)
    assert second["mlflow"]["model_version"] == "1"
    client = mlflow.MlflowClient(second["mlflow"]["tracking_uri"])
    parent = client.get_run(second["mlflow"]["run_id"])
    nested = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    by_stage = {run.data.tags["tuneline.stage"]: run for run in nested}
    original = client.get_run(by_stage["fine_tuning"].data.tags["tuneline.original_run"])
    assert original.data.tags["mlflow.parentRunId"] == first["mlflow"]["run_id"]
    assert set(by_stage) >= STAGES


@pytest.mark.stress
def test_changed_learning_rate_reruns_from_fine_tuning(first: dict[str, Any], project: Path) -> None:
    result = run(project, "wd", "--set", "fine_tuning.learning_rate=1e-6")
    assert get_cached_stages(result) == {"data_curation", "data_versioning"}
    assert result["verdict"] == "refused", "a model that learned almost nothing does not replace one that learned"
    assert result["artifacts"]["repository"] is None
    assert result["mlflow"]["aliases"] == ["candidate"]
    loss = json.loads((Path(result["artifacts"]["evaluation"]) / "evaluation.json").read_text())["metrics"]["held_out"][
        "loss"
    ]
    assert loss["incumbent"] is not None
    process = tuneline(
        "run",
        "-c",
        "customization.yaml",
        "--workdir",
        "wd",
        "--set",
        "fine_tuning.learning_rate=1e-6",
        "--fail-on-refusal",
        cwd=project,
    )
    assert process.returncode == 3
    assert "verdict: refused" in process.stdout
    assert "cached: data_curation, data_versioning, fine_tuning, evaluation" in process.stdout


@pytest.mark.long
def test_changed_raw_row_reruns_from_curation(first: dict[str, Any], project: Path) -> None:
    write_rows(project / "raw.jsonl", changed=find_training_row(first))
    try:
        result = run(project, "wd", "--set", "model_registry.auto_promote=false", "--set", "evaluation.suite=none")
    finally:
        write_rows(project / "raw.jsonl")
    assert get_cached_stages(result) == set()
    assert read_digests(result)["dataset"] != read_digests(first)["dataset"]
    assert "champion" not in result["mlflow"]["aliases"]


def find_training_row(result: dict[str, Any]) -> int:
    """Return the number of a raw row in the training split."""
    train = parquet.read_table(Path(result["artifacts"]["dataset"]) / "train.parquet").to_pylist()
    return int(re.findall(r"in case (\d+)\?", train[0]["messages"][0]["content"])[0])


@pytest.mark.stress
def test_edited_stage_code_reruns_only_that_stage(first: dict[str, Any], project: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (code / "components" / "evaluation" / "promotion_gate.py").open("a") as file:
        file.write("\n# a remark that changes nothing\n")
    result = run(project, "wd", code=code)
    assert get_cached_stages(result) == STAGES - {"evaluation"}
    assert read_digests(result) == read_digests(first)


@pytest.mark.stress
def test_run_from_scratch_has_equal_digests(first: dict[str, Any], project: Path) -> None:
    second = run(project, "scratch")
    assert get_cached_stages(second) == set()
    assert {k: v for k, v in read_digests(second).items() if k != "evaluation"} == {
        k: v for k, v in read_digests(first).items() if k != "evaluation"
    }
    assert read_digests(second)["evaluation"] == read_digests(first)["evaluation"]


def read_events(workdir: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(workdir.glob("runs/*/events.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def kill_during(
    stage: str, project: Path, workdir: str, last_event: str, signal_number: signal.Signals = signal.SIGKILL
) -> tuple[int, str]:
    """Signal a run once `stage` has emitted the event, wait for its steps to end, and return exit code and output."""
    before = len(read_events(project / workdir))
    command = [*COMMAND, "run", "-c", "customization.yaml", "--workdir", workdir, "--json"]
    child = subprocess.Popen(
        command, cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = []
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        new_events = read_events(project / workdir)[before:]
        pids = [event["pid"] for event in new_events if event["event"] == "started"]
        if any(event["stage"] == stage and event["event"] == last_event for event in new_events):
            break
        assert child.poll() is None, f"the run ended before {stage} reached {last_event}"
        time.sleep(0.02)
    child.send_signal(signal_number)
    output = child.communicate(timeout=120)[0]
    wait_for_exit(pids)
    return child.returncode, output


def wait_for_exit(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and "Z" not in get_process_state(pid) for pid in pids):
        assert time.monotonic() < deadline, "a step outlived its run"
        time.sleep(0.1)


def get_process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.stress  # a run; tests/triton_packaging/test_quantization.py checks its parts
def test_run_with_quantization_judges_proves_and_promotes_the_quantized_model(
    first: dict[str, Any], project: Path
) -> None:
    settings = {"triton_packaging.quantization": "int8", "triton_packaging.quantization_margin": 0.05, "model_registry.name": "tiny-int8"}  # fmt: skip
    result = run(project, "wd", *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")))
    assert result["verdict"] == "accepted"
    assert get_cached_stages(result) == {"data_curation", "data_versioning", "fine_tuning"}
    evaluation, package = (Path(result["artifacts"][kind]) for kind in ("evaluation", "repository"))
    assert json.loads((evaluation / "evaluation.json").read_text())["measured"]["settings"]["quantization"] == "int8"
    summary = artifact_folder.read(package, "repository").manifest.summary
    assert summary["proof"]["matched"] == summary["proof"]["golden_prompts"] > 0
    assert summary["quantization"]["increase_bound"] <= 0.05
    assert "champion" in result["mlflow"]["aliases"]
    lineage = answer("lineage", "tiny-int8@champion", "--workdir", "wd", cwd=project)
    assert package.name in json.dumps(lineage)


@pytest.mark.stress
def test_run_killed_in_each_stage_resumes_with_equal_digests(first: dict[str, Any], project: Path) -> None:
    events_by_stage = {
        "resolve": "step",
        "data_curation": "step",
        "data_versioning": "step",
        "fine_tuning": "metrics",
        "evaluation": "step",
        "triton_packaging": "step",
        "registration": "step",
        "promotion": "started",
    }
    for stage, last_event in events_by_stage.items():
        assert kill_during(stage, project, "killed", last_event)[0] == -signal.SIGKILL
        if stage == "fine_tuning":
            exit_code, output = kill_during(stage, project, "killed", last_event, signal.SIGTERM)
            assert (exit_code, json.loads(output)["error"]["kind"]) == (75, "interrupted")
    result = run(project, "killed")
    assert read_digests(result) == read_digests(first)
    assert "champion" in result["mlflow"]["aliases"]
    assert not list((project / "killed" / "store" / "unfinished").glob("*"))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind == "model" else pytest.mark.stress) for kind in sorted(KINDS)],
)
def test_damaged_artifact_is_refused_with_its_file(
    first: dict[str, Any], project: Path, tmp_path: Path, kind: str
) -> None:
    artifact = artifact_folder.read(Path(first["artifacts"][kind]))
    payload = max((file for file in artifact.manifest.files if file.payload), key=lambda file: file.bytes)
    path = artifact.path / payload.path
    flip_bit(path)
    try:
        error = refusal(1, "run", "-c", "customization.yaml", "--workdir", "wd", cwd=project)
    finally:
        flip_bit(path)
    assert error["kind"] == "artifact_damaged"
    assert payload.path in error["message"]
    assert kind in error["message"]
    assert error["stage"]


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file; a second call restores the file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
