"""Curation on a real Ray cluster of two nodes; the dataset must equal the local one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import EngineMissingError
from components.common.runtime.reporters import SilentReporter
from components.data_curation import prepared_chunks
from components.data_curation.config import DataCurationConfig
from components.data_curation.engine import BAND_COUNT
from components.data_curation.stage import curate, list_sources
from tests.engines.ray_cluster import Cluster, run_cluster

pytestmark = [pytest.mark.ray, pytest.mark.daft]
SEED = 20
ROWS = 2400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


def build_rows(rng: random.Random) -> list[str]:
    """Build shuffled rows of random words with duplicates, near-duplicates and truncated lines."""
    words = [f"w{number}" for number in range(3000)]
    answers = [" ".join(rng.choices(words, k=rng.randrange(12, 80))) for _ in range(ROWS)]
    answers += rng.choices(answers, k=ROWS // 20)
    answers += [f"{answer} indeed" for answer in rng.sample(answers[:ROWS], ROWS // 20)]
    rows = [json.dumps({"prompt": f"What follows {answer.split()[0]}?", "completion": answer}) for answer in answers]
    rows += ['{"torn'] * 10
    rng.shuffle(rows)
    return rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of random rows."""
    folder, rows = tmp_path_factory.mktemp("sources"), build_rows(random.Random(SEED))
    for part in range(3):
        (folder / f"part{part}.jsonl").write_text("\n".join(rows[part::3]) + "\n")
    return folder


def curate_sources(sources: Path, output: Path, **settings: object) -> Artifact:
    config = DataCurationConfig.model_validate({"sources": [str(sources)], **settings})
    return curate(list_sources(config.sources, sources), output, config, seed=3, reporter=SilentReporter())


def test_two_nodes_share_the_work_and_match_the_local_dataset(
    cluster: Cluster, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 250)
    local = curate_sources(sources, tmp_path / "here")
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 130)  # the chunk size must not change the dataset
    distributed = curate_sources(sources, tmp_path / "there", engine="ray", ray_address=cluster.address)
    assert distributed.sha256 == local.sha256
    rejected = local.manifest.summary["rows"]["rejected"]
    assert rejected["exact_duplicate"] == ROWS // 20
    assert rejected["near_duplicate"] > 50
    work_folder = tmp_path / "there" / ".engine"
    assert not work_folder.exists()
    for pattern, files in (("raw-*.jsonl", 21), ("pairs-words-*.npy", BAND_COUNT)):  # 2,650 lines are 21 chunks
        shares = cluster.list_opened_files(work_folder, pattern)
        assert all(shares), f"a node did nothing: {shares}"
        assert len(set.union(*shares)) == files


def test_unreachable_cluster_is_reported_and_writes_no_manifest(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(
        EngineMissingError, match=r"no Ray cluster answers at 127\.0\.0\.1:9: Connection refused"
    ) as error:
        curate_sources(sources, tmp_path / "out", engine="ray", ray_address="127.0.0.1:9")
    assert "data_curation.ray_address" in error.value.hint
    assert not (tmp_path / "out" / "manifest.json").exists()
