"""The dataset's section in the data and on the page of the run report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from components.common.artifacts.artifact_folder import Artifact, Manifest
from pipelines.steps import report_data, report_page

COUNTS = {"items": 1172, "unsearchable": 3, "unreadable": 0, "rejected_rows": 41}


@pytest.mark.parametrize(
    ("summary", "row"),
    [
        ({"evaluation_sets": {"arc/test.jsonl": COUNTS}}, ["arc/test.jsonl 41 1,172 3"]),
        ({"evaluation_sets": {}}, []),
        ({}, []),  # a dataset of an earlier release
    ],
)
def test_counts_of_the_evaluation_sets_are_on_the_page(tmp_path: Path, summary: dict[str, Any], row: list[str]) -> None:
    columns = ("reason", "detail", "source", "line", "text")
    parquet.write_table(pa.table({name: pa.array([], pa.string()) for name in columns}), tmp_path / "rejected.parquet")
    (tmp_path / "quarantine.jsonl").touch()
    rows = {"in": 9, "kept": 9, "quarantined": 0, "rejected": {}}
    fields = {"content_sha256": "a" * 64, "config_sha256": "", "seed": 1, "inputs": [], "files": [], "config": {}}
    manifest = Manifest(
        schema="tuneline/dataset/v1",
        produced_by={},
        summary={"rows": rows, "splits": {"train": 9}, "rows_kind": "sft", **summary},
        **fields,
    )
    page = report_page._render_data(report_data._describe_dataset(Artifact(tmp_path, manifest)))
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert re.findall(r"evaluation set rejected rows items unsearchable items (.*?) No row", text) == row
