from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.common import artifacts
from components.common.artifacts import Artifact

MakeDataset = Callable[..., Artifact]


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
