"""What of a dataset's rows is learned and measured, by their kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common import artifacts, conversations
from components.common.errors import InputError
from components.data_curation.rows import Kind, Row
from tests.datasets import small_dataset, write_split


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = turn("user", "Why?"), turn("assistant", "Because it is so."), turn("assistant", "No idea.")


def write(path: Path, kind: Kind, *contents: dict[str, object]) -> Path:
    rows = [Row(kind=kind, content=c, own_id="", source="s", meta={}, file="f", line=i) for i, c in enumerate(contents)]
    for row in rows:
        row.id = f"row-{row.line}"
    write_split(path, kind, rows)
    return path


def test_preference_pairs_give_the_chosen_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", "preference", {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "tools": None})
    assert conversations.read(path, "preference") == [{"id": "row-0", "messages": [ASKED, GOOD], "tools": None}]


def test_labelled_rows_give_the_answers_that_are_labelled_good(tmp_path: Path) -> None:
    good = {"prompt": [ASKED], "completion": [GOOD], "label": True, "tools": None}
    path = write(tmp_path / "train.parquet", "unpaired", good, {**good, "completion": [BAD], "label": False})
    assert [row["messages"] for row in conversations.read(path, "unpaired")] == [[ASKED, GOOD]]


def test_a_limit_counts_what_can_be_used(tmp_path: Path) -> None:
    row = {"prompt": [ASKED], "completion": [GOOD], "label": True, "tools": None}
    path = write(tmp_path / "train.parquet", "unpaired", {**row, "label": False}, row, {**row, "label": False}, row, row)
    assert [found["id"] for found in conversations.read(path, "unpaired", limit=2)] == ["row-1", "row-3"]


def test_rows_of_plain_text_are_refused_with_what_is_needed(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset")
    manifest = dataset.manifest.model_copy(update={"summary": {"rows_kind": "text"}})
    with pytest.raises(InputError, match="holds text rows") as refused:
        conversations.kind_of(artifacts.Artifact(dataset.path, manifest))
    assert "preference pairs" in refused.value.hint
