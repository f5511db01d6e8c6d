"""A small curated dataset, written as the curation stage writes one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from components.common import artifacts
from components.common.artifacts import Artifact, Input
from components.data_curation import tables
from components.data_curation.rows import CONTENT, Kind, Row, as_json

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [("id", pa.string()), ("messages", pa.list_(MESSAGE)), ("tools", pa.string()), ("source", pa.string()), ("meta", pa.string())]
)
WORDS = ["open", "file", "read", "path", "join", "split", "write", "close", "list", "map", "value", "key", "error", "test"]


def small_dataset(folder: Path, *, train: int = 24, validation: int = 4, test: int = 12, start: int = 0) -> Artifact:
    """Rows of questions about words, enough for a few steps of training and an evaluation."""
    artifacts.begin(folder, "small")
    number = start
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        rows = [_row(number + i) for i in range(count)]
        number += count
        parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet", compression="zstd")
    source = Input(kind="file", content_sha256="1" * 64, uri="words.jsonl")
    payload = ["train.parquet", "validation.parquet", "test.parquet"]
    summary = {"rows_kind": "sft", "splits": {"train": train, "validation": validation, "test": test}}
    return artifacts.publish(folder, "dataset", payload=payload, inputs=[source], config={}, seed=0, key="small", summary=summary)


def _row(number: int) -> dict[str, object]:
    word = WORDS[number % len(WORDS)]
    messages = [
        {"role": "user", "content": f"What does {word} {number} do?"},
        {"role": "assistant", "content": f"It does {word}, {word} and {word} again, {number} times."},
    ]
    return {"id": f"{number:08x}", "messages": messages, "tools": None, "source": "words", "meta": "{}"}


def write_split(path: Path, kind: Kind, rows: Sequence[Row]) -> None:
    """Rows as a split of a dataset."""
    content = [{name: row.content.get(name) for name in CONTENT[kind]} for row in rows]
    told = [{"id": row.id, "source": row.source, "meta": as_json(row.meta), **one} for row, one in zip(rows, content, strict=True)]
    with tables.Writer(path, tables.split_schema(kind)) as writer:
        writer.add(pa.Table.from_pylist(told, schema=tables.split_schema(kind)))
