"""`tuneline compare` of run folders in several states, with artifacts in the formats of the stages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

from components.common.artifacts import artifact_folder
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from pipelines.runs import comparison_page, run_comparison
from pipelines.runs.compared_run import flatten_parameters
from pipelines.runs.run_folder import Run
from tests.pipelines.command import answer_in_process, refusal, run_in_process

WEIGHT = 2.0  # tokens of each item
LOSSES = [3.0, 1.0, 2.5, 4.0]  # nats of each item, summed over its tokens
CONFIGURATION = {
    "seed": 7,
    "fine_tuning": {"learning_rate": 1e-3, "lora": {"r": 8}},
    "evaluation": {"tasks": [{"name": "held_out", "max_items": 4}]},
}


def publish(
    workdir: Path, kind: str, files: dict[str, str], summary: dict[str, Any], rows: pa.Table | None = None
) -> Path:
    """Publish an artifact in the store of a workdir."""
    draft = workdir / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, text in files.items():
        (draft / name).write_text(text)
    if rows is not None:
        parquet.write_table(rows, draft / "predictions.parquet")
    payload = [path.name for path in draft.iterdir()]
    made = artifact_folder.publish(draft, kind, payload=payload, inputs=[], config={}, seed=1, key="k", summary=summary)
    return artifact_store.add_artifact(workdir / "store", made).path


def publish_evaluation(workdir: Path, shift: float, answers: list[str | None], test_split: str) -> Path:
    """Publish an evaluation whose candidate loses `shift` nats more on each item than LOSSES."""
    losses = [loss + shift for loss in LOSSES]
    loss = {
        "candidate": sum(losses) / (WEIGHT * len(LOSSES)),
        "base": 2.0,
        "incumbent": None,
        "ci95": [-0.5, -0.1],
        "n": 4,
    }
    rule = {"holds": shift <= 0, "reason": f"held_out.loss is {shift} worse."}
    content = {
        "verdict": "accepted" if shift <= 0 else "refused",
        "reasons": [rule["reason"]],
        "rules": [rule],
        "metrics": {"held_out": {"loss": loss}},
        "tasks": {
            "held_out": {"items_sha256": test_split, "metrics": {"loss": {"better": "lower", "exponential": False}}}
        },
        "measured": {
            "base_model": "b" * 64,
            "incumbent": None,
            "engine": "transformers",
            "dataset": {"splits": {"test.parquet": test_split}},
            "settings": {"bootstrap_samples": 200, "seed": 7, "gate": [], "min_items": 1},
        },
    }
    rows = [
        {
            "id": f"id{number}",
            "task": "held_out",
            "prompt": f"Question {number}?",
            "reference": "<b>yes</b>",
            "weights": json.dumps({"loss": WEIGHT}),
            "candidate_answer": text,
            "candidate_scores": json.dumps({"loss": one}),
            "base_answer": "perhaps",
        }
        for number, (one, text) in enumerate(zip(losses, answers, strict=True))
    ]
    table = pa.Table.from_pylist(rows)
    return publish(workdir, "evaluation", {"evaluation.json": json.dumps(content)}, {}, table)


def make_run(
    workdir: Path, name: str, *, learning_rate: float = 1e-3, shift: float = 0.0, test_split: str = "t", rows: int = 10,
    answers: list[str | None] | None = None, reached: tuple[str, ...] = ("dataset", "model", "evaluation"),
) -> Run:  # fmt: skip
    """Create the folder of a run; it is finished if it reached the evaluation, otherwise it failed."""
    run = Run(workdir / "runs" / name)
    run.folder.mkdir(parents=True)
    values = {**CONFIGURATION, "fine_tuning": {**CONFIGURATION["fine_tuning"], "learning_rate": learning_rate}}  # type: ignore[dict-item]
    (run.folder / "customization.yaml").write_text(yaml.safe_dump(values))
    artifacts: dict[str, Path] = {}
    if "dataset" in reached:
        counts = {"in": rows + 1, "kept": rows, "quarantined": 0, "rejected": {"too_short": 1}}
        summary = {"rows": counts, "splits": {"train": rows - 4, "test": 4}}
        artifacts["dataset"] = publish(workdir, "dataset", {"train.parquet": str(rows)}, summary)
    if "model" in reached:
        log = "".join(json.dumps({"step": step, "train_loss": 3.0 - step + shift}) + "\n" for step in (1, 2))
        summary = {"steps": 2, "tokens": 80, "train_loss": 1.0 + shift, "validation_loss": None}
        artifacts["model"] = publish(workdir, "model", {"training.jsonl": log, "name": name}, summary)
    if "evaluation" in reached:
        texts = answers or [f"answer {number} of {name}" for number in range(4)]
        artifacts["evaluation"] = publish_evaluation(workdir, shift, texts, test_split)
    stages = {"dataset": "data_curation", "model": "fine_tuning", "evaluation": "evaluation"}
    events = [
        event
        for kind, path in artifacts.items()
        for event in (
            {"event": "result", kind: path.name},
            {"event": "finished", "seconds": 2.5, "cached": False},
        )
        for event in [{"time": 1000.0, "stage": stages[kind], **event}]
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    if "evaluation" in reached:
        result = {
            "verdict": "accepted" if shift <= 0 else "refused",
            "artifacts": {kind: str(path) for kind, path in artifacts.items()},
            "mlflow": {"model_name": "helper", "model_version": "1"},
            "stages": [{"name": stages[kind], "seconds": 2.5, "cached": False} for kind in artifacts],
        }
        run.update(status="finished", started=1000.0, ended=1010.0, result=result)
    else:
        run.update(status="failed", started=1000.0, ended=1005.0)
    return run


def compare(*runs: Run, **options: Any) -> dict[str, Any]:
    return run_comparison.compare_runs(runs, **options)


def test_difference_of_two_candidates_is_paired_by_item(tmp_path: Path) -> None:
    """Each item loses 0.5 nats more, over 2 tokens: the difference is 0.25 nats per token without any spread."""
    result = compare(make_run(tmp_path, "a"), make_run(tmp_path, "b", shift=0.5))
    first, second = result["metrics"]["held_out"]["loss"]
    assert first["difference"] is None
    assert second["candidate"] - first["candidate"] == pytest.approx(0.25)
    assert [second["difference"]["value"], *second["difference"]["ci95"]] == pytest.approx([0.25, 0.25, 0.25])
    assert (second["base"], second["ci95"], second["n"]) == (2.0, [-0.5, -0.1], 4)
    assert [run["verdict"] for run in result["runs"]] == ["accepted", "refused"]
    assert result["runs"][1]["evaluation"]["failed"] == ["held_out.loss is 0.5 worse."]
    assert result["warnings"] == []


def test_other_test_split_has_no_difference_and_a_warning(tmp_path: Path) -> None:
    result = compare(make_run(tmp_path, "a"), make_run(tmp_path, "b", shift=0.5, test_split="other"))
    assert result["metrics"]["held_out"]["loss"][1]["difference"] is None
    assert result["warnings"] == [
        "b and a have different test splits; the held-out scores cover different rows.",
        "b and a have different items in held_out; no difference is computed for these tasks.",
    ]


def test_only_differing_parameters_are_listed(tmp_path: Path) -> None:
    runs = make_run(tmp_path, "a"), make_run(tmp_path, "b", learning_rate=5e-4, shift=0.5)
    assert compare(*runs)["parameters"] == {"fine_tuning.learning_rate": [1e-3, 5e-4]}
    every = compare(*runs, include_equal=True)["parameters"]
    assert every["evaluation.tasks[held_out].max_items"] == [4, 4]
    assert every.keys() == flatten_parameters(CONFIGURATION).keys()


def test_unfinished_stages_are_absent(tmp_path: Path) -> None:
    stopped = make_run(tmp_path, "b", rows=20, reached=("dataset",))
    result = compare(make_run(tmp_path, "a"), stopped, make_run(tmp_path, "c", rows=30, reached=()))
    finished, curated, empty = result["runs"]
    assert (curated["dataset"]["rows"]["kept"], curated["model"], curated["evaluation"]) == (20, None, None)
    assert (empty["state"], empty["dataset"], empty["stages"], empty["curve"]) == ("failed", None, [], [])
    assert result["metrics"]["held_out"]["loss"][1:] == [None, None]
    assert result["answers"] == []
    assert "b: no evaluation, so the metrics of b and a cannot be compared." in result["warnings"]
    rows = {row[0]: row[1:] for row in comparison_page.list_data_rows(result["runs"])}
    assert rows["train split"] == [6, 16, None]
    assert rows["equal to the first run"] == [True, False, None]
    assert ["fine-tune", 2.5, None, None] in comparison_page.list_stage_rows(result["runs"])
    assert finished["curve"] == [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": 1.0}]
    assert "failed" in comparison_page.render_comparison(result)


def test_running_training_is_compared_by_its_events(tmp_path: Path) -> None:
    running = make_run(tmp_path, "b", reached=())
    metrics = {"time": 1.0, "stage": "fine_tuning", "event": "metrics", "values": {"train_loss": 2.25}, "step": 3}
    diverged = {**metrics, "values": {"train_loss": float("nan")}, "step": 4}
    running.events.write_text(json.dumps(metrics) + "\n" + json.dumps(diverged) + "\n")
    result = compare(make_run(tmp_path, "a"), running)
    assert result["runs"][1]["curve"] == [{"step": 3, "train_loss": 2.25}, {"step": 4}]
    json.dumps(result, allow_nan=False)


def test_removed_artifact_is_reported(tmp_path: Path) -> None:
    runs = make_run(tmp_path, "a"), make_run(tmp_path, "b", shift=0.5)
    removed = Path(runs[1].read()["result"]["artifacts"]["model"])
    (removed / "manifest.json").unlink()
    result = compare(*runs)
    assert result["runs"][1]["model"] is None
    assert result["warnings"] == [f"b: the model {removed.name[:12]} is no longer in {removed.parent}."]


def test_moved_workdir_is_compared_from_its_new_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "old", "a")
    (tmp_path / "old").rename(tmp_path / "new")
    result = compare(Run(tmp_path / "new" / "runs" / "a"), make_run(tmp_path, "b", shift=0.5))
    assert result["warnings"] == []
    assert result["runs"][0]["model"]["steps"] == 2


def test_answers_are_a_seeded_sample_of_shared_prompts(tmp_path: Path) -> None:
    runs = make_run(tmp_path, "a", answers=["one", None, "three", "four"]), make_run(tmp_path, "b", shift=0.5)
    samples = {seed: compare(*runs, answers=2, seed=seed)["answers"] for seed in range(8)}
    assert samples[3] == compare(*runs, answers=2, seed=3)["answers"]
    assert {answer["id"] for sample in samples.values() for answer in sample} == {"id0", "id2", "id3"}
    assert all(len(sample) == 2 for sample in samples.values())
    every = compare(*runs)["answers"]
    assert every[0] == {
        "task": "held_out",
        "id": "id0",
        "prompt": "Question 0?",
        "reference": "<b>yes</b>",
        "base": "perhaps",
        "answers": ["one", "answer 0 of b"],
    }


def test_runs_of_other_workdirs_are_found_by_path(tmp_path: Path) -> None:
    make_run(tmp_path / "one", "20260101-100000-aaaa")
    newest = make_run(tmp_path / "two", "20260102-100000-bbbb", shift=0.5)
    page = tmp_path / "page.html"
    names = ["2026", tmp_path / "two"]
    result = answer_in_process("compare", *names, "--html", page, "--workdir", "one", cwd=tmp_path)
    assert [run["run"] for run in result["runs"]] == ["20260101-100000-aaaa", newest.name]
    assert result["page"] == str(page)
    html = page.read_text()
    assert "&lt;b&gt;yes&lt;/b&gt;" in html
    assert "<b>yes</b>" not in html
    by_folder = answer_in_process("compare", "two/runs/" + newest.name, "one", cwd=tmp_path)
    assert [run["run"] for run in by_folder["runs"]] == [newest.name, "20260101-100000-aaaa"]
    assert by_folder["page"] is None
    assert answer_in_process("status", "two", cwd=tmp_path)["run"] == newest.name


def test_terminal_shows_every_section(tmp_path: Path) -> None:
    make_run(tmp_path / "wd", "a")
    make_run(tmp_path / "wd", "b", learning_rate=5e-4, shift=0.5, test_split="other", answers=["\x1b[2J", *"xyz"])
    output = run_in_process("compare", "a", "b", "--workdir", "wd", cwd=tmp_path).stdout
    shown = ("! b and a have different", "fine_tuning.learning_rate", "rejected: too_short", "held_out.loss")
    for text in (*shown, "-0.5 to -0.1", "failed: held_out.loss is 0.5 worse.", "answer 0 of a"):
        assert text in output
    assert "\x1b" not in output


def test_wrong_runs_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "wd", "alpha")
    make_run(tmp_path / "wd", "beta", shift=0.5)
    hint = "Specify two or more runs; `tuneline status` lists the runs of a workdir."
    refused = {
        ("alpha",): ("a comparison requires two runs; found alpha", hint),
        ("alpha", "wd/runs/alpha"): ("alpha and wd/runs/alpha are the same run, alpha", hint),
        ("alpha", "gamma"): (
            f"run gamma does not exist in {Workdir(tmp_path / 'wd').root}; existing runs: beta, alpha",
            "Use one of these names, or `latest`.",
        ),
    }
    for names, (message, expected_hint) in refused.items():
        error = refusal(2, "compare", *names, "--workdir", "wd", cwd=tmp_path)
        assert (error["kind"], error["message"], error["hint"]) == ("usage", message, expected_hint)
    error = refusal(2, "compare", "alpha", "beta", "-o", "missing/page.html", "--workdir", "wd", cwd=tmp_path)
    assert error["message"] == "the folder missing does not exist"


def test_damaged_training_log_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "wd", "a")
    damaged = make_run(tmp_path / "wd", "b", shift=0.5)
    log = Path(damaged.read()["result"]["artifacts"]["model"]) / "training.jsonl"
    log.write_text('{"step": 1, "train')
    error = refusal(1, "compare", "a", "b", "--workdir", "wd", cwd=tmp_path)
    assert error["kind"] == "artifact_damaged"
    assert error["message"].startswith(f"{log} is unreadable: ")


def test_changed_evaluation_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "wd", "a")
    changed = make_run(tmp_path / "wd", "b", shift=0.5)
    (Path(changed.read()["result"]["artifacts"]["evaluation"]) / "evaluation.json").write_text("{}")
    error = refusal(1, "compare", "a", "b", "--workdir", "wd", cwd=tmp_path)
    assert error["kind"] == "artifact_damaged"
