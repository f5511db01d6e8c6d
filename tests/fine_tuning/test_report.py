"""Sentences of the training report. Fast tier: no model is trained."""

from __future__ import annotations

import pytest

from components.fine_tuning import report
from tests.fine_tuning.builders import recipe

ROWS = {"truncated": 0, "cut_tokens": 0, "cut_share": 0.0, "without_answer": 0}


@pytest.mark.parametrize(
    ("changes", "objective", "sentences"),
    [
        ({}, "sft", []),
        (
            {"truncated": 1, "cut_tokens": 1200, "cut_share": 0.05, "without_answer": 2},
            "sft",
            [
                "1 row was truncated to 96 tokens, which removed 1,200 tokens (5.0% of all).",
                "2 rows were skipped, because the first 96 tokens contain no token to learn.",
            ],
        ),
        ({}, "grpo", []),
        (
            {"without_answer": 3},
            "grpo",
            [
                "3 other rows were left out, because the prompt exceeds 96 tokens or the conversation does not end with "
                "a text answer."
            ],
        ),
    ],
)
def test_changed_rows_are_reported_only_if_there_are_any(
    changes: dict[str, float], objective: str, sentences: list[str]
) -> None:
    config = recipe(objective=objective, max_length=96)
    assert report._describe_changed_rows({**ROWS, **changes}, config) == sentences
