"""Publishers as processes: killed, two at once, under a user's own git configuration."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common import artifacts
from components.common.hashing import ROOT
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import fetch, publish, versions

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
PUBLISHER = Path(__file__).with_name("publish_once.py")
ROWS = {"train": ["a", "b", "c"], "test": ["d"]}
MORE = {"train": ["a", "b", "x"], "test": ["d"]}


def start(dataset: Path, workdir: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PUBLISHER), str(dataset), str(workdir)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, cwd="/", env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def told(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.strip()


def test_a_publisher_killed_at_any_moment_is_finished_by_the_next(tmp_path: Path, make_dataset) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    began = time.monotonic()
    told(start(one.path, tmp_path / "unhurried"))
    whole = time.monotonic() - began
    workdir = tmp_path / "work"
    chance = random.Random(20)
    for number, dataset in enumerate([one, one, one, one, two, two, two, two]):
        victim = start(dataset.path, workdir)
        time.sleep(whole * (0.25 + 0.75 * (number % 4 + chance.random()) / 4))
        victim.kill()
        victim.communicate()
        for version in versions(CONFIG, workdir=workdir):
            fetch(version.tag, tmp_path / "seen", CONFIG, workdir=workdir, reporter=Silent(), overwrite=True)
    publish(one, CONFIG, workdir=workdir, reporter=Silent())
    publish(two, CONFIG, workdir=workdir, reporter=Silent())
    there = [v.content_sha256 for v in versions(CONFIG, workdir=workdir)]
    assert sorted(there) == sorted([one.sha256, two.sha256]), "each once; which came first depends on where the kills hit"
    assert list((workdir / "state" / "data_versioning").iterdir()) == []


def test_two_publishers_at_once_both_land(tmp_path: Path, make_dataset) -> None:
    datasets = [make_dataset("one", ROWS), make_dataset("two", MORE)]
    tags = [told(p) for p in [start(dataset.path, tmp_path) for dataset in datasets]]
    assert sorted(tags) == ["dataset-v1", "dataset-v2"]
    by_tag = {v.tag: v.content_sha256 for v in versions(CONFIG, workdir=tmp_path)}
    assert [by_tag[tag] for tag in tags] == [d.sha256 for d in datasets]
    for tag in tags:
        fetch(tag, tmp_path / tag, CONFIG, workdir=tmp_path, reporter=Silent())


def test_a_users_own_git_configuration_does_not_matter(tmp_path: Path, make_dataset) -> None:
    home, hooks = tmp_path / "home", tmp_path / "hooks"
    home.mkdir()
    hooks.mkdir()
    for name in ("pre-commit", "pre-push", "commit-msg", "post-checkout", "reference-transaction", "pre-receive"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    lines = ["[commit]", "gpgSign = true", "[tag]", "gpgSign = true", "[core]", f"hooksPath = {hooks}", "autocrlf = true"]
    lines += ["[init]", "defaultBranch = trunk", "[protocol]", "allow = never", "[push]", "default = nothing", "gpgSign = true"]
    (home / ".gitconfig").write_text("\n".join(lines) + "\n")
    dataset = make_dataset("one", ROWS)
    hostile = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "GIT_DIR": str(tmp_path / "elsewhere"), "GIT_AUTHOR_DATE": "nonsense"}
    assert told(start(dataset.path, tmp_path / "work", **hostile)) == "dataset-v1"
    fetched = fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path / "work", reporter=Silent())
    assert artifacts.read(fetched.path).sha256 == dataset.sha256


def test_a_home_that_cannot_be_written_does_not_matter(tmp_path: Path, make_dataset) -> None:
    no_home = tmp_path / "a-file"
    no_home.write_text("")
    dataset = make_dataset("one", ROWS)
    assert told(start(dataset.path, tmp_path / "work", HOME=str(no_home), DVC_SITE_CACHE_DIR=str(no_home))) == "dataset-v1"
    assert no_home.read_text() == ""
