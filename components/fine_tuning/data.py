"""From a dataset's rows to training examples: tokens, what is learned of them, and what was cut or left out, counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from components.common.progress import Reporter
from components.fine_tuning.objectives import IGNORED, Example, Objective, Row, Use

READ_AT_ONCE = 1000  # rows in memory while reading


@dataclass
class Counts:
    """What became of the rows of a split. `tokens`: in all examples, before any padding; `learned`: those of them that are labels."""

    rows: int = 0
    examples: int = 0
    truncated: int = 0
    without_answer: int = 0
    tokens: int = 0
    learned: int = 0


@dataclass(frozen=True)
class Examples:
    """Examples, each with its "length" in tokens, of so many rows that were read, and what happened to the rest."""

    rows: list[Example]
    read: int
    truncated: int
    without_answer: int

    @property
    def tokens(self) -> int:
        """Tokens in all rows, before any padding."""
        return sum(row["length"] for row in self.rows)


def rows_of(path: Path, use: Use, limit: int | None = None) -> Iterator[Row]:
    """What is learned of a split's rows, in their order, of the first `limit` such; each with the id of the row it is from."""
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    columns = [name for name in ("id", *use.columns) if name in file.schema_arrow.names]
    read = (row for batch in file.iter_batches(READ_AT_ONCE, columns=columns) for row in batch.to_pylist())
    yield from islice(({"id": row["id"], **one} for row in read for one in use.rows(row)), limit)


def encode(
    rows: Iterable[Row],
    objective: Objective,
    tokenizer: Any,
    *,
    max_length: int,
    counts: Counts,
    reporter: Reporter,
    total: int | None = None,
) -> Iterator[Example]:
    """The examples of rows, one after the other; `counts` is kept."""
    for row in rows:
        encoded = objective.encode(tokenizer, row, max_length)
        counts.rows += 1
        counts.truncated += encoded.truncated and bool(encoded.examples)
        counts.without_answer += not encoded.examples
        for example in encoded.examples:
            counts.examples += 1
            counts.tokens += example["length"]
            counts.learned += _learned(example)
            yield {"ids": [row.get("id", "")], **example}
        reporter.progress(counts.rows, total, "rows")


def _learned(example: Example) -> int:
    """Tokens whose likelihood is trained."""
    if "labels" in example:
        return sum(label != IGNORED for label in example["labels"][1:])
    return sum(len(example[name]) for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in example)


def tokenise(rows: Iterable[Row], objective: Objective, tokenizer: Any, *, max_length: int, total: int, reporter: Reporter) -> Examples:
    """All examples of rows that fit into memory."""
    counts = Counts()
    examples = list(encode(rows, objective, tokenizer, max_length=max_length, counts=counts, reporter=reporter, total=total))
    return Examples(examples, counts.rows, counts.truncated, counts.without_answer)
