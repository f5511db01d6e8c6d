"""Curation on a real Ray cluster of two nodes gives the very dataset that this machine alone gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.artifacts import Artifact
from components.common.errors import EngineMissingError
from components.common.progress import Silent
from components.data_curation import staging
from components.data_curation.config import DataCurationConfig
from components.data_curation.engine import BANDS
from components.data_curation.stage import curate, list_sources
from tests.engines.ray_cluster import Cluster, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.daft]
SEED = 20
ROWS = 2400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


def lines(choose: random.Random) -> list[str]:
    """Rows of random words, copies and near copies of some, and torn lines, in any order."""
    words = [f"w{number}" for number in range(3000)]
    answers = [" ".join(choose.choices(words, k=choose.randrange(12, 80))) for _ in range(ROWS)]
    answers += choose.choices(answers, k=ROWS // 20)
    answers += [f"{answer} indeed" for answer in choose.sample(answers[:ROWS], ROWS // 20)]
    rows = [json.dumps({"prompt": f"What follows {answer.split()[0]}?", "completion": answer}) for answer in answers]
    rows += ['{"torn'] * 10
    choose.shuffle(rows)
    return rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of random rows."""
    folder, some = tmp_path_factory.mktemp("sources"), lines(random.Random(SEED))
    for part in range(3):
        (folder / f"part{part}.jsonl").write_text("\n".join(some[part::3]) + "\n")
    return folder


def made(sources: Path, output: Path, **settings: object) -> Artifact:
    config = DataCurationConfig.model_validate({"sources": [str(sources)], **settings})
    return curate(list_sources(config.sources, sources), output, config, seed=3, reporter=Silent())


def test_two_nodes_share_the_work_and_make_the_same_dataset_as_one_process(
    cluster: Cluster, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK_ROWS", 250)
    here = made(sources, tmp_path / "here")
    monkeypatch.setattr(staging, "CHUNK_ROWS", 130)  # how rows are parted must not show
    there = made(sources, tmp_path / "there", engine="ray", ray_address=cluster.address)
    assert there.sha256 == here.sha256
    rejected = here.manifest.summary["rows"]["rejected"]
    assert rejected["exact_duplicate"] == ROWS // 20
    assert rejected["near_duplicate"] > 50
    working = tmp_path / "there" / ".engine"
    assert not working.exists()
    for pattern, files in (("raw-*.jsonl", 21), ("pairs-words-*.npy", BANDS)):  # 2,650 lines are 21 chunks
        shares = cluster.opened(working, pattern)
        assert all(shares), f"a node did nothing: {shares}"
        assert len(set.union(*shares)) == files


def test_a_cluster_that_is_not_there_is_told_and_nothing_looks_finished(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match=r"no Ray cluster answers at 127\.0\.0\.1:9: Connection refused") as error:
        made(sources, tmp_path / "out", engine="ray", ray_address="127.0.0.1:9")
    assert "data_curation.ray_address" in error.value.hint
    assert not (tmp_path / "out" / "manifest.json").exists()
