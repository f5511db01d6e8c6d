"""Differences between two published revisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.runtime.errors import ArtifactDamagedError
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import diff, publish

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
BEFORE = {"train": [("a", "one"), ("b", "two"), ("c", "three"), ("d", "four")], "test": [("e", "five"), ("f", "six")]}
AFTER = {
    "train": [("a", "one"), ("b", "TWO"), ("e", "five"), ("x", "new")],
    "test": [("f", "six"), ("c", "3"), ("y", "new too")],
}


@pytest.fixture
def changes(tmp_path: Path, make_curated) -> dict:
    rejected_before = [("r1", "letters.jsonl", 7, "too_short", "hm"), ("r2", "letters.jsonl", 8, "too_short", "hm hm")]
    rejected_after = [
        ("r1", "letters.jsonl", 7, "too_short", "hm"),
        ("d", "letters.jsonl", 4, "exact_duplicate", "four"),
    ]
    for dataset in (
        make_curated("one", BEFORE, rejected_before),
        make_curated("two", AFTER, rejected_after, unreadable_lines=3),
    ):
        publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    return diff("dataset-v1", "dataset-v2", CONFIG, workdir=tmp_path, reporter=SilentReporter())


def test_rows_are_classified_as_added_removed_changed_moved_or_kept(changes: dict) -> None:
    assert (changes["from"], changes["to"]) == ("dataset-v1", "dataset-v2")
    assert changes["rows"] == {"before": 6, "after": 7, "added": 2, "removed": 1, "changed": 2, "moved": 2, "kept": 2}
    train = {"added": ["x"], "removed": ["d"], "changed": ["b"], "moved_in": ["e"], "moved_out": ["c"]}
    assert changes["splits"]["train"]["examples"] == train
    assert changes["moved"] == [
        {"from": "test", "to": "train", "rows": 1, "examples": ["e"]},
        {"from": "train", "to": "test", "rows": 1, "examples": ["c"]},
    ]


def test_split_counts_add_up_before_and_after(changes: dict) -> None:
    for split in changes["splits"].values():
        assert split["before"] == split["kept"] + split["changed"] + split["removed"] + split["moved_out"]
        assert split["after"] == split["kept"] + split["changed"] + split["added"] + split["moved_in"]


def test_reject_reasons_are_counted_before_and_after(changes: dict) -> None:
    assert changes["reasons"] == {"exact_duplicate": {"before": 0, "after": 1}, "too_short": {"before": 2, "after": 1}}
    assert changes["quarantined"] == {"before": 0, "after": 3}


def test_datasets_without_rejected_rows_are_compared(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", {"train": ["a"]}), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    publish(make_dataset("two", {"train": ["a"], "test": ["b"]}), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    changes = diff("dataset-v1", "dataset-v2", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert changes["rows"] == {"before": 1, "after": 2, "added": 1, "removed": 0, "changed": 0, "moved": 0, "kept": 1}
    assert changes["reasons"] == {}


def test_damaged_revision_is_not_compared(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", {"train": ["a"]}), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    for path in (tmp_path / "dvc-remote").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"something else")
    with pytest.raises(ArtifactDamagedError, match="has missing or damaged objects") as error:
        diff("dataset-v1", "dataset-v1", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert "Publish the dataset again" in error.value.hint
