"""Small curated datasets in the format of the curation stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.data_curation import parquet_files
from components.data_curation.rows import CONTENT_COLUMNS, Kind, Row, to_json

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.string()),
        ("source", pa.string()),
        ("meta", pa.string()),
    ]
)
# Verbs and nouns of different questions, for raw data: "How do I send a letter?"
QUESTION_WORDS = [
    (verb, noun)
    for verb in ["send", "track", "cancel", "archive", "approve", "translate", "copy", "sign", "print", "return"]
    for noun in [
        "letter",
        "parcel",
        "invoice",
        "ticket",
        "order",
        "refund",
        "contract",
        "report",
        "meeting",
        "licence",
        "visitor",
        "badge",
    ]
]
WORDS = [
    "open",
    "file",
    "read",
    "path",
    "join",
    "split",
    "write",
    "close",
    "list",
    "map",
    "value",
    "key",
    "error",
    "test",
]


def small_dataset(folder: Path, *, train: int = 24, validation: int = 4, test: int = 12, start: int = 0) -> Artifact:
    """Write questions about words, enough for a few training steps and an evaluation."""
    artifact_folder.claim_folder(folder, "small")
    row_number = start
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        rows = [_row(row_number + i) for i in range(count)]
        row_number += count
        parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet", compression="zstd")
    source = ArtifactInput(kind="file", content_sha256="1" * 64, uri="words.jsonl")
    payload = ["train.parquet", "validation.parquet", "test.parquet"]
    summary = {"rows_kind": "sft", "splits": {"train": train, "validation": validation, "test": test}}
    return artifact_folder.publish(
        folder, "dataset", payload=payload, inputs=[source], config={}, seed=0, key="small", summary=summary
    )


def _row(number: int) -> dict[str, object]:
    word = WORDS[number % len(WORDS)]
    messages = [
        {"role": "user", "content": f"What does {word} {number} do?"},
        {"role": "assistant", "content": f"It does {word}, {word} and {word} again, {number} times."},
    ]
    return {"id": f"{number:08x}", "messages": messages, "tools": None, "source": "words", "meta": "{}"}


def write_split(path: Path, kind: Kind, rows: Sequence[Row]) -> None:
    """Write rows as a split of a dataset."""
    content = [{name: row.content.get(name) for name in CONTENT_COLUMNS[kind]} for row in rows]
    records = [
        {"id": row.id, "source": row.source, "meta": to_json(row.meta), **columns}
        for row, columns in zip(rows, content, strict=True)
    ]
    with parquet_files.ParquetRowWriter(path, parquet_files.build_split_schema(kind)) as writer:
        writer.add(pa.Table.from_pylist(records, schema=parquet_files.build_split_schema(kind)))


PREFERENCE = pa.schema(
    [
        ("id", pa.string()),
        *((name, pa.list_(MESSAGE)) for name in ("prompt", "chosen", "rejected")),
        ("tools", pa.string()),
    ]
)
UNPAIRED = pa.schema(
    [
        ("id", pa.string()),
        *((name, pa.list_(MESSAGE)) for name in ("prompt", "completion")),
        ("label", pa.bool_()),
        ("tools", pa.string()),
    ]
)
TEXT = pa.schema([("id", pa.string()), ("text", pa.string())])


def _preference(number: int) -> dict[str, object]:
    word, other = WORDS[number % len(WORDS)], WORDS[(number + 5) % len(WORDS)]
    prompt = [{"role": "user", "content": f"What does {word} {number} do?"}]
    chosen, rejected = f"It does {word}, {number} times.", f"I do not know, perhaps {other}?"
    answers = {
        name: [{"role": "assistant", "content": answer}]
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    }
    return {"id": f"{number:08x}", "prompt": prompt, **answers, "tools": None}


def _unpaired(number: int) -> dict[str, object]:
    pair, is_good = _preference(number), number % 2 == 0
    return {
        "id": pair["id"],
        "prompt": pair["prompt"],
        "completion": pair["chosen" if is_good else "rejected"],
        "label": is_good,
        "tools": None,
    }


def _text(number: int) -> dict[str, object]:
    text = " ".join(
        f"{WORDS[(number + i) % len(WORDS)]} the {WORDS[(number + 3 * i) % len(WORDS)]}." for i in range(6 + number % 9)
    )
    return {"id": f"{number:08x}", "text": text}


KINDS = {"preference": (_preference, PREFERENCE), "unpaired": (_unpaired, UNPAIRED), "text": (_text, TEXT)}


def dataset_of(kind: str, folder: Path, *, train: int = 24, validation: int = 4, test: int = 4) -> Artifact:
    """Write a dataset of the kind preference, unpaired or text."""
    build_row, schema = KINDS[kind]
    artifact_folder.claim_folder(folder, kind)
    row_number = 0
    for split, count in (("train", train), ("validation", validation), ("test", test)):
        rows = [build_row(row_number + i) for i in range(count)]
        row_number += count
        parquet.write_table(pa.Table.from_pylist(rows, schema), folder / f"{split}.parquet", compression="zstd")
    payload = [f"{split}.parquet" for split in ("train", "validation", "test")]
    source = ArtifactInput(kind="file", content_sha256="2" * 64, uri=f"{kind}.jsonl")
    summary = {"rows_kind": kind, "splits": {"train": train, "validation": validation, "test": test}}
    return artifact_folder.publish(
        folder, "dataset", payload=payload, inputs=[source], config={}, seed=0, key=kind, summary=summary
    )
