"""Conversations in the rows of a dataset, for training and evaluation: {"id", "messages", "tools"}.

A preference pair contributes its chosen answer; an unpaired row contributes its answer if it is labelled good.
"""

# Supervised tuning on preferred answers is the first step and the baseline of preference methods ("Preferred-FT",
# Rafailov et al., arXiv 2305.18290, section 6).

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import InputError

Row = dict[str, Any]
Message = dict[str, str]


# By row kind: the columns of the conversation, the function that extracts it, and a description of the extracted part.
ROW_KINDS: dict[str, tuple[list[str], Callable[[Row], list[Any] | None], str]] = {
    "sft": (["messages"], lambda row: list(row["messages"]), "the conversations"),
    "preference": (
        ["prompt", "chosen"],
        lambda row: [*row["prompt"], *row["chosen"]],
        "the chosen answers of the preference pairs",
    ),
    "unpaired": (
        ["prompt", "completion", "label"],
        lambda row: [*row["prompt"], *row["completion"]] if row["label"] else None,
        "the answers that are labelled good",
    ),
}


TEXT_KIND = "text"  # rows of plain text, without conversations


def read_texts(path: Path, ids: Collection[str] | None = None) -> list[Row]:
    """Return the rows of a Parquet file of plain text, {"id", "text"}; all rows, or those with the given ids."""
    import pyarrow.parquet as parquet

    filters = None if ids is None else [("id", "in", ids)]
    rows: list[Row] = parquet.read_table(path, columns=["id", "text"], filters=filters).to_pylist()
    return rows


def get_rows_kind(dataset: Artifact) -> str:
    """Return the kind of a dataset's rows, a key of ROW_KINDS.

    Raises:
        InputError: the rows contain no conversations.
    """
    kind = str(dataset.manifest.summary.get("rows_kind", "sft"))
    check_rows_kind(kind, f"the dataset in {dataset.path} contains")
    return kind


def check_rows_kind(kind: str, subject: str) -> None:
    """Raise InputError if rows of this kind contain no conversations; `subject` begins the message."""
    if kind not in ROW_KINDS:
        raise InputError(
            f"{subject} {kind} rows; expected conversations ({', '.join(ROW_KINDS)})",
            hint="Curate sources with prompts and answers: messages, Alpaca, Dolly, ShareGPT, prompt/completion or "
            "preference pairs.",
        )


def extract_conversation(kind: str, row: Row) -> list[Any] | None:
    """Return the messages of the conversation in a row; None if the row contributes no conversation."""
    return ROW_KINDS[kind][1](row)


def read_conversations(path: Path, kind: str, ids: Collection[str] | None = None) -> list[Row]:
    """Return the conversations in a Parquet file, {"id", "messages", "tools"}, in the order of its rows.

    Args:
        kind: kind of the rows, a key of ROW_KINDS.
        ids: ids of the rows; None for all rows.
    """
    import pyarrow.parquet as parquet

    columns, extract, _ = ROW_KINDS[kind]
    filters = None if ids is None else [("id", "in", ids)]
    rows = parquet.read_table(path, columns=["id", *columns, "tools"], filters=filters).to_pylist()
    return [
        {"id": row["id"], "messages": messages, "tools": row["tools"]}
        for row in rows
        if (messages := extract(row)) is not None
    ]


def split_last_answer(messages: Sequence[Mapping[str, object]]) -> tuple[list[Message], str]:
    """Return the turns before a conversation's last answer, and that answer. Both are empty without an answer."""
    last = max((index for index, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    before = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages[:last]]
    return before, str(messages[last]["content"]) if before else ""
