"""Deleting a revision with stock git and DVC, as docs/data-versions.md says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.errors import TunelineError
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.search import Query
from components.data_versioning.stage import check, fetch, find, publish, versions

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
LETTER = ("a" * 16, "A letter of Ada Lovelace. " * 30)
OTHER = ("b" * 16, "Nobody's letter. " * 30)


def objects(workdir: Path) -> list[bytes]:
    return [path.read_bytes() for path in (workdir / "dvc-remote").rglob("*") if path.is_file()]


def test_a_deleted_revision_leaves_no_object_and_the_others_stay_whole(tmp_path: Path, make_curated) -> None:
    other = DataVersioningConfig(name="other")
    one = make_curated("one", {"train": [LETTER, OTHER]})
    two = make_curated("two", {"train": [OTHER]})
    first = publish(one, CONFIG, workdir=tmp_path, reporter=Silent())
    publish(two, CONFIG, workdir=tmp_path, reporter=Silent())
    publish(make_curated("three", {"train": [OTHER, ("c" * 16, "third")]}), other, workdir=tmp_path, reporter=Silent())
    train = (one.path / "train.parquet").read_bytes()
    assert train in objects(tmp_path)

    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    subprocess.run(["git", "push", "-q", "origin", "--delete", "dataset-v1"], cwd=tmp_path / "clone", check=True)
    subprocess.run(["git", "tag", "-d", "dataset-v1"], cwd=tmp_path / "clone", check=True, capture_output=True)
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    collect = [sys.executable, "-m", "dvc", "gc", "--workspace", "--all-tags", "--cloud", "--force"]
    subprocess.run(collect, cwd=tmp_path / "clone", env=environment, check=True, capture_output=True)

    assert train not in objects(tmp_path)
    assert [v.tag for v in versions(CONFIG, workdir=tmp_path)] == ["dataset-v2"]
    searched = find(Query("text", "ada lovelace"), CONFIG, workdir=tmp_path, reporter=Silent())
    assert (searched.found, searched.not_searched, searched.revisions) == ([], [], 2)
    fetch("dataset-v2", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())
    fetch("other-v1", tmp_path / "others", other, workdir=tmp_path, reporter=Silent())
    with pytest.raises(TunelineError, match="has no published revision"):
        check(first.uri, CONFIG, workdir=tmp_path, reporter=Silent())
    again = publish(make_curated("four", {"train": [OTHER, ("d" * 16, "fourth")]}), CONFIG, workdir=tmp_path, reporter=Silent())
    assert again.tag == "dataset-v3"
