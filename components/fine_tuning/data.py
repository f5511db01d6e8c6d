"""From a dataset's rows to training examples: tokens, and labels on the assistant's tokens only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import chat, conversations
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


def read_examples(
    path: Path, tokenizer: Any, *, max_length: int, reporter: Reporter, kind: str = "sft", limit: int | None = None
) -> Examples:
    """Tokenise a split of rows of a kind. Rows whose answer lies wholly behind `max_length` teach nothing and are left out, counted."""
    rows = conversations.read(path, kind, limit)
    return tokenise(rows, tokenizer, max_length=max_length, total=len(rows), reporter=reporter)


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
