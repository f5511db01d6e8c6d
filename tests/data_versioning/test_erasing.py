"""Deleting a revision with stock git and DVC, as docs/how-to/data-versions.md describes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.row_search import Query
from components.data_versioning.stage import check_revision, fetch, list_versions, publish, search_rows

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
LETTER = ("a" * 16, "A letter of Ada Lovelace. " * 30)
OTHER = ("b" * 16, "Nobody's letter. " * 30)


def read_remote_objects(workdir: Path) -> list[bytes]:
    return [path.read_bytes() for path in (workdir / "dvc-remote").rglob("*") if path.is_file()]


def test_deleted_revision_leaves_no_objects_and_keeps_the_others(tmp_path: Path, make_curated) -> None:
    other_config = DataVersioningConfig(name="other")
    dataset_with_letter = make_curated("one", {"train": [LETTER, OTHER]})
    dataset_without_letter = make_curated("two", {"train": [OTHER]})
    first_version = publish(dataset_with_letter, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    publish(dataset_without_letter, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    publish(
        make_curated("three", {"train": [OTHER, ("c" * 16, "third")]}),
        other_config,
        workdir=tmp_path,
        reporter=SilentReporter(),
    )
    train_bytes = (dataset_with_letter.path / "train.parquet").read_bytes()
    assert train_bytes in read_remote_objects(tmp_path)

    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    subprocess.run(["git", "push", "-q", "origin", "--delete", "dataset-v1"], cwd=tmp_path / "clone", check=True)
    subprocess.run(["git", "tag", "-d", "dataset-v1"], cwd=tmp_path / "clone", check=True, capture_output=True)
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    gc_command = [sys.executable, "-m", "dvc", "gc", "--workspace", "--all-tags", "--cloud", "--force"]
    subprocess.run(gc_command, cwd=tmp_path / "clone", env=environment, check=True, capture_output=True)

    assert train_bytes not in read_remote_objects(tmp_path)
    assert [version.tag for version in list_versions(CONFIG, workdir=tmp_path)] == ["dataset-v2"]
    result = search_rows(Query("text", "ada lovelace"), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert (result.found, result.not_searched, result.revisions) == ([], [], 2)
    fetch("dataset-v2", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    fetch("other-v1", tmp_path / "others", other_config, workdir=tmp_path, reporter=SilentReporter())
    with pytest.raises(TunelineError, match="has no published revision"):
        check_revision(first_version.uri, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    next_version = publish(
        make_curated("four", {"train": [OTHER, ("d" * 16, "fourth")]}),
        CONFIG,
        workdir=tmp_path,
        reporter=SilentReporter(),
    )
    assert next_version.tag == "dataset-v3"
