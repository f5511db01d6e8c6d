"""Encoding of dataset rows as training examples, with counts of tokens, truncated rows and omitted rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.runtime.reporters import Reporter
from components.fine_tuning.objectives import IGNORED_LABEL, Example, Objective, Row, RowMapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READ_BATCH_ROWS = 1000


@dataclass
class RowCounts:
    """Counts of a split.

    Attributes:
        rows: Encoded rows.
        examples: Examples of these rows.
        truncated: Rows whose tokens were cut off, and that still have examples.
        cut_tokens: Tokens cut off from these rows.
        without_answer: Rows without a token to learn, which have no examples.
        tokens: Tokens of all examples, without padding.
        learned: Tokens that the loss covers.
    """

    rows: int = 0
    examples: int = 0
    truncated: int = 0
    cut_tokens: int = 0
    without_answer: int = 0
    tokens: int = 0
    learned: int = 0

    @property
    def cut_share(self) -> float:
        """Share of the tokens of the rows with examples that was cut off."""
        return self.cut_tokens / max(self.tokens + self.cut_tokens, 1)


def read_rows(path: Path, mapping: RowMapping, limit: int | None = None) -> Iterator[Row]:
    """Yield the training rows of a split in order; each has the id and the source of its dataset row.

    Args:
        path: Parquet file of the split.
        mapping: Mapping of dataset rows to training rows.
        limit: Maximum number of training rows. None: all rows.
    """
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    columns = [name for name in ("id", "source", *mapping.columns) if name in file.schema_arrow.names]
    rows = (row for batch in file.iter_batches(READ_BATCH_ROWS, columns=columns) for row in batch.to_pylist())
    yield from islice(
        (
            {"id": row["id"], "source": row.get("source"), **expanded}
            for row in rows
            for expanded in mapping.expand(row)
        ),
        limit,
    )


def count_sources(path: Path) -> Counter[str]:
    """Return the number of rows of each source of a split; empty without the column source."""
    import pyarrow.parquet as parquet

    file, counts = parquet.ParquetFile(path), Counter[str]()
    if "source" in file.schema_arrow.names:
        for batch in file.iter_batches(columns=["source"]):
            counts.update(source or "" for source in batch[0].to_pylist())
    return counts


def sample_rows(path: Path, mapping: RowMapping, limit: int) -> Iterator[Row]:
    """Yield at most about `limit` evenly spread training rows of a split, in order; for the arguments see `read_rows`."""
    import pyarrow.parquet as parquet

    interval = math.ceil(mapping.max_rows_per_row * parquet.ParquetFile(path).metadata.num_rows / limit) or 1
    yield from islice(read_rows(path, mapping), 0, None, interval)


def encode_rows(
    rows: Iterable[Row],
    objective: Objective,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    counts: RowCounts,
    reporter: Reporter,
    total: int | None = None,
) -> Iterator[Example]:
    """Encode the rows, yield their examples and update `counts`.

    Args:
        rows: Training rows.
        objective: The training objective.
        tokenizer: The base model's tokenizer.
        max_length: Maximum length of an example in tokens.
        counts: Counts to update.
        reporter: Receives the number of encoded rows.
        total: Expected number of rows, for the progress.
    """
    for row in rows:
        encoded = objective.encode(tokenizer, row, max_length)
        counts.rows += 1
        counts.truncated += bool(encoded.cut_tokens and encoded.examples)
        counts.cut_tokens += encoded.cut_tokens if encoded.examples else 0
        counts.without_answer += not encoded.examples
        for example in encoded.examples:
            counts.examples += 1
            counts.tokens += example["length"]
            if "labels" in example:
                counts.learned += sum(label != IGNORED_LABEL for label in example["labels"][1:])
            else:
                answers = (example.get(f"{name}_ids", ()) for name in ("chosen", "rejected", "completion"))
                counts.learned += sum(map(len, answers))
            yield {"ids": [row.get("id", "")], "source": row.get("source") or "", **example}
        reporter.progress(counts.rows, total, "rows")
