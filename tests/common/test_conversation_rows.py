"""Conversations for training and evaluation by the kind of a dataset's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.models import conversation_rows
from components.common.runtime.errors import InputError
from components.data_curation.rows import Kind, Row
from tests.datasets import small_dataset, write_split


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION, GOOD, BAD = (
    message("user", "Why?"),
    message("assistant", "Because it is so."),
    message("assistant", "No idea."),
)


def write_rows(path: Path, kind: Kind, *contents: dict[str, object]) -> Path:
    rows = [Row(kind=kind, content=c, own_id="", source="s", meta={}, file="f", line=i) for i, c in enumerate(contents)]
    for row in rows:
        row.id = f"row-{row.line}"
    write_split(path, kind, rows)
    return path


def test_preference_pairs_yield_chosen_answer(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "train.parquet",
        "preference",
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD], "tools": None},
    )
    assert conversation_rows.read_conversations(path, "preference") == [
        {"id": "row-0", "messages": [QUESTION, GOOD], "tools": None}
    ]


def test_unpaired_rows_yield_good_answers(tmp_path: Path) -> None:
    good = {"prompt": [QUESTION], "completion": [GOOD], "label": True, "tools": None}
    path = write_rows(tmp_path / "train.parquet", "unpaired", good, {**good, "completion": [BAD], "label": False})
    assert [row["messages"] for row in conversation_rows.read_conversations(path, "unpaired")] == [[QUESTION, GOOD]]


def test_limit_counts_usable_rows(tmp_path: Path) -> None:
    row = {"prompt": [QUESTION], "completion": [GOOD], "label": True, "tools": None}
    path = write_rows(
        tmp_path / "train.parquet", "unpaired", {**row, "label": False}, row, {**row, "label": False}, row, row
    )
    assert [conversation["id"] for conversation in conversation_rows.read_conversations(path, "unpaired")[:2]] == [
        "row-1",
        "row-3",
    ]


def test_text_rows_are_refused_with_hint(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset")
    manifest = dataset.manifest.model_copy(update={"summary": {"rows_kind": "text"}})
    with pytest.raises(InputError, match="contains text rows") as error:
        conversation_rows.get_rows_kind(artifact_folder.Artifact(dataset.path, manifest))
    assert "preference pairs" in error.value.hint
