import json

import pytest

from components.common.progress import Silent
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import curate, list_sources


def conversation(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def different(number):
    """A row that is like no other: made of words that carry the number."""
    answer = " ".join(f"word{number}x{i}" for i in range(12))
    return conversation(f"What is thing number {number}?", answer)


@pytest.fixture
def write(tmp_path):
    """Write rows as JSON lines and return the path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def curated(tmp_path):
    """Curate files into tmp_path/out (or another folder) and return the artifact."""

    def run(*paths, out="out", seed=1, overwrite=False, **config):
        config = DataCurationConfig(sources=[str(p) for p in paths], **config)
        sources = list_sources(config.sources, tmp_path)
        return curate(sources, tmp_path / out, config, seed=seed, reporter=Silent(), overwrite=overwrite)

    return run


@pytest.fixture
def rows_of():
    """The rows of a split, or of rejected."""

    def read(artifact, name):
        from pyarrow import parquet

        return parquet.read_table(artifact.path / f"{name}.parquet").to_pylist()

    return read


@pytest.fixture
def samples():
    """The helpers that make rows: conversation(question, answer) and different(number)."""
    return conversation, different
