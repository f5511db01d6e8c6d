"""Lines that `tuneline curate` and `tuneline run` print about a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.runs.run_summary import format_evaluation_sets


@pytest.mark.parametrize(
    ("summary", "lines"),
    [
        (
            {"evaluation_sets": {"arc.jsonl": {"items": 1172, "unsearchable": 1, "unreadable": 0, "rejected_rows": 4}}},
            [
                "evaluation set arc.jsonl: rejected rows: 4; items that cannot be found by their questions: 1 of 1,172",
            ],
        ),
        ({"evaluation_sets": {}}, []),
        ({}, []),
    ],
)
def test_evaluation_sets_are_summarized(tmp_path: Path, summary: dict[str, Any], lines: list[str]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"summary": summary}))
    assert format_evaluation_sets(tmp_path) == lines
