"""Rows of a dataset as conversations that can be learned and measured: {"id", "messages", "tools"}.

Preference pairs give their chosen answer and labelled rows those labelled good: supervised tuning on the preferred answers is what
preference methods start from and are compared with ("Preferred-FT", Rafailov et al., arXiv 2305.18290, section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from components.common.artifacts import Artifact
from components.common.errors import InputError

Row = dict[str, Any]


def _as_it_is(row: Row) -> list[Any] | None:
    return list(row["messages"])


def _chosen(row: Row) -> list[Any] | None:
    return [*row["prompt"], *row["chosen"]]


def _labelled_good(row: Row) -> list[Any] | None:
    return [*row["prompt"], *row["completion"]] if row["label"] else None


# By kind of rows: the columns that make the conversation, how they make it, and what of the rows is used, in words.
KINDS: dict[str, tuple[list[str], Callable[[Row], list[Any] | None], str]] = {
    "sft": (["messages"], _as_it_is, "the conversations"),
    "preference": (["prompt", "chosen"], _chosen, "the chosen answers of the preference pairs"),
    "unpaired": (["prompt", "completion", "label"], _labelled_good, "the answers that are labelled good"),
}


TEXT = "text"  # rows of plain text, which hold no conversation


def texts(path: Path) -> list[Row]:
    """The rows of a split of plain text: {"id", "text"}."""
    import pyarrow.parquet as parquet

    rows: list[Row] = parquet.read_table(path, columns=["id", "text"]).to_pylist()
    return rows


def kind_of(dataset: Artifact) -> str:
    """The kind of a dataset's rows. Raises InputError when they hold no conversations."""
    kind = str(dataset.manifest.summary.get("rows_kind", "sft"))
    if kind not in KINDS:
        raise InputError(
            f"the dataset in {dataset.path} holds {kind} rows, and conversations are measured",
            hint="Curate sources with prompts and answers: messages, Alpaca, Dolly, ShareGPT, prompt/completion or preference pairs.",
        )
    return kind


def used(kind: str) -> str:
    """What of the rows of this kind is learned and measured, in words."""
    return KINDS[kind][2]


def of(kind: str, row: Row) -> list[Any] | None:
    """The conversation in a row of this kind; None where nothing of it is learned."""
    return KINDS[kind][1](row)


def read(path: Path, kind: str, limit: int | None = None) -> list[Row]:
    """The conversations of a split, in its order, the first `limit` of them."""
    import pyarrow.parquet as parquet

    columns, conversation, _ = KINDS[kind]
    rows = parquet.read_table(path, columns=["id", *columns, "tools"]).to_pylist()
    usable = ({"id": r["id"], "messages": m, "tools": r["tools"]} for r in rows if (m := conversation(r)) is not None)
    return list(islice(usable, limit))
