"""Curation on a real Ray cluster of two nodes gives the very dataset that this machine alone gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.artifacts import Artifact
from components.common.progress import Silent
from components.data_curation import staging
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import curate, list_sources
from data import python_docs
from tests.engines.ray_cluster import two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.daft]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with two_nodes(tmp_path_factory.mktemp("ray")) as address:
        yield address


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third row of the demo dataset, some of them nearly alike, in three files."""
    folder = tmp_path_factory.mktemp("docs")
    python_docs.build(folder / "all.jsonl")
    lines = (folder / "all.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "all.jsonl").unlink()
    for part in range(3):
        (folder / f"part{part}.jsonl").write_bytes(b"".join(lines[part::9]) + b'{"broken\n')
    return folder


def made(docs: Path, output: Path, **settings: object) -> Artifact:
    config = DataCurationConfig.model_validate({"sources": [str(docs)], **settings})
    return curate(list_sources(config.sources, docs), output, config, seed=3, reporter=Silent())


def test_two_nodes_make_the_same_dataset_as_one_process(cluster: str, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_ROWS", 100 + random.randrange(200))  # how rows are parted must not show
    here = made(docs, tmp_path / "here")
    monkeypatch.setattr(staging, "CHUNK_ROWS", 100 + random.randrange(200))
    there = made(docs, tmp_path / "there", engine="ray", ray_address=cluster)
    assert there.sha256 == here.sha256
    rejected = here.manifest.summary["rows"]["rejected"]
    assert rejected["exact_duplicate"] > 50
    assert rejected["near_duplicate"] > 2
    assert not (tmp_path / "there" / ".engine").exists()


def test_a_cluster_that_is_not_there_is_told_and_nothing_looks_finished(docs: Path, tmp_path: Path) -> None:
    from components.common.errors import EngineMissingError

    with pytest.raises(EngineMissingError, match=r"no Ray cluster answers at 127\.0\.0\.1:9: Connection refused") as error:
        made(docs, tmp_path / "out", engine="ray", ray_address="127.0.0.1:9")
    assert "data_curation.ray_address" in error.value.hint
    assert not (tmp_path / "out" / "manifest.json").exists()
