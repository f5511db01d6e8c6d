"""`tuneline explain`: what the command prints, writes and refuses."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models.model_loading import LoadableModel
from pipelines.capture import traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.tombstones import Tombstone, write_tombstone
from pipelines.explanation import explanation
from tests.fine_tuning.builders import build_conversation, build_dataset
from tests.pipelines.capture import traffic
from tests.pipelines.command import answer_in_process, refusal, run_in_process
from tests.pipelines.explanation.conftest import PLANTED, PLANTED_ID

YESTERDAY = traffic_files.now() - timedelta(days=1)
QUESTION = ("--prompt", PLANTED[0], "--answer", PLANTED[1])
GONE_CAPTURE = "the capture file gone.yaml cannot be read: [Errno 2] No such file or directory: 'gone.yaml'"
CUT_OFF = "the answer reached 4 tokens and is cut off"


@pytest.fixture
def home(tmp_path: Path, model: LoadableModel) -> Path:
    assert model.artifact
    (tmp_path / "model").symlink_to(model.artifact.path)
    return tmp_path


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_words_and_rows_as_json_and_page(home: Path, dataset: Artifact) -> None:
    options = (*QUESTION, "--training-data", dataset.path, "--rows", "6", "--top", "3", "-o", "page")
    result = answer_in_process("explain", "model", *options, cwd=home)
    assert [token["text"] for token in result["tokens"]] == PLANTED[0].split()
    assert result["answer"] == PLANTED[1]
    assert result["warnings"] == [
        "only the published weights were used; the other checkpoints of the training run were deleted",
        "too few random rows to recognize an unusual score: 3; expected at least 20",
        "scored 6 of 12 training rows",
    ]
    row = result["training_rows"][0]
    assert (row["id"], row["lexical_rank"], row["random_share"], row["source"]) == (PLANTED_ID, 1, 0.0, "made")
    assert result["method"].startswith(
        "leave one word out, in nats of the answer's log-probability; ridge-regularized gradient kernel"
    )
    assert result["dataset"] == {"sha256": dataset.sha256, "revision": ""}
    page = (home / "page" / "explanation.html").read_text()
    assert "A training step on one of these rows raises" in page
    assert all(f">{word}</span>" in page for word in PLANTED[0].split())


@pytest.mark.long
def test_equal_explanations_have_equal_results_and_files(home: Path, dataset: Artifact) -> None:
    """Long tier: it loads the model twice."""
    options = (*QUESTION, "--training-data", dataset.path, "--rows", "1", "-o")
    found = [answer_in_process("explain", "model", *options, name, cwd=home) for name in ("first", "second")]
    assert [one.pop("cost")["computed"] for one in found] == [1, 0]
    assert found[0]["training_rows"][0]["random_share"] is None
    assert found[0] == {**found[1], "page": str(Path("first") / "explanation.html")}
    assert read_files(home / "first") == read_files(home / "second")


@pytest.mark.long
def test_base_model_and_conversation_as_text(home: Path, model: LoadableModel) -> None:
    """Long tier: it loads a model."""
    turns = [{"role": "user", "content": "Open it. <b>Then</b> close it."}]
    (home / "turns.json").write_text(json.dumps(turns))
    options = ("--messages", "turns.json", "--unit", "sentence", "--max-tokens", "4", "-o", "page")
    process = run_in_process("explain", str(model.base.path), *options, cwd=home)
    assert process.returncode == 0, process.stderr
    assert "<b>Then</b> close it." in process.stdout
    assert process.stdout.splitlines()[-2:] == [f"! {CUT_OFF}", "page: page/explanation.html"]
    assert "&lt;b&gt;Then&lt;/b&gt;" in (home / "page" / "explanation.html").read_text()


@pytest.mark.long
def test_other_dataset_is_reported(home: Path, dataset: Artifact) -> None:
    """Long tier: it loads a model."""
    other = build_dataset(
        home / "other", "sft", [build_conversation("one", *PLANTED), build_conversation("two", *PLANTED)]
    )
    options = ("--prompt", "What?", "--max-tokens", "4", "--training-data", "other")
    (warning, *_) = answer_in_process("explain", "model", *options, cwd=home)["warnings"]
    trained, given = dataset.sha256[:12], other.sha256[:12]
    assert warning.startswith(f"the model was trained on the dataset {trained}, and other is {given}")


@pytest.mark.long
def test_recorded_dataset_is_found_or_reported_missing(
    home: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long tier: it loads a model."""
    options = ("explain", "model", "--prompt", "What?", "--max-tokens", "4", "--training-data", "recorded")
    assert answer_in_process(*options, cwd=home)["dataset"]["sha256"] == dataset.sha256
    monkeypatch.setattr("components.common.models.training_lineage.find_folder", lambda *_: None)
    message = refusal(1, *options, cwd=home)["message"]
    assert message == (
        f"the training dataset {dataset.sha256[:12]} of the model is not in the artifact store: it was erased, or is stored "
        "elsewhere"
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "expected one of --prompt, --messages and --from-traffic; found none of them"),
        (
            ("--prompt", "a", "--messages", "b"),
            2,
            "expected one of --prompt, --messages and --from-traffic; found --prompt and --messages",
        ),
        (("--prompt", " "), 2, "--prompt is empty"),
        (("--prompt", "a", "--answer", " "), 2, "--answer is empty"),
        (("--messages", "gone.json"), 1, "--messages: gone.json cannot be read: No such file or directory"),
        (
            ("--messages", "text.json"),
            1,
            "--messages: text.json is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (("--messages", "list.json"), 1, "--messages: list.json contains no list of messages"),
        (("--messages", "tools.json"), 1, "--messages: tools.json: tools is not a list of JSON objects"),
        (("--prompt", "a", "--capture", "gone.yaml"), 2, GONE_CAPTURE),
        (
            ("--messages", "role.json"),
            1,
            "--messages: role.json: message 1 is not a message with a role (system, developer, user, assistant, tool) and "
            "text content",
        ),
        (
            ("--messages", "answer.json"),
            1,
            "--messages: answer.json ends with a message of the role assistant; expected a user message that is not empty",
        ),
        (("--prompt", "a", "-o", "list.json"), 2, "list.json is not a folder"),
    ],
)
def test_invalid_questions_are_refused(home: Path, options: tuple[str, ...], code: int, message: str) -> None:
    turn = {"role": "assistant", "content": "Yes."}
    texts = {"text": "no JSON", "list": "{}", "role": '[{"role": "king"}]', "answer": json.dumps([turn])}
    texts["tools"] = json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": 5})
    for name, text in texts.items():
        (home / f"{name}.json").write_text(text)
    assert refusal(code, "explain", "model", *options, cwd=home)["message"] == message
    assert not (home / ".tuneline" / "state").exists()


def test_unknown_models_are_refused(home: Path) -> None:
    assert refusal(2, "explain", "--prompt", "a", cwd=home)["message"] == "Missing argument 'MODEL'"
    assert refusal(1, "explain", "unknown@champion", "--prompt", "a", cwd=home)["kind"] == "registry"
    assert refusal(2, "explain", "a@b@c", "--prompt", "a", cwd=home)["kind"] == "usage"
    base = refusal(2, "explain", "embedded:unknown", "--prompt", "a", cwd=home)
    assert base["kind"] == "configuration"


def erase(settings: CaptureSettings, subject: str) -> None:
    (settings.folder / traffic_files.TOMBSTONES).mkdir(parents=True)
    write_tombstone(settings.folder, Tombstone(subject=subject, requested=1 << 40, requested_by="test"))


def capture_answer(home: Path, model_sha256: str, **facts: Any) -> None:
    """Store the planted question and answer, as a model with this digest gave it."""
    settings = traffic.load(home)
    row = traffic.build_row(1, settings.hash_subject("jane"), int(YESTERDAY.timestamp()), content=PLANTED[1])
    row["request"]["messages"] = [{"role": "user", "content": [{"type": "text", "text": PLANTED[0]}]}]
    row["tuneline"] |= {"model_sha256": model_sha256, **facts}
    traffic.write_sealed(settings, YESTERDAY, [row])


@pytest.mark.long
def test_captured_answer_leads_to_its_training_rows(home: Path, model: LoadableModel, dataset: Artifact) -> None:
    """Long tier: it loads a model."""
    capture_answer(home, model.sha256, redactions={"email": 1})
    options = ("--from-traffic", "chatcmpl-1", "--training-data", "recorded", "--rows", "6", "--top", "2")
    result = answer_in_process("explain", "model", *options, cwd=home)
    assert (result["answer"], result["generated"]) == (PLANTED[1], False)
    assert result["training_rows"][0]["id"] == PLANTED_ID
    assert result["dataset"]["sha256"] == dataset.sha256
    assert result["warnings"][0].startswith("the captured text is redacted")
    unknown = refusal(1, "explain", "model", "--from-traffic", "chatcmpl-2", cwd=home)
    assert unknown["message"] == f"the captured traffic in {home / 'traffic'} has no answer chatcmpl-2"


def test_captured_answer_of_another_model_or_an_erased_subject_is_refused(home: Path) -> None:
    capture_answer(home, "f" * 64)
    other = refusal(2, "explain", "model", "--from-traffic", "chatcmpl-1", cwd=home)["message"]
    assert other.startswith("the answer was written by the model ffffffffffff (echo version 7); model is ")
    settings = traffic.load(home)
    erase(settings, settings.hash_subject("jane"))
    erased = refusal(1, "explain", "model", "--from-traffic", "chatcmpl-1", cwd=home)["message"]
    assert erased == "the subject of the answer chatcmpl-1 was erased"


@pytest.mark.long
def test_rows_of_erased_subjects_are_marked(home: Path, dataset: Artifact) -> None:
    """Long tier: it loads a model."""
    row = {**build_conversation("captured", *PLANTED), "meta": json.dumps({"meta": {"subject": "abc"}})}
    build_dataset(home / "other", "sft", [row, build_conversation("two", "Other question?", "No.")])
    options = ("explain", "model", *QUESTION, "--training-data", "other")
    unmarked = answer_in_process(*options, cwd=home)
    assert any(warning.endswith("add --capture to mark erased subjects") for warning in unmarked["warnings"])
    erase(traffic.load(home), "abc")
    result = answer_in_process(*options, cwd=home)
    assert not any("--capture" in warning for warning in result["warnings"])
    assert {one["id"]: one["erased"] for one in result["training_rows"]} == {"captured": True, "two": False}
    texts = {one["id"]: one["text"] for one in result["training_rows"]}
    assert texts == {"captured": "", "two": "Other question?\nNo."}


def test_limits_of_a_short_training_are_stated(model: LoadableModel) -> None:
    assert model.artifact
    summary = {**model.artifact.manifest.summary, "epochs": 0.25}
    artifact = Artifact(model.artifact.path, model.artifact.manifest.model_copy(update={"summary": summary}))
    changed = LoadableModel(model.sha256, model.base, model.weights, model.adapter, artifact)
    cost = explanation.row_gradients.GradientCost(3, 0, None, 0.1, 1, 1)
    influence = explanation.RowInfluence([], "", 3, 3, 3, 1, None, cost)
    limits = explanation.describe_limits(influence, changed)
    assert "no score for 1 selected row without trained tokens" in limits
    assert any(limit.startswith("training used 25% of the rows") for limit in limits)
