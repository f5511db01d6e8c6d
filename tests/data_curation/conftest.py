"""Row builders and fixtures that write, curate and read small datasets."""

import json

import pytest

from components.common.runtime.reporters import SilentReporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import curate, list_sources
from tests import preloaded_server


def build_conversation(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def build_distinct_row(number):
    """Build a row that is similar to no other: each word of the answer contains the number."""
    answer = " ".join(f"word{number}x{i}" for i in range(12))
    return build_conversation(f"What is thing number {number}?", answer)


@pytest.fixture(autouse=True)
def preloaded_engine(monkeypatch):
    """Fork each comparison with Daft from a process that has imported Daft."""
    for name, value in preloaded_server.get_variables("PRELOADED_ENGINE").items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def write_rows(tmp_path):
    """Return the function that writes rows as JSON lines and returns the path."""

    def write_rows(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write_rows


@pytest.fixture
def curate_files(tmp_path):
    """Return the function that curates files into tmp_path/out, or another folder, and returns the artifact."""

    def run(*paths, out="out", seed=1, overwrite=False, **config):
        config = DataCurationConfig(sources=[p if isinstance(p, dict) else str(p) for p in paths], **config)
        sources = list_sources(config.sources, tmp_path)
        return curate(sources, tmp_path / out, config, seed=seed, reporter=SilentReporter(), overwrite=overwrite)

    return run


@pytest.fixture
def read_rows():
    """Return the function that reads the rows of a split, or the rejected ones."""

    def read(artifact, name):
        from pyarrow import parquet

        return parquet.read_table(artifact.path / f"{name}.parquet").to_pylist()

    return read


@pytest.fixture
def make_conversation():
    """Return the function that builds a row from a question and an answer."""
    return build_conversation


@pytest.fixture
def make_distinct_row():
    """Return the function that builds the row of a number, which is similar to no other."""
    return build_distinct_row
