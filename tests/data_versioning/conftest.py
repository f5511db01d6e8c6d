from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.common import artifacts
from components.common.artifacts import Artifact, Input

MakeDataset = Callable[..., Artifact]
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
ROWS = pa.schema([("id", pa.string()), ("messages", MESSAGES), ("source", pa.string()), ("meta", pa.string())])
DROPPED = pa.schema(
    [(name, pa.int64() if name == "line" else pa.string()) for name in ("id", "source", "line", "reason", "text", "own_source")]
)


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """A small curated dataset: rows by split, given as ids."""

    def make(name: str, splits: Mapping[str, Sequence[str]], report: str = "report") -> Artifact:
        folder = tmp_path / "datasets" / name
        assert artifacts.begin(folder, name) is None
        for split, ids in splits.items():
            texts = [f"text of {i} " * 40 for i in ids]
            pq.write_table(pa.table({"id": list(ids), "text": texts}), folder / f"{split}.parquet", compression="zstd")
        (folder / "quarantine.jsonl").write_text("")
        (folder / "report.html").write_text(report)
        payload = [f"{split}.parquet" for split in splits]
        return artifacts.publish(folder, "dataset", payload=payload, inputs=[], config={}, seed=1, key=name, summary={"rows": 3})

    return make


MakeCurated = Callable[..., Artifact]


def write_curated(
    folder: Path, splits: Mapping[str, Sequence[tuple[str, str]]], rejected: Sequence[tuple[str, str, int, str, str]] = (), unread: int = 0
) -> Artifact:
    """A dataset as curation writes it: rows by split as (id, text), rejected ones as (id, file, line, reason, text), unreadable lines."""
    assert artifacts.begin(folder, folder.name) is None
    for split, rows in splits.items():
        records = [
            {"id": i, "messages": [{"role": "user", "content": said}], "source": "letters", "meta": json.dumps({"by": f"clerk {i}"})}
            for i, said in rows
        ]
        pq.write_table(pa.Table.from_pylist(records, schema=ROWS), folder / f"{split}.parquet", compression="zstd")
    dropped = [dict(zip(("id", "source", "line", "reason", "text"), one, strict=True)) | {"own_source": "letters"} for one in rejected]
    pq.write_table(pa.Table.from_pylist(dropped, schema=DROPPED), folder / "rejected.parquet")
    lines = [json.dumps({"file": "torn.jsonl", "line": n, "why": "not JSON"}) + "\n" for n in range(unread)]
    (folder / "quarantine.jsonl").write_text("".join(lines))
    sizes = {split: len(rows) for split, rows in splits.items()}
    reasons, kept = Counter(one[3] for one in rejected), sum(sizes.values())
    counts = {"in": kept + len(rejected) + unread, "kept": kept, "quarantined": unread, "rejected": dict(reasons)}
    payload = [f"{split}.parquet" for split in splits] + ["rejected.parquet", "quarantine.jsonl"]
    raw = [Input(kind="raw", content_sha256="4a" * 32, uri="letters.jsonl")]
    summary = {"rows": counts, "splits": sizes}
    return artifacts.publish(folder, "dataset", payload=payload, inputs=raw, config={}, seed=1, key=folder.name, summary=summary)


@pytest.fixture
def make_curated(tmp_path: Path) -> MakeCurated:
    """See write_curated; by name, in a folder of the test's own."""
    return lambda name, *content, **more: write_curated(tmp_path / "curated" / name, *content, **more)
