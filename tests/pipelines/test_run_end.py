"""The exit task of a Kubeflow run: its page, its notifications and the records of the steps.

In the fast tier: it runs in the test's process, and a local HTTP server receives the messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common import pipeline_step
from components.common.runtime.errors import TrainingError
from pipelines.steps import run_end
from tests.data_versioning.conftest import MakeDataset, make_dataset
from tests.note_recorder import NoteRecorder

__all__ = ["make_dataset"]

RESULT = {
    "dataset": "d" * 64,
    "model": "e" * 64,
    "evaluation": "f" * 64,
    "version": '{"tag": "dataset/1"}',
    "verdict": "refused",
    "registered": {"name": "support", "version": "4", "aliases": [], "replaced": None},
    "reasons": ["held_out.loss is 0.1 worse than the base.", "held_out.loss is 0.1 worse than the base."],
    "links": {"run": "https://mlflow.example/#/experiments/1/runs/2", "version": ""},
}
LAST_STEPS = ["Write the report"]
PROMOTION = ["Promote the version"]
PROMOTED = {"name": "support", "alias": "champion", "from": "3", "to": "4"}


@pytest.fixture
def run_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a step of a Kubeflow run in this process: its title, and the result that it reports or the error that it raises."""
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path))
    monkeypatch.setenv("KFP_RUN_ID", "run-1")
    for function in ("restrict_new_files", "install_stop_handlers", "relax_garbage_collector"):
        monkeypatch.setattr(pipeline_step.process_control, function, lambda **_: None)

    def run(title: str, result: dict[str, Any] | Exception) -> None:
        monkeypatch.setenv("TUNELINE_STEP", title)
        with pipeline_step.step_context("step", tracked=False) as step:
            if isinstance(result, Exception):
                raise result
            step.report_result(**result)

    return run


class Webhook(BaseHTTPRequestHandler):
    """A service that keeps the messages that it receives."""

    messages: list[dict[str, Any]] = []  # noqa: RUF012 - of the only server

    def do_POST(self) -> None:
        self.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(500 if self.path.endswith("broken") else 200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def webhook() -> Iterator[str]:
    """The address of a running webhook without its scheme."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    Webhook.messages.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def report_end(state: str, tmp_path: Path, **settings: Any) -> tuple[run_end.RunEnd, str, list[str]]:
    """Run the exit task. Return the end, its page and the notes."""
    reporter, page = NoteRecorder(), tmp_path / "page.html"
    end = run_end.report_end(
        state, {"ui": "", "notifications": [], "last_steps": LAST_STEPS, **settings}, reporter, page
    )
    return end, page.read_text(encoding="utf-8"), reporter.notes


def test_refused_run_has_its_reasons_links_and_outputs(run_step: Any, tmp_path: Path) -> None:
    run_step("Fine-tune the model", {"model": "e" * 64})
    run_step("Write the report", RESULT)
    end, page, notes = report_end("COMPLETE", tmp_path, ui="https://kubeflow.example/pipeline/")
    assert (end.events, end.title) == (["refused"], "support version 4: refused")
    assert end.sentences == ["held_out.loss is 0.1 worse than the base."]
    assert end.links == {
        "MLflow run": "https://mlflow.example/#/experiments/1/runs/2",
        "Kubeflow run": "https://kubeflow.example/pipeline/#/runs/details/run-1",
    }
    assert end.outputs["dataset"] == "d" * 64
    assert notes == ["support version 4: refused"]
    assert page.index("Fine-tune the model") < page.index("Write the report")


def test_failed_run_names_step_error_and_action(run_step: Any, tmp_path: Path) -> None:
    run_step("Curate the data", {"dataset": "d" * 64})
    with pytest.raises(SystemExit):
        run_step("Fine-tune the model", TrainingError("the loss is <nan>", hint="Lower learning_rate."))
    end, page, _ = report_end("FAILED", tmp_path)
    assert (end.events, end.title) == (["failed"], "Fine-tune the model: failed")
    assert end.sentences == ["the loss is <nan>", "Lower learning_rate."]
    assert end.outputs == {}
    assert "the loss is &lt;nan&gt;" in page


@pytest.mark.parametrize("state", ["COMPLETE", "RUNNING", "FAILED"])
def test_records_outweigh_the_state_of_a_successful_run(run_step: Any, tmp_path: Path, state: str) -> None:
    """Kubeflow's state remains RUNNING if a later condition is false, and FAILED after a successful retry."""
    with pytest.raises(SystemExit):
        run_step("Promote the version", TrainingError("no connection"))
    run_step("Promote the version", PROMOTED)
    end = report_end(state, tmp_path, last_steps=PROMOTION)[0]
    assert (end.events, end.title) == (["promoted"], "support version 4: promoted to champion")


@pytest.mark.parametrize("state", ["FAILED", "RUNNING"])
def test_run_whose_last_step_did_not_start_failed(run_step: Any, tmp_path: Path, state: str) -> None:
    run_step("Promote the version", PROMOTED)
    end = report_end(state, tmp_path, last_steps=[*PROMOTION, "Deploy to Triton"])[0]
    assert (end.events, end.title) == (["failed"], "the run failed")
    assert f"{state}. A pod may not have started." in end.sentences[0]


def test_refusal_ends_a_chain_before_its_last_step(run_step: Any, tmp_path: Path) -> None:
    run_step("sft: Write the report", RESULT)
    assert report_end("COMPLETE", tmp_path, last_steps=["rlhf: Write the report"])[0].events == ["refused"]
    run_step("sft: Write the report", {**RESULT, "verdict": "accepted"})
    assert report_end("RUNNING", tmp_path, last_steps=["rlhf: Write the report"])[0].events == ["failed"]


def test_automatic_promotion_is_an_event(run_step: Any, tmp_path: Path) -> None:
    registered = {**RESULT["registered"], "aliases": ["candidate", "champion"]}  # type: ignore[dict-item]
    run_step("Write the report", {**RESULT, "verdict": "accepted", "registered": registered})
    end = report_end("COMPLETE", tmp_path)[0]
    assert (end.events, end.title) == (["accepted", "promoted"], "support version 4: accepted and promoted to champion")


def test_errors_lose_their_secrets(run_step: Any, tmp_path: Path) -> None:
    """Services outside the cluster receive the text."""
    with pytest.raises(SystemExit):
        run_step(
            "Plan the run",
            TrainingError("no answer from https://me:pa55@hub.example/x?sig=abc", hint="See mysql://me:pa55@db."),
        )
    assert report_end("FAILED", tmp_path)[0].sentences == [
        "no answer from https://***@hub.example/x?***",
        "See mysql://***@db.",
    ]
    with pytest.raises(SystemExit):
        run_step("Plan the run", ValueError("the token is pa55"))
    assert "pa55" not in str(report_end("FAILED", tmp_path)[0])
    assert report_end("FAILED", tmp_path)[0].sentences[0] == "ValueError"


def test_unreadable_record_is_reported(run_step: Any, tmp_path: Path) -> None:
    run_step("Curate the data", {})
    (tmp_path / "state" / "kubeflow-runs" / "run-1" / "fine-tune-the-model.json").write_text('{"step": ')
    end, page, _ = report_end("FAILED", tmp_path)
    assert (end.events, end.title) == (["failed"], "fine-tune-the-model: failed")
    assert "The record of the step cannot be read." in page


def test_killed_step_is_named(run_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_step("Curate the data", {})
    monkeypatch.setenv("TUNELINE_STEP", "Fine-tune the model")
    pipeline_step.step_records.open_record().write("running")  # the process ends here
    end, page, _ = report_end("FAILED", tmp_path)
    assert (end.events, end.title) == (["failed"], "Fine-tune the model: failed")
    assert "its pod was killed" in end.sentences[0]
    assert "ended without a result" in page


def test_notifications_are_sent_for_their_events_and_failures_are_reported(
    run_step: Any, tmp_path: Path, webhook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step("Promote the version", PROMOTED)
    monkeypatch.setenv("HOOK", f"json://{webhook}/the-token")
    monkeypatch.setenv("BROKEN", f"json://{webhook}/broken")
    events = ["promoted", "failed"]
    services = [
        {"name": "team/chat", "variable": "HOOK", "events": events},
        {"name": "team/other", "variable": "HOOK", "events": ["failed"]},
        {"name": "team/broken", "variable": "BROKEN", "events": events},
        {"name": "team/missing", "variable": "MISSING", "events": events},
    ]
    _, page, notes = report_end("COMPLETE", tmp_path, notifications=services, last_steps=PROMOTION)
    assert notes[1:] == [
        "notification team/chat: sent",
        "notification team/other: not configured for promoted",
        "notification team/broken: not sent: the service did not accept the message",
        "notification team/missing: not sent: the URL is not set",
    ]
    assert [message["title"] for message in Webhook.messages] == [
        "tuneline: support version 4: promoted to champion"
    ] * 2
    assert Webhook.messages[0]["message"] == "The previous version was 3.\nKubeflow run ID: run-1"
    assert "the-token" not in page


def test_full_disk_does_not_fail_a_step(run_step: Any, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    run_step("Curate the data", {})
    assert (tmp_path / "state").read_text() == "not a folder"


def test_artifact_in_kubeflow_is_the_manifest_with_digest_and_address(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    dataset = make_dataset("data", {"train": ["a", "b"], "test": ["c"]})
    remote = SimpleNamespace(uri="minio://mlpipeline/x", path=str(tmp_path / "minio" / "x"), metadata={})
    pipeline_step.describe_to_kfp(dataset, remote)
    assert Path(remote.path).read_bytes() == (dataset.path / "manifest.json").read_bytes()
    assert remote.uri == "minio://mlpipeline/x"
    assert remote.metadata["content_sha256"] == dataset.sha256
    assert remote.metadata["store_uri"] == dataset.path.as_uri()
    local = SimpleNamespace(uri=str(tmp_path / "y"), path=str(tmp_path / "y"), metadata={})
    pipeline_step.describe_to_kfp(dataset, local)
    assert (local.uri, local.metadata) == (str(dataset.path), remote.metadata)
    assert not (tmp_path / "y").exists()
