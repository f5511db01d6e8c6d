"""From a dataset's rows to training examples: tokens, and labels on the assistant's tokens only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import chat
from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.progress import Reporter

IGNORED = -100  # the label that cross-entropy skips


@dataclass(frozen=True)
class Examples:
    """Tokenised rows: {"input_ids", "labels", "length"} each, and what happened to the rest."""

    rows: list[dict[str, Any]]
    truncated: int
    without_answer: int

    @property
    def tokens(self) -> int:
        """Tokens in all rows, before any padding."""
        return sum(row["length"] for row in self.rows)


def read_examples(path: Path, tokenizer: Any, *, max_length: int, reporter: Reporter, limit: int | None = None) -> Examples:
    """Tokenise a split. Rows whose answer lies wholly behind `max_length` teach nothing and are left out, counted."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=["messages", "tools"])
    table = table if limit is None else table.slice(0, limit)
    return tokenise(table.to_pylist(), tokenizer, max_length=max_length, total=table.num_rows, reporter=reporter)


def tokenise(rows: Iterable[dict[str, Any]], tokenizer: Any, *, max_length: int, total: int, reporter: Reporter) -> Examples:
    """Tokenise rows of {"messages", "tools"}."""
    examples, truncated, without_answer = [], 0, 0
    for done, row in enumerate(rows, 1):
        tools = json.loads(row["tools"]) if row.get("tools") else None
        encoded = chat.encode(tokenizer, row["messages"], tools, max_length=max_length)
        truncated += encoded.truncated
        if any(encoded.answer):
            labels = [token if answer else IGNORED for token, answer in zip(encoded.input_ids, encoded.answer, strict=True)]
            examples.append({"input_ids": encoded.input_ids, "labels": labels, "length": len(labels)})
        else:
            without_answer += 1
        reporter.progress(done, total, "rows")
    return Examples(examples, truncated, without_answer)


def check_trainable(dataset: Artifact) -> None:
    """Raise InputError when the dataset's rows are not what the objective learns from."""
    kind = dataset.manifest.summary.get("rows_kind", "sft")
    if kind != "sft":
        raise InputError(
            f"the dataset in {dataset.path} holds {kind} rows, and objective sft learns from conversations",
            hint="Curate sources with prompts and answers: messages, Alpaca, Dolly, ShareGPT or prompt/completion.",
        )
