"""`tuneline retrain`: export, resume after an interruption, erasures, the comparison, and what it refuses.

Fast tier: the pipeline's run is replaced by a function that writes scores. The whole loop is in the stress tier: it
customizes a model twice.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from kfp import Client
from kfp.compiler import Compiler

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import EXIT_INTERRUPTED, InterruptedRunError, RegistryError
from components.common.runtime.reporters import Reporter
from pipelines.capture import erasure, traffic_files
from pipelines.capture.traffic_export import ExportOptions
from pipelines.cli.captured_traffic import read_latest_feedback
from pipelines.config.customization_config import Customization
from pipelines.retraining import retraining
from pipelines.runs import local_runner
from tests import kubernetes_schemas
from tests.datasets import QUESTION_WORDS
from tests.pipelines import project
from tests.pipelines.capture import traffic
from tests.pipelines.command import ROOT, answer, answer_in_process, refusal, run_in_process

COMMAND = ("retrain", "-c", "c.yaml", "--feedback", "feedback.jsonl", "--min-feedback", 10, "--held-back", 0.4)
SUBJECTS = 60


@pytest.fixture(autouse=True)
def skip_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (artifact_folder, os):
        monkeypatch.setattr(owner, "fsync", lambda _: None)


def fill(home: Path) -> None:
    """Capture a corrected answer of each of 60 subjects."""
    settings, lines = traffic.load(home), []
    rows = []
    for number, (verb, noun) in enumerate(QUESTION_WORDS[:SUBJECTS]):
        row = traffic.build_row(number, settings.hash_subject(f"user {number}"), int(traffic.DAY.timestamp()))
        row["request"]["messages"] = [{"role": "user", "content": f"Please, how do I {verb} a {noun}?"}]
        rows.append(row)
        text = f"To {verb} a {noun}, use desk {number}."
        lines.append({"id": f"chatcmpl-{number}", "key": "a", "correction": text, "time": traffic.DAY.isoformat()})
    traffic.write_sealed(settings, traffic.DAY, rows)
    (home / "feedback.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class FakeRegistry:
    """Records runs and promotions; a run gives the candidate `gain` points of chrF over the champion."""

    def __init__(self) -> None:
        self.gain, self.verdict = 30.0, "accepted"
        self.runs: list[Customization] = []
        self.promoted: list[str] = []
        self.tags: dict[str, str] = {}
        self.error: BaseException | None = None
        self.objection, self.note = "", ""
        self.champion = "i"
        self.logged: dict[str, Any] = {}

    def run(self, customization: Customization, *_: object, **__: object) -> dict[str, Any]:
        self.runs.append(customization)
        if self.error:
            raise self.error
        task = customization.evaluation.tasks[-1]
        assert task.name == retraining.TASK
        lines = Path(task.list_file_paths()["data"]).read_text().splitlines()
        rows = [
            {
                "id": json.loads(line)["id"],
                "task": task.name,
                "candidate_scores": json.dumps({"chrf": 40 + self.gain}),
                "incumbent_scores": json.dumps({"chrf": 40.0}),
            }
            for line in lines
        ]
        folder = Path("evaluation")
        folder.mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), folder / "predictions.parquet")
        version = {"run_id": "r", "model_name": "helper", "model_version": "2"}
        artifacts = {"evaluation": str(folder.absolute())}
        return {"run": "1", "verdict": self.verdict, "artifacts": artifacts, "mlflow": version, "report": ""}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    fill(tmp_path)
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    settings = {"data_curation": {"sources": ["own.jsonl"]}, "model_registry": {"name": "helper", "auto_promote": True}}
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    fake = FakeRegistry()

    @contextmanager
    def open_run(_: str) -> Iterator[Any]:
        logged = {"log_params": fake.logged.update, "metrics": lambda values, _: fake.logged.update(values)}
        yield SimpleNamespace(run_id="m", **logged, note=lambda _: None)

    def promote(_: object, version: str, *, reporter: Reporter, **__: object) -> str | None:
        if fake.note:
            reporter.note(fake.note)
            return None
        if fake.objection:
            raise RegistryError(fake.objection)
        fake.promoted.append(version)
        return version

    version = SimpleNamespace(tags={"tuneline.proof": "proven"}, model_sha256="c", incumbent_sha256="i")
    monkeypatch.setattr(local_runner, "run", fake.run)
    monkeypatch.setattr(retraining.mlflow_tracking, "stage_run", open_run)
    monkeypatch.setattr(retraining.registry, "get_registered", lambda *_: version)
    monkeypatch.setattr(retraining.registry, "find_champion", lambda _: SimpleNamespace(model_sha256=fake.champion))
    monkeypatch.setattr(retraining.registry, "auto_promote", promote)
    monkeypatch.setattr(retraining.registry, "tag_version", lambda _, __, tags: fake.tags.update(tags))
    return fake


def retrain(home: Path, *options: object) -> dict[str, Any]:
    return answer_in_process(*COMMAND, *options, cwd=home)


def test_better_candidate_is_promoted_once(tmp_path: Path, registry: FakeRegistry) -> None:
    cycle = retrain(tmp_path)["retraining"]
    assert (cycle["decision"], registry.promoted) == ("promoted", ["2"])
    assert cycle["comparison"]["decision"] == "better"
    assert cycle["comparison"]["pairs"] >= 12
    assert registry.tags["retraining"].startswith("60 answers with feedback; the threshold is 10. promoted")
    (customization,) = registry.runs
    assert not customization.model_registry.auto_promote
    assert customization.data_curation.group_by == "group"
    again = retrain(tmp_path)
    assert (again["triggered"], again["feedback"], len(registry.runs)) == (False, 0, 1)
    assert "no trigger" in run_in_process(*COMMAND, cwd=tmp_path).stdout


@pytest.mark.parametrize(("limits", "expected"), [([None, 16], 128), ([16, 24], 24), ([500, 500], 128)])
def test_held_back_answers_are_no_longer_than_the_clients_requested(
    tmp_path: Path, registry: FakeRegistry, limits: list[int | None], expected: int
) -> None:
    for path in (tmp_path / "traffic").glob("echo/*/*/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["request"]["max_tokens"] = limits[number % 2]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    retrain(tmp_path)
    assert registry.runs[0].evaluation.tasks[-1].max_new_tokens == expected


@pytest.mark.parametrize(
    ("gain", "verdict", "options", "decision"),
    [
        (0.0, "accepted", (), "not_better"),
        (-30.0, "accepted", (), "not_better"),
        (30.0, "refused", (), "refused"),
        (30.0, "unchanged", (), "unchanged"),
        (30.0, "accepted", ("--set", "model_registry.auto_promote=false"), "not_promoted"),
    ],
)
def test_other_candidates_are_not_promoted(
    tmp_path: Path, registry: FakeRegistry, gain: float, verdict: str, options: tuple[str, ...], decision: str
) -> None:
    registry.gain, registry.verdict = gain, verdict
    assert retrain(tmp_path, *options)["retraining"]["decision"] == decision
    assert registry.promoted == []
    assert decision in registry.tags["retraining"]


def test_objection_of_the_registry_ends_the_retraining(tmp_path: Path, registry: FakeRegistry) -> None:
    registry.objection = "the champion of helper changed during this run"
    cycle = retrain(tmp_path)["retraining"]
    assert (cycle["decision"], cycle["reason"]) == ("not_promoted", registry.objection)


def test_note_of_the_registry_is_the_reason(tmp_path: Path, registry: FakeRegistry) -> None:
    registry.note = "helper version 2 is not promoted: earlier candidates failed on its test split"
    cycle = retrain(tmp_path)["retraining"]
    assert (cycle["decision"], cycle["reason"]) == ("not_promoted", registry.note)


def test_equal_candidate_is_promoted_with_a_tolerated_loss(tmp_path: Path, registry: FakeRegistry) -> None:
    registry.gain = 0.0
    assert retrain(tmp_path, "--max-loss", 0.5)["retraining"]["decision"] == "promoted"


def shadow(home: Path, first: int, count: int, texts: tuple[str, str], **changes: Any) -> None:
    """Capture corrected answers of different subjects, with shadow answers; `{}` in a text is the correction."""
    settings, now = traffic.load(home), changes.pop("time", traffic_files.now())
    digests = changes.pop("digests", ("i", "c"))
    rows = []
    with (home / "feedback.jsonl").open("a") as file:
        for number in range(first, first + count):
            text = f"Use desk {number}, which is open today."
            subject = settings.hash_subject(changes.get("subject", f"live user {number}"))
            answers = (texts[0].format(text), texts[1].format(text))
            rows += traffic.build_pair(number, subject, int(now.timestamp()), texts=answers, digests=digests)
            line = {"id": f"chatcmpl-{number}", "key": "a", "correction": text, "time": now.isoformat()}
            file.write(json.dumps(line) + "\n")
    traffic.write_sealed(settings, now, rows)


SHADOW = ("--shadow-days", 7)
BETTER, WORSE = ("Ask someone.", "{}"), ("{}", "Ask someone.")


def test_candidate_is_promoted_by_live_shadow_answers_only(tmp_path: Path, registry: FakeRegistry) -> None:
    waiting = retrain(tmp_path, *SHADOW)["retraining"]
    assert waiting["comparison"]["decision"] == "better", "held-back traffic alone would promote it"
    assert (waiting["decision"], waiting["shadow"]["pairs"], registry.promoted) == (None, [], [])
    assert "shadow: the comparison of 0 shadow pairs is undecided; it ends at" in registry.tags["retraining"]
    shadow(tmp_path, 100, 2, BETTER)
    assert "retraining 1: shadow  the comparison of 2 shadow pairs" in run_in_process(*COMMAND, cwd=tmp_path).stdout
    shadow(tmp_path, 200, 30, BETTER)
    cycle = retrain(tmp_path)["retraining"]  # the period was recorded
    assert (cycle["decision"], registry.promoted, len(registry.runs)) == ("promoted", ["2"], 1)
    assert (cycle["shadow"]["comparison"]["decision"], cycle["shadow"]["comparison"]["pairs"]) == ("better", 32)
    assert "promoted" in registry.tags["retraining"]
    logged = registry.logged
    assert (logged["test"], logged["shadow_test"], logged["shadow_pairs"]) == ("better", "better", 32)
    assert not retrain(tmp_path, *SHADOW, "--min-feedback", 40)["triggered"]


def test_worse_shadow_answers_refuse_the_candidate(tmp_path: Path, registry: FakeRegistry) -> None:
    retrain(tmp_path, *SHADOW)
    shadow(tmp_path, 100, 30, WORSE)
    cycle = retrain(tmp_path, *SHADOW)["retraining"]
    assert (cycle["decision"], registry.promoted) == ("not_better", [])
    assert cycle["reason"] == "the comparison of 30 shadow pairs is worse"


def test_undecided_candidate_is_refused_at_the_end_of_the_period(
    tmp_path: Path, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.gain = 0.0  # undecided, which is not worse
    retrain(tmp_path, *SHADOW)
    shadow(tmp_path, 100, 30, ("{}", "{}"))
    assert retrain(tmp_path, *SHADOW)["retraining"]["decision"] is None
    later = traffic_files.now() + timedelta(days=7, minutes=1)
    monkeypatch.setattr(traffic_files, "now", lambda: later)
    cycle = retrain(tmp_path, *SHADOW)["retraining"]
    assert (cycle["decision"], registry.promoted) == ("not_better", [])
    assert cycle["reason"] == "the comparison of 30 shadow pairs is undecided at the end of the shadow period"
    assert cycle["reason"] in registry.tags["retraining"]


def test_recorded_pairs_keep_their_order_and_value(tmp_path: Path, registry: FakeRegistry) -> None:
    """An earlier correction that is read later, another answer of a subject, or an expired row must not change them."""
    retrain(tmp_path, *SHADOW)
    now = traffic_files.now() + timedelta(seconds=5)
    shadow(tmp_path, 100, 2, ("{}", "no"), time=now)
    first = retrain(tmp_path)["retraining"]["shadow"]["pairs"]
    shadow(tmp_path, 90, 1, BETTER, time=now - timedelta(seconds=2))
    shadow(tmp_path, 110, 1, BETTER, subject="live user 100")
    shadow(tmp_path, 120, 1, BETTER, digests=("i", "another candidate"))
    shadow(tmp_path, 130, 1, BETTER, digests=("another champion", "c"))
    shadow(tmp_path, 140, 1, BETTER, time=now - timedelta(hours=1))
    second = retrain(tmp_path)["retraining"]["shadow"]["pairs"]
    assert (len(first), len(second), second[:2]) == (2, 3, first)
    assert [round(pair["difference"], 1) for pair in second] == [-1.0, -1.0, pytest.approx(1.0, abs=0.2)]
    shutil.rmtree(tmp_path / "traffic" / "echo" / f"{now:%Y-%m-%d}")
    assert retrain(tmp_path)["retraining"]["shadow"]["pairs"] == second


@pytest.mark.parametrize(("gain", "incumbent", "decision"), [(-30.0, "i", "not_better"), (30.0, None, "promoted")])
def test_worse_candidate_and_first_version_have_no_shadow_period(
    tmp_path: Path,
    registry: FakeRegistry,
    monkeypatch: pytest.MonkeyPatch,
    gain: float,
    incumbent: str | None,
    decision: str,
) -> None:
    version = SimpleNamespace(tags={"tuneline.proof": "proven"}, model_sha256="c", incumbent_sha256=incumbent)
    monkeypatch.setattr(retraining.registry, "get_registered", lambda *_: version)
    registry.gain = gain
    cycle = retrain(tmp_path, *SHADOW)["retraining"]
    assert (cycle["decision"], cycle["shadow"]) == (decision, None)


def test_changed_champion_ends_the_period(tmp_path: Path, registry: FakeRegistry) -> None:
    retrain(tmp_path, *SHADOW)
    registry.champion = "other"
    cycle = retrain(tmp_path)["retraining"]
    assert (cycle["decision"], cycle["reason"]) == ("not_promoted", "the champion changed during the shadow period")


def test_erasure_during_the_period_withdraws_the_candidate(tmp_path: Path, registry: FakeRegistry) -> None:
    settings = traffic.load(tmp_path)
    retrain(tmp_path, *SHADOW)
    shadow(tmp_path, 100, 3, BETTER)
    assert len(retrain(tmp_path, *SHADOW)["retraining"]["shadow"]["pairs"]) == 3
    assert settings.hash_subject("live user 100").encode() not in traffic.read_stored_bytes(tmp_path / "retraining")
    erasure.erase(settings, "user 5", "dpo", seal_seconds=0)
    cycle = retrain(tmp_path, *SHADOW)["retraining"]
    assert (len(registry.runs), cycle["decision"], cycle["shadow"]["pairs"]) == (2, None, [])


def test_shadow_answers_are_compared_by_version(tmp_path: Path, registry: FakeRegistry) -> None:
    shadow(tmp_path, 100, 30, BETTER)
    shadow(tmp_path, 200, 2, WORSE, subject="one user")
    command = ("traffic", "compare", "--feedback", "feedback.jsonl")
    result = answer_in_process(*command, cwd=tmp_path)
    (compared,) = result["comparisons"]
    assert (result["shadow_answers"], compared["corrected"], compared["comparison"]["pairs"]) == (32, 32, 31)
    assert (compared["client"]["version"], compared["shadow"]["model"]) == ("1", "echo-candidate")
    assert compared["comparison"]["decision"] == "better"
    assert "echo-candidate 2" in run_in_process(*command, cwd=tmp_path).stdout
    answers = answer_in_process("traffic", "list", "--limit", 1000, cwd=tmp_path)["answers"]
    exported = answer_in_process("traffic", "export", "--unrated", "-o", "rows", cwd=tmp_path)
    assert len(answers) == SUBJECTS + 32
    assert exported["conversations"] == SUBJECTS + 32
    assert "chatcmpl-shadow" not in (tmp_path / "rows" / "conversations.jsonl").read_text()
    (status,) = answer_in_process("traffic", "status", cwd=tmp_path)["models"]
    assert status["row_bytes"] == round(status["bytes"] / (SUBJECTS + 32)), "the estimate is for requests"
    (tmp_path / "feedback.jsonl").write_text("")
    assert "no client's answer to the same request was corrected" in run_in_process(*command, cwd=tmp_path).stdout
    assert "--feedback is not set" in refusal(2, "traffic", "compare", cwd=tmp_path)["message"]


def test_models_are_compared_by_a_random_sample_that_editors_correct(tmp_path: Path, registry: FakeRegistry) -> None:
    settings = traffic.load(tmp_path)
    again = traffic.build_row(900, settings.hash_subject("user 1"), int(traffic.DAY.timestamp()))
    unusable = traffic.build_row(901, settings.hash_subject("tools"), int(traffic.DAY.timestamp()))
    del unusable["request"]["messages"]
    traffic.write_sealed(settings, traffic.DAY, [again, unusable])
    draw = ("traffic", "sample", "--rows", 40, "-o")
    assert answer_in_process(*draw, "sample.jsonl", cwd=tmp_path)["rows"] == 40
    text = (tmp_path / "sample.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert "answer " not in text, "the editor does not see the model's answer"
    assert {line["messages"][-1]["role"] for line in lines} == {"user"}
    assert (tmp_path / "sample.jsonl").stat().st_mode & 0o077 == 0
    everyone = answer_in_process("traffic", "sample", "--rows", 1000, "--seed", 1, "-o", "all.jsonl", cwd=tmp_path)
    assert everyone["rows"] == SUBJECTS
    other = [json.loads(line)["id"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert other[:40] != [line["id"] for line in lines]
    assert refusal(2, *draw, "sample.jsonl", cwd=tmp_path)["kind"] == "output_occupied"
    assert "can be corrected" in refusal(1, *draw, "x", "--days", "2020-01-01", cwd=tmp_path)["message"]

    options = ("--feedback", "sample.jsonl", "--sampled")
    assert "is both held back and corrected" in refusal(1, *COMMAND, *options, cwd=tmp_path)["message"]
    assert registry.runs == []
    for line in lines:
        line["correction"] = "Write to jane.doe@example.com."
    write_lines(tmp_path / "sample.jsonl", lines)
    rated = {"id": lines[0]["id"], "key": "b", "rating": "down", "time": traffic_files.now().isoformat()}
    with (tmp_path / "feedback.jsonl").open("a") as file:  # a user's later rating, and a second draw, change nothing
        file.write(json.dumps(rated) + "\n")
    latest = read_latest_feedback([tmp_path / name for name in ("sample.jsonl", "feedback.jsonl", "all.jsonl")])
    assert sum(line.get("sampled", False) for line in latest.values()) == 40
    assert latest[lines[0]["id"]]["rating"] == "down"
    cycle = retrain(tmp_path, *options, *SHADOW)["retraining"]
    held_back = (Path(cycle["rows"]) / "held_back.jsonl").read_text()
    sampled = {row["id"] for row in map(json.loads, held_back.splitlines()) if row["meta"].get("sampled")}
    assert sampled <= {line["id"] for line in lines}
    assert cycle["comparison"]["pairs"] == len(sampled) < len(held_back.splitlines())
    assert "jane.doe" not in held_back
    held = answer_in_process(*draw[:-1], "--held-back", 0.4, "-o", "held.jsonl", cwd=tmp_path)
    assert 0 < held["rows"] < 40
    for line in (tmp_path / "held.jsonl").read_text().splitlines():
        assert f'"id": "{json.loads(line)["id"]}"' in held_back
    shadow(tmp_path, 100, 30, BETTER)
    assert retrain(tmp_path, *SHADOW)["retraining"]["shadow"]["pairs"] == [], "these requests were not drawn"
    compared = answer_in_process("traffic", "compare", "--feedback", "feedback.jsonl", "--sampled", cwd=tmp_path)
    assert (compared["shadow_answers"], compared["comparisons"]) == (30, [])


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))  # as an editor's program


def test_sample_is_erased_and_expires_with_its_requests(
    tmp_path: Path, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = traffic.load(tmp_path)
    path = tmp_path / "sample.jsonl"
    answer_in_process("traffic", "sample", "-o", path, cwd=tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, lines)
    digest = settings.hash_subject("user 2")
    erased = answer_in_process("traffic", "erase", "--subject", "user 2", "--feedback", path, cwd=tmp_path)
    assert (erased["complete"], erased["feedback"]) == (True, 1)
    assert digest not in path.read_text()
    write_lines(path, lines)  # a copy that was not passed: its row is no longer captured
    erased = answer_in_process("traffic", "erase", "--subject", "user 2", "--feedback", path, cwd=tmp_path)
    assert digest not in path.read_text()
    drawn = traffic_files.now()
    monkeypatch.setattr(traffic_files, "now", lambda: traffic.DAY + timedelta(days=31))
    assert drawn > traffic.DAY + timedelta(days=1), "the draw is newer than the requests"
    assert answer_in_process("traffic", "expire", "--feedback", path, cwd=tmp_path)["feedback"] == SUBJECTS - 1
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"id":"a","sampled":true,"correction":"a "quoted" word"}', ":2: invalid JSON"),
        (
            '{"id":"a","sampled":true,"captured":"c","time":"t","correction":5}',
            ":2: expected an object with the strings id, captured, time, correction",
        ),
        ('{"sampled":true,"correction":"a"}', ":2: expected an object with the strings id, captured, time, correction"),
    ],
)
def test_invalid_line_of_an_edited_sample_is_reported(
    tmp_path: Path, registry: FakeRegistry, text: str, problem: str
) -> None:
    path = tmp_path / "sample.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": "b", "sampled": true, "captured": "c", "time": "t", "correction": "b"}\r\n'
        + text.encode()
        + b"\r\n"
    )
    for command in (COMMAND, ("traffic", "erase", "--subject", "user 2"), ("traffic", "expire")):
        before = path.read_bytes()
        error = refusal(1, *command, "--feedback", "sample.jsonl", cwd=tmp_path)
        assert problem in error["message"]
        assert path.read_bytes() == before


def interrupt(home: Path, registry: FakeRegistry) -> dict[str, Any]:
    """Retrain until the run is interrupted, and return the state."""
    registry.error = InterruptedRunError("interrupted")
    assert run_in_process(*COMMAND, cwd=home).returncode == EXIT_INTERRUPTED
    registry.error = None
    (cycle,) = json.loads((home / "retraining" / "retraining.json").read_text())["retrainings"]
    assert (cycle["run"], cycle["decision"]) == (None, None)
    return dict(cycle)


def test_interrupted_retraining_resumes_with_the_same_rows(tmp_path: Path, registry: FakeRegistry) -> None:
    cycle = interrupt(tmp_path, registry)
    rows = Path(cycle["rows"])
    before = {path.name: path.read_bytes() for path in rows.iterdir()}
    dry = answer_in_process(*COMMAND, "--dry-run", cwd=tmp_path)
    assert dry["retraining"]["number"] == 1
    result = retrain(tmp_path)["retraining"]
    assert (result["number"], result["decision"], result["rows"]) == (1, "promoted", str(rows))
    assert {path.name: path.read_bytes() for path in rows.iterdir()} == before
    assert len(registry.runs) == 2


def test_rows_are_exported_again_after_an_erasure(tmp_path: Path, registry: FakeRegistry) -> None:
    settings = traffic.load(tmp_path)
    rows = Path(interrupt(tmp_path, registry)["rows"])
    digest = settings.hash_subject("user 5").encode()
    assert digest in traffic.read_stored_bytes(tmp_path / "retraining")
    erasure.erase(settings, "user 5", "dpo", seal_seconds=0)
    assert digest not in traffic.read_stored_bytes(tmp_path / "retraining")
    retrain(tmp_path)
    assert digest not in traffic.read_stored_bytes(tmp_path / "retraining")
    assert rows.exists()


def test_erasure_during_the_run_withdraws_the_candidate(
    tmp_path: Path, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = traffic.load(tmp_path)
    digest = settings.hash_subject("user 5").encode()
    seen = []

    def run(customization: Customization, *_: object, **__: object) -> dict[str, Any]:
        seen.append(digest in traffic.read_stored_bytes(tmp_path / "retraining"))
        if len(seen) == 1:
            erasure.erase(settings, "user 5", "dpo", seal_seconds=0)
        elif len(seen) == 2:
            erasure.erase(settings, "nobody", "dpo", seal_seconds=0)  # whose rows were not exported
        return registry.run(customization)

    monkeypatch.setattr(local_runner, "run", run)
    assert retrain(tmp_path)["retraining"]["decision"] == "promoted"
    assert seen == [True, False]


def test_run_before_an_erasure_is_not_used_after_a_kill(
    tmp_path: Path, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stops after the second export of the rows, before the state is written."""
    settings = traffic.load(tmp_path)
    monkeypatch.setattr(retraining, "compare_answers", lambda *_: 1 / 0)
    assert run_in_process(*COMMAND, cwd=tmp_path).returncode == 1
    erasure.erase(settings, "user 5", "dpo", seal_seconds=0)
    monkeypatch.undo()
    state = retraining.load_state(tmp_path / "retraining")
    assert state.unfinished
    assert state.unfinished["run"]
    saves = []

    def save(state: retraining.State) -> None:
        saves.append([state.unfinished and state.unfinished[name] for name in ("exported", "run")])

    digest = settings.hash_subject("user 5").encode()
    monkeypatch.setattr(retraining.State, "save", save)
    retraining.export_rows(
        state,
        state.unfinished,
        settings,
        read_latest_feedback([tmp_path / "feedback.jsonl"]),
        ExportOptions(held_back=0.4),
    )
    assert saves[0] == [None, None]
    assert digest not in traffic.read_stored_bytes(tmp_path / "retraining")


def test_deleted_rows_are_exported_again(tmp_path: Path, registry: FakeRegistry) -> None:
    shutil.rmtree(interrupt(tmp_path, registry)["rows"])
    assert retrain(tmp_path)["retraining"]["decision"] == "promoted"


def test_failed_export_starts_no_retraining(tmp_path: Path, registry: FakeRegistry) -> None:
    """Otherwise the next command would retrain with fewer answers than the trigger requires."""
    lines = (tmp_path / "feedback.jsonl").read_text()
    (tmp_path / "feedback.jsonl").write_text(
        lines.replace('"correction":', '"note":').replace("}", ', "rating": "down"}')
    )
    assert "yields a training row" in refusal(1, *COMMAND, cwd=tmp_path)["message"]
    (tmp_path / "feedback.jsonl").write_text(lines.splitlines()[0] + "\n")
    assert not retrain(tmp_path)["triggered"]


def test_answers_of_a_subject_are_one_pair(tmp_path: Path) -> None:
    scores = {"a1": 90, "a2": 10, "b1": 60}
    rows = [
        {
            "id": name,
            "task": retraining.TASK,
            "candidate_scores": json.dumps({"chrf": score}),
            "base_scores": json.dumps({"chrf": 50}),
        }
        for name, score in scores.items()
    ]
    rows.append({**rows[0], "task": "other"})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "predictions.parquet")
    lines = [json.dumps({"id": name, "group": name[0]}) for name in scores]
    (tmp_path / "held_back.jsonl").write_text("\n".join(lines))
    result = retraining.compare_answers(tmp_path, tmp_path / "held_back.jsonl", 0.0)
    assert (result.pairs, result.mean_difference) == (2, pytest.approx(0.05))


def test_wrong_arguments_are_refused(tmp_path: Path, registry: FakeRegistry) -> None:
    command = ("retrain", "-c", "c.yaml")
    assert "no trigger is set" in refusal(2, *command, cwd=tmp_path)["message"]
    assert "--feedback is not set" in refusal(2, *command, "--every-days", 1, cwd=tmp_path)["message"]
    error = refusal(2, *command, "--every-days", 1, "--unrated", "--shadow-days", 1, cwd=tmp_path)
    assert "--shadow-days requires --feedback" in error["message"]
    error = refusal(1, *COMMAND, "--drift", "gone.json", cwd=tmp_path)
    assert "gone.json does not exist" in error["message"]
    error = refusal(1, *COMMAND, "--drift", "c.yaml", cwd=tmp_path)
    assert "c.yaml is not the result of a drift check" in error["message"]
    error = refusal(2, *COMMAND, "--set", "fine_tuning.objective=text", cwd=tmp_path)
    assert "objective is text, but captured traffic has no rows for this objective" in error["message"]
    error = refusal(1, *COMMAND, "--held-back", 0.01, "--folder", "few", cwd=tmp_path)
    assert "no subject is held back" in error["message"]
    (tmp_path / "retraining").mkdir()
    (tmp_path / "retraining" / "retraining.json").write_text("{")
    assert "retraining.json is damaged" in refusal(1, *COMMAND, cwd=tmp_path)["message"]
    assert registry.runs == []


def test_cronjob_of_the_documentation_is_valid() -> None:
    manifest = yaml.safe_load((ROOT / "docs" / "examples" / "retrain-cronjob.yaml").read_text())
    assert kubernetes_schemas.problems(manifest) == []
    pod = manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (script,) = pod["containers"][0]["args"]
    options = [word.split("=")[0] for word in script.split() if word.startswith("--") and word != "--"]
    shown = run_in_process("retrain", "--help", cwd=ROOT, COLUMNS="200").stdout
    for option in options:
        assert option in shown or option.startswith("--drift"), option


def test_recurring_run_of_the_documentation_compiles(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("retrain_pipeline", ROOT / "docs/examples/retrain_pipeline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    Compiler().compile(module.retrain_pipeline, str(tmp_path / "pipeline.yaml"))
    compiled, platform = yaml.safe_load_all((tmp_path / "pipeline.yaml").read_text())
    (executor,) = compiled["deploymentSpec"]["executors"].values()
    assert executor["container"]["command"] == ["tuneline", "retrain"]
    assert "pvcMount" in json.dumps(platform)
    shown = run_in_process("retrain", "--help", cwd=ROOT, COLUMNS="200").stdout
    assert all(option.split("=")[0] in shown for option in executor["container"]["args"])
    # The triggers and the thresholds are those of the CronJob.
    cronjob = (ROOT / "docs/examples/retrain-cronjob.yaml").read_text()
    assert all(option in cronjob for option in executor["container"]["args"] if option.startswith(("--min", "--every")))
    source = (ROOT / "docs/examples/retrain_pipeline.py").read_text()
    (call,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "client.create_recurring_run"
    ]
    names = [str(keyword.arg) for keyword in call.keywords]
    inspect.signature(Client.create_recurring_run).bind(None, *call.args, **dict.fromkeys(names))


@pytest.mark.stress
@pytest.mark.pipeline
@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.triton
def test_real_candidate_is_built_compared_and_promoted(tmp_path: Path) -> None:
    """Stress tier: two whole runs. A loss is tolerated, because a tiny model learns no language."""
    project.write_project(tmp_path)
    fill(tmp_path)
    first = project.run(tmp_path, "work")
    command = ("retrain", "-c", "customization.yaml", "--feedback", "feedback.jsonl", "--min-feedback", 10)
    options = ("--set", "fine_tuning.max_steps=70", "--held-back", 0.4, "--max-loss", 0.5, "--workdir", "work")
    cycle = answer(*command, *options, cwd=tmp_path)["retraining"]
    assert (first["verdict"], cycle["decision"]) == ("accepted", "promoted"), cycle["reason"]
    assert cycle["run"]["artifacts"]["dataset"] != first["artifacts"]["dataset"]
    lineage = answer("lineage", "tiny-helper@champion", "--workdir", "work", cwd=tmp_path)
    assert lineage["version"] == cycle["run"]["mlflow"]["model_version"] == "2"
    assert "conversations.jsonl" in json.dumps(lineage)
    # The texts of a held-back subject are in no file after its erasure; those of a curated one in listed artifacts only,
    # and in their copies in MLflow.
    rows = {
        name: (Path(cycle["rows"]) / f"{name}.jsonl").read_text().splitlines()
        for name in ("held_back", "conversations")
    }
    erase = ("traffic", "erase", "--feedback", "feedback.jsonl", "--workdir", "work")
    for name, lines in rows.items():
        number = json.loads(lines[0])["id"].removeprefix("chatcmpl-")
        texts = (f", use desk {number}.".encode(), traffic.load(tmp_path).hash_subject(f"user {number}").encode())
        assert all(text in read_all_bytes(tmp_path) for text in texts)
        erased = answer(*erase, "--subject", f"user {number}", cwd=tmp_path)
        assert erased["complete"]
        assert bool(erased["derived"]["models"]) == (name == "conversations")
        found = [path for path in list_files(tmp_path) if any(text in read_content(path) for text in texts)]
        assert name == "conversations" or not found, found
        for path in found:
            listed = path.is_relative_to(tmp_path / "work" / "store") and path.parent.name in json.dumps(
                erased["derived"]
            )
            assert listed or path.is_relative_to(tmp_path / "work" / "mlflow-artifacts"), path


def list_files(folder: Path) -> list[Path]:
    """Return all files but the records of erasures."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name != traffic_files.TOMBSTONES]


def read_content(path: Path) -> bytes:
    """Return the bytes of a file; of a compressed table, its values."""
    if path.suffix == ".parquet":
        return json.dumps(parquet.read_table(path).to_pylist(), default=str).encode()
    content = path.read_bytes()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def read_all_bytes(folder: Path) -> bytes:
    return b"\n".join(map(read_content, list_files(folder)))
