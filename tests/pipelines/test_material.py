"""What curation is given to work on: revisions published before are found and fetched, and then their rows stay where they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError
from components.common.hashing import ROOT
from components.common.places import Workdir, stored
from components.common.progress import Silent
from components.data_curation.stage import Earlier, curate
from components.data_versioning.stage import publish, versions
from pipelines.config import Customization, parse
from pipelines.material import fetch_earlier, look_at

pytestmark = [pytest.mark.daft, pytest.mark.dvc]
SPLITS = ("train", "validation", "test")
FIRST, ALL = 80, 160  # rows of the revision that was published, and of what comes later
MOSTLY_TEST = {"train": 0.1, "validation": 0.1, "test": 0.8}


class Steps(Silent):
    """Remembers the parts of the work."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def step(self, name: str) -> None:
        self.names.append(name)


def write_rows(path: Path, count: int) -> None:
    rows = ({"prompt": f"What is thing {n}?", "completion": " ".join(f"word{n}x{i}" for i in range(12))} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def customization(source: Path, seed: int, fractions: dict[str, float], **curation: Any) -> Customization:
    return parse({"seed": seed, "data_curation": {"sources": [str(source)], "fractions": fractions, **curation}}, "the test")


def first(place: Path) -> Customization:
    return customization(place / "first.jsonl", 1, {"train": 0.5, "validation": 0.2, "test": 0.3})


def later(place: Path, **curation: Any) -> Customization:
    """More rows, another seed and other fractions."""
    return customization(place / "later.jsonl", 2, MOSTLY_TEST, **curation)


def curated(config: Customization, output: Path, work: Workdir, earlier: Sequence[Earlier] = ()) -> Artifact:
    found = look_at(config, work, Silent())
    return curate(found.sources, output, config.data_curation, seed=config.seed, reporter=Silent(), earlier=earlier)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A revision in the data repository of `wd`, whose store is empty."""
    place = tmp_path_factory.mktemp("material")
    write_rows(place / "first.jsonl", FIRST)
    write_rows(place / "later.jsonl", ALL)
    work = Workdir(place / "wd")
    made = curated(first(place), place / "v1", work)
    publish(made, first(place).data_versioning, workdir=work.root, reporter=Silent())
    return place


@pytest.fixture
def place(published: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(published, tmp_path / "copy"))


def places_of(dataset: Path) -> dict[str, str]:
    return {id_: split for split in SPLITS for id_ in parquet.read_table(dataset / f"{split}.parquet")["id"].to_pylist()}


def sha256_of(dataset: Path) -> str:
    return str(json.loads((dataset / "manifest.json").read_text())["content_sha256"])


def test_an_earlier_revision_is_found_and_fetched_once_into_the_store(place: Path) -> None:
    work, steps = Workdir(place / "wd"), Steps()
    v1 = sha256_of(place / "v1")
    found = look_at(later(place), work, Silent())
    assert found.earlier == [("dataset-v1", v1)]
    assert found.as_plan()["earlier"] == [["dataset-v1", v1]]
    assert not (work.store / v1).exists()
    [before] = fetch_earlier(later(place), found.earlier, work, steps)
    assert (before.label, before.dataset.sha256, before.dataset.path) == ("dataset-v1", v1, work.store / v1)
    assert "fetching dataset-v1" in steps.names
    again = Steps()
    assert fetch_earlier(later(place), found.earlier, work, again) == [before]
    assert again.names == []
    assert not list((work.store / "unfinished").iterdir())


def start(place: Path, job: int) -> subprocess.Popen[str]:
    """The command as a user gives it, in a process of its own."""
    settings = ["seed=2", f"data_curation.fractions={json.dumps(MOSTLY_TEST)}"]
    options = ["--workdir", "wd", "--json", *(word for one in settings for word in ("--set", one))]
    command = [sys.executable, "-m", "pipelines.cli", "curate", "later.jsonl", "-o", f"out{job}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_jobs_that_start_at_once_all_fetch_the_earlier_revision_that_the_store_lacks(place: Path) -> None:
    jobs = [start(place, number) for number in range(3)]
    told = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], told
    assert len({json.loads(said)["sha256"] for said, _ in told}) == 1
    store, v1 = Workdir(place / "wd").store, sha256_of(place / "v1")
    assert stored(store, v1, "dataset").path == store / v1
    assert not list((store / "unfinished").iterdir())


def test_published_rows_stay_in_their_splits_with_other_fractions_and_another_seed(place: Path) -> None:
    work, config = Workdir(place / "wd"), later(place)
    before = fetch_earlier(config, look_at(config, work, Silent()).earlier, work, Silent())
    now, there = places_of(curated(config, place / "v2", work, before).path), places_of(place / "v1")
    assert len(there) == FIRST
    assert set(there.values()) == set(SPLITS)
    assert {row: now[row] for row in there} == there
    new = [split for row, split in now.items() if row not in there]
    assert len(new) == ALL - FIRST
    assert new.count("test") > 0.6 * len(new)


def test_published_rows_are_split_anew_where_earlier_revisions_are_ignored(place: Path) -> None:
    work, config = Workdir(place / "wd"), later(place, published="ignore")
    assert look_at(config, work, Silent()).earlier == []
    now, there = places_of(curated(config, place / "v2", work).path), places_of(place / "v1")
    moved = [row for row in there if now[row] != there[row]]
    assert len(moved) > FIRST / 4
    assert [now[row] for row in there].count("test") > 0.6 * FIRST


def test_a_revision_is_no_earlier_one_of_the_files_and_settings_that_it_came_of(place: Path) -> None:
    work = Workdir(place / "wd")
    assert look_at(first(place), work, Silent()).earlier == []
    split_anew = customization(place / "first.jsonl", 2, MOSTLY_TEST)
    assert look_at(split_anew, work, Silent()).earlier == [("dataset-v1", sha256_of(place / "v1"))]


def test_an_earlier_revision_that_the_remote_lacks_is_told_and_nothing_is_left_in_the_store(place: Path) -> None:
    work, config = Workdir(place / "wd"), later(place)
    [version] = versions(config.data_versioning, workdir=work.root)
    (work.root / "dvc-remote" / "files" / "md5" / version.md5[:2] / version.md5[2:]).unlink()
    found = look_at(config, work, Silent())
    with pytest.raises(ArtifactDamagedError, match="lacks objects or holds them damaged"):
        fetch_earlier(config, found.earlier, work, Silent())
    assert not list(work.store.rglob("manifest.json"))
