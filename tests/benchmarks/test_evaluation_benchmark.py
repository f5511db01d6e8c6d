"""The evaluation benchmark on the tiny model, with a fake lm-eval that scores every request separately.

The tests marked `long` share a run of the benchmark, which takes 10 seconds of CPU.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evaluation_page, icl
from benchmarks.peers import run_evaluation
from tests.evaluation.engine.conftest import score_separately
from tests.tiny import tiny_model

QUESTION = {"query": "Question: What does it return? ", "choices": ["None", "a list of lines", "a file"], "gold": 1}
SCHEMA = {
    "context_options": ["The fox saw the dog so the fox", "The fox saw the dog so the dog"],
    "continuation": "jumps.",
    "gold": 0,
}
ENDING = {"context": "Open the file, read every", "continuation": "line"}


def test_every_row_layout_becomes_requests() -> None:
    assert icl.item(QUESTION)["requests"][0] == ["Question: What does it return?\nAnswer:", " None"]
    assert icl.item({**QUESTION, "query": "It returns"})["requests"][2] == ["It returns", " a file"]
    assert icl.item(SCHEMA)["requests"] == [[context, " jumps."] for context in SCHEMA["context_options"]]
    assert icl.item(ENDING) == {"requests": [["Open the file, read every", " line"]], "gold": None}


def test_option_tasks_ask_for_one_token() -> None:
    assert icl.option_item(QUESTION)["requests"][1] == [
        "Question: What does it return?\nA. None\nB. a list of lines\nC. a file\nAnswer:",
        " B",
    ]
    listed = {"query": "Is it open?\nAnswer:", "choices": ["no", "yes"], "gold": 1}
    assert icl.option_item(listed, "Header. ")["requests"][0] == ["Header. Is it open?\nAnswer:", " no"]


def test_examples_are_rows_that_are_not_scored(tmp_path: Path) -> None:
    rows = [{"query": f"Is {number} even?", "choices": ["no", "yes"], "gold": number % 2 ^ 1} for number in range(9)]
    (tmp_path / "boolq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    without, _ = icl.read(tmp_path, "boolq", None)
    few_shot, _ = icl.read(tmp_path, "boolq_5shot", 2)
    assert len(without) == 4
    assert len(few_shot) == 2
    context = few_shot[0]["requests"][0][0]
    assert context.startswith("Is 4 even?\nAnswer: yes\n\nIs 5 even?\nAnswer: no\n\n")
    assert context.endswith("\n\nIs 0 even?\nAnswer:")


def test_choice_is_most_likely_and_ending_is_greedy() -> None:
    items = [icl.item(QUESTION), icl.item(SCHEMA), icl.item(ENDING), icl.item(ENDING)]
    answers = [(-3.0, True), (-2.0, False), (-9.0, True), (-2.0, True), (-1.0, True), (-5.0, False), (-5.0, True)]
    assert icl.right(items, answers) == [True, False, False, True]


def test_files_are_read_compressed_or_not_up_to_limit(tmp_path: Path) -> None:
    lines = "".join(json.dumps(QUESTION) + "\n" for _ in range(5))
    (tmp_path / "icl_piqa.jsonl").write_text(lines)
    (tmp_path / "icl_arc_easy.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert icl.read(tmp_path, "piqa", 3) == icl.read(tmp_path, "arc_easy", 3)
    assert len(icl.read(tmp_path, "piqa", None)[0]) == 5
    with pytest.raises(FileNotFoundError, match="no file of winogrande"):
        icl.read(tmp_path, "winogrande", None)


def test_discordant_items_are_reported() -> None:
    tasks = {"schemas": [icl.item(SCHEMA), icl.item(SCHEMA)]}
    ours, theirs = (
        [(-1.0, True), (-2.0, True), (-1.0, True), (-2.0, True)],
        [(-1.5, True), (-2.0, True), (-3.0, True), (-2.0, True)],
    )
    comparison = run_evaluation.compare(tasks, {"schemas": ours}, {"schemas": theirs})
    assert comparison["unequal"] == {"schemas": [1]}
    assert comparison["accuracy"] == {"ours": {"schemas": 1.0}, "theirs": {"schemas": 0.5}}
    assert comparison["differences"]["schemas"] == {"mean": 0.625, "most": 2.0}


def load_sequential_peer(model: str, adapter: str | None) -> Any:
    """Replace lm_eval_peer: score requests one at a time without lm-eval."""
    from components.common.models import model_loading

    model_files = model_loading.open_model(model)
    loaded = model_loading.load_model(
        model_loading.LoadableModel(
            "peer", model_files.base, model_files.weights, Path(adapter) if adapter else None, None
        )
    )
    tokenizer = model_loading.load_tokenizer(model_files.weights)

    def score(batch: int | str, requests: run_evaluation.Requests) -> run_evaluation.Answers:
        likelihoods = [score_separately(loaded, request) for request in run_evaluation.encoded(tokenizer, requests)]
        return [(likelihood.logprob, likelihood.greedy) for likelihood in likelihoods]

    return score, loaded


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("benchmark")
    tasks = {
        "questions": [icl.item(QUESTION)] * 3,
        "schemas": [icl.item(SCHEMA)] * 2,
        "endings": [icl.item(ENDING)] * 2,
    }
    settings = {
        "model": str(tiny_model(folder / "tiny")),
        "adapter": str(folder / "adapter"),
        "tasks": tasks,
        "rounds": 2,
        "batch_tokens": 64,
        "peer_batches": [1, 4],
        "trial_rows": 2,
        "profile_rows": 2,
    }
    result = run_evaluation.run(settings, load_sequential_peer)
    environment = {
        "command": "c",
        "date": "2026-11-22",
        "commit": "abc",
        "python": "3",
        "processor": "p",
        "cores": 2,
        "memory": 2**34,
        "load": 0,
    }
    run_summary = {
        "cost": {"wall": 5.0, "rss": 2**30},
        "model": "tiny",
        "rounds": 2,
        "batch_tokens": 64,
        "profile_rows": 2,
    }
    return {
        **environment,
        **json.loads(json.dumps(result)),
        **run_summary,
        "sha256": dict.fromkeys(tasks, "ab" * 32),
    }


@pytest.mark.long
def test_both_engines_agree_on_items(results: dict[str, Any]) -> None:
    assert evaluation_page.equal(results)
    assert all(difference["most"] < 1e-3 for difference in results["differences"].values())
    assert results["adapter"]["added_apart"] < 1e-3
    assert results["adapter"]["together_apart"] < 1e-3
    assert results["lengths"]["questions"]["requests"] == 9


@pytest.mark.long
def test_profile_counts_model_slots(results: dict[str, Any]) -> None:
    ours, theirs = (results["profiles"][name] for name in ("ours", "theirs"))
    assert ours["slots"] < theirs["slots"]
    assert sum(ours["parts"].values()) == pytest.approx(ours["total"])


@pytest.mark.long
def test_page_reports_missed_goal(results: dict[str, Any]) -> None:
    slow = {
        **results,
        "ours": [{**round_, "wall": 9.0} for round_ in results["ours"]],
        "theirs": [{**round_, "wall": 9.9} for round_ in results["theirs"]],
    }
    page = evaluation_page.markdown(slow)
    assert "Goal: at least 2 × the speed of lm-eval at its best batch size" in page
    assert "**missed** (1.10, in CPU time" in page
    assert page.startswith("# Evaluation, measured")
    assert "Other programs were using the CPU" not in page
    assert "Other programs were using the CPU" in evaluation_page.markdown({**slow, "load": 3})
    assert "Both systems answer the same items correctly." in page
    for name in results["adapter"]["rounds"]:
        assert f"| {name} |" in page
    unequal = {**results, "unequal": {**results["unequal"], "questions": [1]}}
    assert "so their speeds are not comparable" in evaluation_page.markdown(unequal)


@pytest.mark.long
def test_missing_peer_is_reported(results: dict[str, Any]) -> None:
    partial = {name: value for name, value in results.items() if name not in ("theirs", "profiles", "best", "trials")}
    partial["adapter"] = {
        **partial["adapter"],
        "rounds": {n: r for n, r in partial["adapter"]["rounds"].items() if n != "lm-eval, adapter"},
    }
    page = evaluation_page.markdown({**partial, "peer_error": "ModuleNotFoundError: No module named 'lm_eval'"})
    assert "**lm-eval** was not measured: ModuleNotFoundError" in page
    assert "| base and adapter |" in page
