"""Inputs of curation: earlier revisions are found and fetched once, and their rows keep their splits.

Long tier: three concurrent curations in separate processes.
"""

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

from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.artifacts.code_digest import ROOT
from components.common.runtime.errors import ArtifactDamagedError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir, load_artifact
from components.data_curation.quality_scoring.scoring_inputs import ScoringInputs
from components.data_curation.reading.source_files import describe_skipped_files
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.stage import EarlierRevision, curate
from components.data_versioning.stage import list_versions, publish
from pipelines.config.customization_config import Customization, parse_values
from pipelines.steps.curation_inputs import fetch_earlier_revisions, list_inputs

pytestmark = [pytest.mark.daft, pytest.mark.dvc]
SPLITS = ("train", "validation", "test")
PUBLISHED_ROWS, ALL_ROWS = 80, 160  # of the published revision, and of the extended source
MOSTLY_TEST = {"train": 0.1, "validation": 0.1, "test": 0.8}


class StepRecorder(SilentReporter):
    """Records the names of the steps."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def step(self, name: str) -> None:
        self.names.append(name)


def write_rows(path: Path, count: int) -> None:
    rows = (
        {"prompt": f"What is thing {n}?", "completion": " ".join(f"word{n}x{i}" for i in range(12))}
        for n in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_config(source: Path, seed: int, fractions: dict[str, float], **curation: Any) -> Customization:
    return parse_values(
        {"seed": seed, "data_curation": {"sources": [str(source)], "fractions": fractions, **curation}}, "the test"
    )


def published_config(folder: Path) -> Customization:
    return build_config(folder / "first.jsonl", 1, {"train": 0.5, "validation": 0.2, "test": 0.3})


def extended_config(folder: Path, **curation: Any) -> Customization:
    """More rows, another seed and other fractions."""
    return build_config(folder / "later.jsonl", 2, MOSTLY_TEST, **curation)


def curate_dataset(
    config: Customization, output: Path, work: Workdir, earlier: Sequence[EarlierRevision] = ()
) -> Artifact:
    inputs = list_inputs(config, work, SilentReporter())
    return curate(
        inputs.sources, output, config.data_curation, seed=config.seed, reporter=SilentReporter(), earlier=earlier
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A revision in the data repository of `wd`, whose store is empty."""
    folder = tmp_path_factory.mktemp("inputs")
    write_rows(folder / "first.jsonl", PUBLISHED_ROWS)
    write_rows(folder / "later.jsonl", ALL_ROWS)
    work = Workdir(folder / "wd")
    dataset = curate_dataset(published_config(folder), folder / "v1", work)
    publish(dataset, published_config(folder).data_versioning, workdir=work.root, reporter=SilentReporter())
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy of the published revision and its sources for one test."""
    return Path(shutil.copytree(published, tmp_path / "copy"))


def split_by_row(dataset: Path) -> dict[str, str]:
    return {
        id_: split for split in SPLITS for id_ in parquet.read_table(dataset / f"{split}.parquet")["id"].to_pylist()
    }


def read_digest(dataset: Path) -> str:
    return str(json.loads((dataset / "manifest.json").read_text())["content_sha256"])


def test_examples_of_the_quality_classifier_are_in_the_plan(folder: Path) -> None:
    for label in ("good", "bad"):
        (folder / f"{label}.txt").write_text(f"a {label} row\n")
    examples = {label: [str(folder / f"{label}.txt")] for label in ("good", "bad")}
    config = extended_config(folder, quality_scores={"classifier": examples})
    plan = json.loads(json.dumps(list_inputs(config, Workdir(folder / "wd"), SilentReporter()).as_plan()))
    inputs = ScoringInputs.from_plan(plan["scoring"])
    assert [(one.name, one.sha256) for one in (*inputs.good, *inputs.bad)] == [
        (f"{label}.txt", hashing.sha256_file(folder / f"{label}.txt")) for label in ("good", "bad")
    ]


def test_earlier_revision_is_fetched_once(folder: Path) -> None:
    work, steps = Workdir(folder / "wd"), StepRecorder()
    v1 = read_digest(folder / "v1")
    inputs = list_inputs(extended_config(folder), work, SilentReporter())
    assert inputs.earlier_revisions == [("dataset-v1", v1)]
    assert inputs.as_plan()["earlier"] == [["dataset-v1", v1]]
    assert not (work.store / v1).exists()
    [revision] = fetch_earlier_revisions(extended_config(folder), inputs.earlier_revisions, work, steps)
    assert (revision.label, revision.dataset.sha256, revision.dataset.path) == ("dataset-v1", v1, work.store / v1)
    assert "fetching dataset-v1" in steps.names
    second = StepRecorder()
    assert fetch_earlier_revisions(extended_config(folder), inputs.earlier_revisions, work, second) == [revision]
    assert second.names == []
    assert not list((work.store / "unfinished").iterdir())


def start_curation(folder: Path, job: int) -> subprocess.Popen[str]:
    """Start `tuneline curate` in a separate process."""
    settings = ["seed=2", f"data_curation.fractions={json.dumps(MOSTLY_TEST)}"]
    options = ["--workdir", "wd", "--json", *(word for setting in settings for word in ("--set", setting))]
    command = [sys.executable, "-m", "pipelines.cli", "curate", "later.jsonl", "-o", f"out{job}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.long
def test_concurrent_jobs_fetch_a_missing_revision(folder: Path) -> None:
    jobs = [start_curation(folder, number) for number in range(3)]
    outputs = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], outputs
    assert len({json.loads(stdout)["sha256"] for stdout, _ in outputs}) == 1
    store, v1 = Workdir(folder / "wd").store, read_digest(folder / "v1")
    assert load_artifact(store, v1, "dataset").path == store / v1
    assert not list((store / "unfinished").iterdir())


def test_published_rows_keep_their_splits_with_new_fractions_and_seed(folder: Path) -> None:
    work, config = Workdir(folder / "wd"), extended_config(folder)
    earlier = fetch_earlier_revisions(
        config, list_inputs(config, work, SilentReporter()).earlier_revisions, work, SilentReporter()
    )
    splits = split_by_row(curate_dataset(config, folder / "v2", work, earlier).path)
    published_splits = split_by_row(folder / "v1")
    assert len(published_splits) == PUBLISHED_ROWS
    assert set(published_splits.values()) == set(SPLITS)
    assert {row: splits[row] for row in published_splits} == published_splits
    new = [split for row, split in splits.items() if row not in published_splits]
    assert len(new) == ALL_ROWS - PUBLISHED_ROWS
    assert new.count("test") > 0.6 * len(new)


def test_published_rows_are_resplit_if_revisions_are_ignored(folder: Path) -> None:
    work, config = Workdir(folder / "wd"), extended_config(folder, published="ignore")
    assert list_inputs(config, work, SilentReporter()).earlier_revisions == []
    splits = split_by_row(curate_dataset(config, folder / "v2", work).path)
    published_splits = split_by_row(folder / "v1")
    moved = [row for row in published_splits if splits[row] != published_splits[row]]
    assert len(moved) > PUBLISHED_ROWS / 4
    assert [splits[row] for row in published_splits].count("test") > 0.6 * PUBLISHED_ROWS


def test_revision_is_not_compared_with_itself(folder: Path) -> None:
    work = Workdir(folder / "wd")
    assert list_inputs(published_config(folder), work, SilentReporter()).earlier_revisions == []
    resplit = build_config(folder / "first.jsonl", 2, MOSTLY_TEST)
    assert list_inputs(resplit, work, SilentReporter()).earlier_revisions == [
        ("dataset-v1", read_digest(folder / "v1"))
    ]


def test_missing_remote_revision_is_reported(folder: Path) -> None:
    work, config = Workdir(folder / "wd"), extended_config(folder)
    [version] = list_versions(config.data_versioning, workdir=work.root)
    (work.root / "dvc-remote" / "files" / "md5" / version.md5[:2] / version.md5[2:]).unlink()
    inputs = list_inputs(config, work, SilentReporter())
    with pytest.raises(ArtifactDamagedError, match="has missing or damaged objects"):
        fetch_earlier_revisions(config, inputs.earlier_revisions, work, SilentReporter())
    assert not list(work.store.rglob("manifest.json"))


def test_unsupported_files_of_a_folder_are_reported(tmp_path: Path) -> None:
    (tmp_path / "raw" / "old").mkdir(parents=True)
    for name in ("a.jsonl", "b.doc", "old/c.doc", "old/LICENSE", ".hidden.doc"):
        (tmp_path / "raw" / name).write_text("{}")
    entries = [SourceEntry(path=str(tmp_path / "raw")), SourceEntry(path="raw"), SourceEntry(path="s3://bucket/raw")]
    note = describe_skipped_files(entries, tmp_path)
    assert note == "skipped files with unsupported suffixes in source folders: .doc (2), no suffix (1)"
    assert describe_skipped_files([SourceEntry(path="raw/a.jsonl")], tmp_path) == ""
