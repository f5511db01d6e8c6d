"""Finite scores are cached, and damaged cache files are ignored."""

from __future__ import annotations

import json
from pathlib import Path

from components.evaluation import score_cache
from components.evaluation.task_interface import Item, Scores
from tests.evaluation.task_builders import ACCURACY, StubTask, build_items

SCORES = Scores(
    {"exact_match": [1.0, 0.0]},
    answers=["Paris", None],
    figures={"errors": 1.0},
    samples=[[{"answer": "Paris", "exact_match": 1.0}], []],
)


def test_saved_scores_round_trip(tmp_path: Path) -> None:
    score_cache.save_scores(tmp_path / "s.json", SCORES)
    assert score_cache.load_scores(tmp_path / "s.json") == SCORES


def test_modified_cache_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    score_cache.save_scores(path, SCORES)
    cached = json.loads(path.read_text())
    cached["scores"]["values"]["exact_match"] = [1.0, 1.0]
    path.write_text(json.dumps(cached))
    assert score_cache.load_scores(path) is None


def test_non_finite_scores_are_not_cached(tmp_path: Path) -> None:
    broken = Scores({"exact_match": [float("nan"), 0.0]})
    score_cache.save_scores(tmp_path / "s.json", broken)
    assert not (tmp_path / "s.json").exists()


def test_changed_prompt_changes_task_digest() -> None:
    task = StubTask("questions", ACCURACY)
    assert score_cache.digest_task(task, build_items(2), []) == score_cache.digest_task(task, build_items(2), [])
    assert score_cache.digest_task(task, build_items(2), []) != score_cache.digest_task(
        task, [build_items(2)[0], Item(id="0001", prompt="question 2")], []
    )


def test_changed_task_file_changes_task_digest() -> None:
    task = StubTask("questions", ACCURACY)
    assert score_cache.digest_task(task, build_items(2), ["a" * 64]) != score_cache.digest_task(
        task, build_items(2), ["b" * 64]
    )
