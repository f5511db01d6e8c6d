"""Fixtures that publish small datasets into artifact folders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput

MakeDataset = Callable[..., Artifact]
MESSAGES_TYPE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
ROW_SCHEMA = pa.schema(
    [("id", pa.string()), ("messages", MESSAGES_TYPE), ("source", pa.string()), ("meta", pa.string())]
)
REJECTED_SCHEMA = pa.schema(
    [
        (name, pa.int64() if name == "line" else pa.string())
        for name in ("id", "source", "line", "reason", "text", "own_source")
    ]
)


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Publish a small dataset whose rows are given by split, as ids."""

    def make(name: str, splits: Mapping[str, Sequence[str]], report: str = "report") -> Artifact:
        folder = tmp_path / "datasets" / name
        assert artifact_folder.claim_folder(folder, name) is None
        for split, ids in splits.items():
            texts = [f"text of {i} " * 40 for i in ids]
            pq.write_table(pa.table({"id": list(ids), "text": texts}), folder / f"{split}.parquet", compression="zstd")
        (folder / "quarantine.jsonl").write_text("")
        (folder / "report.html").write_text(report)
        payload = [f"{split}.parquet" for split in splits]
        return artifact_folder.publish(
            folder, "dataset", payload=payload, inputs=[], config={}, seed=1, key=name, summary={"rows": 3}
        )

    return make


MakeCurated = Callable[..., Artifact]


def write_curated(
    folder: Path,
    splits: Mapping[str, Sequence[tuple[str, str]]],
    rejected: Sequence[tuple[str, str, int, str, str]] = (),
    unreadable_lines: int = 0,
) -> Artifact:
    """Publish a dataset as curation does: rows by split as (id, text), rejected rows as (id, file, line, reason, text).

    `unreadable_lines` is the number of lines in the quarantine.
    """
    assert artifact_folder.claim_folder(folder, folder.name) is None
    for split, rows in splits.items():
        records = [
            {
                "id": i,
                "messages": [{"role": "user", "content": text}],
                "source": "letters",
                "meta": json.dumps({"by": f"clerk {i}"}),
            }
            for i, text in rows
        ]
        pq.write_table(
            pa.Table.from_pylist(records, schema=ROW_SCHEMA), folder / f"{split}.parquet", compression="zstd"
        )
    rejected_rows = [
        dict(zip(("id", "source", "line", "reason", "text"), row, strict=True)) | {"own_source": "letters"}
        for row in rejected
    ]
    pq.write_table(pa.Table.from_pylist(rejected_rows, schema=REJECTED_SCHEMA), folder / "rejected.parquet")
    lines = [json.dumps({"file": "torn.jsonl", "line": n, "why": "not JSON"}) + "\n" for n in range(unreadable_lines)]
    (folder / "quarantine.jsonl").write_text("".join(lines))
    sizes = {split: len(rows) for split, rows in splits.items()}
    reasons, kept = Counter(row[3] for row in rejected), sum(sizes.values())
    counts = {
        "in": kept + len(rejected) + unreadable_lines,
        "kept": kept,
        "quarantined": unreadable_lines,
        "rejected": dict(reasons),
    }
    payload = [f"{split}.parquet" for split in splits] + ["rejected.parquet", "quarantine.jsonl"]
    inputs = [ArtifactInput(kind="raw", content_sha256="4a" * 32, uri="letters.jsonl")]
    summary = {"rows": counts, "splits": sizes}
    return artifact_folder.publish(
        folder, "dataset", payload=payload, inputs=inputs, config={}, seed=1, key=folder.name, summary=summary
    )


@pytest.fixture
def make_curated(tmp_path: Path) -> MakeCurated:
    """Call write_curated with a name, in the test's own folder."""
    return lambda name, *content, **options: write_curated(tmp_path / "curated" / name, *content, **options)
