"""Publisher processes that are killed, run concurrently or run under a user's git configuration.

Marked `long`: each test starts publisher processes, one of them nine in a row.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.code_digest import ROOT
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import fetch, list_versions, publish

pytestmark = [pytest.mark.dvc, pytest.mark.long]
CONFIG = DataVersioningConfig()
PUBLISHER = Path(__file__).with_name("publish_once.py")
FIRST_ROWS = {"train": ["a", "b", "c"], "test": ["d"]}
SECOND_ROWS = {"train": ["a", "b", "x"], "test": ["d"]}


def start_publisher(dataset: Path, workdir: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PUBLISHER), str(dataset), str(workdir)]
    process_environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        command, cwd="/", env=process_environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_tag(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.strip()


def test_next_publisher_completes_a_killed_one(tmp_path: Path, make_dataset) -> None:
    first_dataset, second_dataset = make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)
    started = time.monotonic()
    wait_for_tag(start_publisher(first_dataset.path, tmp_path / "uninterrupted"))
    duration = time.monotonic() - started
    workdir = tmp_path / "work"
    rng = random.Random(20)
    for number, dataset in enumerate(
        [
            first_dataset,
            first_dataset,
            first_dataset,
            first_dataset,
            second_dataset,
            second_dataset,
            second_dataset,
            second_dataset,
        ]
    ):
        publisher = start_publisher(dataset.path, workdir)
        time.sleep(duration * (0.25 + 0.75 * (number % 4 + rng.random()) / 4))
        publisher.kill()
        publisher.communicate()
        for version in list_versions(CONFIG, workdir=workdir):
            fetch(version.tag, tmp_path / "fetched", CONFIG, workdir=workdir, reporter=SilentReporter(), overwrite=True)
    publish(first_dataset, CONFIG, workdir=workdir, reporter=SilentReporter())
    publish(second_dataset, CONFIG, workdir=workdir, reporter=SilentReporter())
    digests = [version.content_sha256 for version in list_versions(CONFIG, workdir=workdir)]
    assert sorted(digests) == sorted([first_dataset.sha256, second_dataset.sha256]), (
        "each once; which came first depends on where the kills hit"
    )
    assert list((workdir / "state" / "data_versioning").iterdir()) == []


def test_concurrent_publishers_both_succeed(tmp_path: Path, make_dataset) -> None:
    datasets = [make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)]
    tags = [wait_for_tag(publisher) for publisher in [start_publisher(dataset.path, tmp_path) for dataset in datasets]]
    assert sorted(tags) == ["dataset-v1", "dataset-v2"]
    by_tag = {version.tag: version.content_sha256 for version in list_versions(CONFIG, workdir=tmp_path)}
    assert [by_tag[tag] for tag in tags] == [dataset.sha256 for dataset in datasets]
    for tag in tags:
        fetch(tag, tmp_path / tag, CONFIG, workdir=tmp_path, reporter=SilentReporter())


def test_user_git_configuration_is_ignored(tmp_path: Path, make_dataset) -> None:
    home, hooks = tmp_path / "home", tmp_path / "hooks"
    home.mkdir()
    hooks.mkdir()
    for name in ("pre-commit", "pre-push", "commit-msg", "post-checkout", "reference-transaction", "pre-receive"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    lines = [
        "[commit]",
        "gpgSign = true",
        "[tag]",
        "gpgSign = true",
        "[core]",
        f"hooksPath = {hooks}",
        "autocrlf = true",
    ]
    lines += [
        "[init]",
        "defaultBranch = trunk",
        "[protocol]",
        "allow = never",
        "[push]",
        "default = nothing",
        "gpgSign = true",
    ]
    (home / ".gitconfig").write_text("\n".join(lines) + "\n")
    dataset = make_dataset("one", FIRST_ROWS)
    environment = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "GIT_DIR": str(tmp_path / "elsewhere"),
        "GIT_AUTHOR_DATE": "nonsense",
    }
    assert wait_for_tag(start_publisher(dataset.path, tmp_path / "work", **environment)) == "dataset-v1"
    fetched = fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path / "work", reporter=SilentReporter())
    assert artifact_folder.read(fetched.path).sha256 == dataset.sha256


def test_unwritable_home_is_ignored(tmp_path: Path, make_dataset) -> None:
    home_file = tmp_path / "a-file"
    home_file.write_text("")
    dataset = make_dataset("one", FIRST_ROWS)
    assert (
        wait_for_tag(
            start_publisher(dataset.path, tmp_path / "work", HOME=str(home_file), DVC_SITE_CACHE_DIR=str(home_file))
        )
        == "dataset-v1"
    )
    assert home_file.read_text() == ""
