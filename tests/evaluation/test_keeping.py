"""Scores are kept whole, and never believed when they are not."""

from __future__ import annotations

import json
from pathlib import Path

from components.evaluation import keeping
from components.evaluation.task import Item, Scores
from tests.evaluation.making import RIGHT, Numbers, items

SCORES = Scores({"exact_match": [1.0, 0.0]}, answers=["Paris", None], figures={"errors": 1.0})


def test_what_was_kept_comes_back_as_it_was(tmp_path: Path) -> None:
    keeping.keep(tmp_path / "s.json", SCORES)
    assert keeping.kept(tmp_path / "s.json") == Scores({"exact_match": [1.0, 0.0]}, {}, ["Paris", None], {"errors": 1.0})


def test_a_changed_figure_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    keeping.keep(path, SCORES)
    kept = json.loads(path.read_text())
    kept["scores"]["values"]["exact_match"] = [1.0, 1.0]
    path.write_text(json.dumps(kept))
    assert keeping.kept(path) is None


def test_scores_that_are_no_numbers_are_looked_at_again_next_time(tmp_path: Path) -> None:
    broken = Scores({"exact_match": [float("nan"), 0.0]})
    keeping.keep(tmp_path / "s.json", broken)
    assert not (tmp_path / "s.json").exists()


def test_another_word_in_a_prompt_is_another_task() -> None:
    task = Numbers("questions", RIGHT)
    assert keeping.task_digest(task, items(2), []) == keeping.task_digest(task, items(2), [])
    assert keeping.task_digest(task, items(2), []) != keeping.task_digest(task, [items(2)[0], Item(id="0001", prompt="question 2")], [])


def test_another_way_of_scoring_in_a_file_of_the_task_is_another_task() -> None:
    task = Numbers("questions", RIGHT)
    assert keeping.task_digest(task, items(2), ["a" * 64]) != keeping.task_digest(task, items(2), ["b" * 64])
