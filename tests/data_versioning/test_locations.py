"""Data repositories in other folders and behind URLs, with held locks and full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.code_digest import ROOT
from components.common.runtime.errors import ConfigurationError, DiskFullError
from components.common.runtime.reporters import SilentReporter
from components.data_versioning import revision_publishing
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.stage import (
    check_revision,
    diff,
    fetch,
    fetch_source,
    list_entries,
    list_versions,
    publish,
    show,
)
from tests.git_server import git_daemon, git_over_http
from tests.pipelines.test_invalid_input import disk

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
FIRST_ROWS = {"train": ["a", "b", "c"], "test": ["d"]}
SECOND_ROWS = {"train": ["a", "b", "x", "y"], "test": ["d"]}


@pytest.fixture
def bare_repository(tmp_path: Path) -> Path:
    """Create an empty bare repository outside the workdir, as on a git server."""
    folder = tmp_path / "srv" / "data.git"
    subprocess.run(["git", "init", "-q", "--bare", "--initial-branch=trunk", str(folder)], check=True)
    return folder


def test_repository_url_is_cloned_read_and_pushed(tmp_path: Path, make_dataset, bare_repository: Path) -> None:
    first_dataset, second_dataset = make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)
    with git_daemon(bare_repository.parent) as server:
        config = DataVersioningConfig(repository=f"{server}/data.git", remote=str(tmp_path / "files"))
        first_workdir, second_workdir = tmp_path / "here", tmp_path / "there"
        assert list_versions(config, workdir=first_workdir) == []
        first = publish(first_dataset, config, workdir=first_workdir, reporter=SilentReporter(), message="From here.")
        second = publish(second_dataset, config, workdir=second_workdir, reporter=SilentReporter(), tag="release")
        assert (second.tag, second.repo, second.uri.partition("@")[0]) == (
            "dataset-v2",
            config.repository,
            f"dvc://{config.repository}",
        )
        assert [(entry.tag, entry.message, entry.tags) for entry in list_entries(config, workdir=first_workdir)] == [
            ("dataset-v1", "From here.", []),
            ("dataset-v2", "", ["release"]),
        ]
        fetched = fetch("release", tmp_path / "out", config, workdir=first_workdir, reporter=SilentReporter())
        assert artifact_folder.read(fetched.path).sha256 == second_dataset.sha256
        assert (
            diff("dataset-v1", "release", config, workdir=first_workdir, reporter=SilentReporter())["rows"]["added"]
            == 2
        )
        assert (
            check_revision(first.uri, CONFIG, workdir=first_workdir, reporter=SilentReporter())[0].tag == "dataset-v1"
        )
        source = fetch_source(
            f"dvc://{config.repository}@release:datasets/dataset/train.parquet", tmp_path / "sources", SilentReporter()
        )
        assert source.read_bytes() == (second_dataset.path / "train.parquet").read_bytes()
    with pytest.raises(DataVersioningError) as error:
        show("dataset-v1", config, workdir=first_workdir)
    assert f"the data repository {config.repository} cannot be reached" in error.value.message
    assert f"git ls-remote {config.repository}" in error.value.hint


def test_git_credentials_come_from_the_environment(
    tmp_path: Path, make_dataset, bare_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod gets them from a secret; ssh would not start for a pod's user without a name."""
    dataset = make_dataset("one", FIRST_ROWS)
    subprocess.run(["git", "-C", str(bare_repository), "config", "http.receivepack", "true"], check=True)
    with git_over_http(bare_repository.parent, "pipeline", 'a "b" $c') as server:
        config = DataVersioningConfig(repository=f"{server}/data.git", remote=str(tmp_path / "files"))
        with pytest.raises(DataVersioningError, match="could not read Username") as error:
            publish(dataset, config, workdir=tmp_path / "here", reporter=SilentReporter())
        assert "GIT_USERNAME and GIT_PASSWORD" in error.value.hint
        monkeypatch.setenv("GIT_USERNAME", "pipeline")
        monkeypatch.setenv("GIT_PASSWORD", "wrong")
        with pytest.raises(DataVersioningError, match="Authentication failed"):
            publish(dataset, config, workdir=tmp_path / "here", reporter=SilentReporter())
        monkeypatch.setenv("GIT_PASSWORD", 'a "b" $c')
        assert publish(dataset, config, workdir=tmp_path / "here", reporter=SilentReporter()).tag == "dataset-v1"
        assert [version.tag for version in list_versions(config, workdir=tmp_path / "there")] == ["dataset-v1"]


def test_concurrent_publishers_to_a_url_both_succeed(tmp_path: Path, make_dataset, bare_repository: Path) -> None:
    datasets = [make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)]
    code = (
        "import sys; from pathlib import Path; from components.common.artifacts import artifact_folder\n"
        "from components.common.runtime.reporters import SilentReporter\n"
        "from components.data_versioning.config import DataVersioningConfig as C; from components.data_versioning.stage import publish\n"
        "print(publish(artifact_folder.read(Path(sys.argv[1])), C(repository=sys.argv[2], remote=sys.argv[3]), "
        "workdir=Path(sys.argv[4]), reporter=SilentReporter()).tag)"
    )
    with git_daemon(bare_repository.parent) as server:
        arguments = [f"{server}/data.git", str(tmp_path / "files"), str(tmp_path / "wd")]
        commands = [[sys.executable, "-c", code, str(dataset.path), *arguments] for dataset in datasets]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        publishers = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        outputs = [publisher.communicate(timeout=120) for publisher in publishers]
        assert sorted(out.strip() for out, _ in outputs) == ["dataset-v1", "dataset-v2"], outputs
        config = DataVersioningConfig(repository=arguments[0], remote=arguments[1])
        assert {version.content_sha256 for version in list_versions(config, workdir=tmp_path / "wd")} == {
            dataset.sha256 for dataset in datasets
        }


def test_bare_repository_is_used_by_path_or_file_url_or_created(tmp_path: Path, make_dataset, bare_repository) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    for address in (str(bare_repository), f"file://{bare_repository}", f"file://{tmp_path}/srv/new%20one.git"):
        config = DataVersioningConfig(repository=address, remote=str(tmp_path / "files"))
        assert publish(dataset, config, workdir=tmp_path, reporter=SilentReporter()).tag == "dataset-v1"
    assert (tmp_path / "srv" / "new one.git" / "HEAD").exists()
    assert publish(dataset, config, workdir=tmp_path, reporter=SilentReporter()).created is False


def test_unreachable_url_or_password_in_a_url_is_refused(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    with pytest.raises(DataVersioningError) as error:
        publish(
            dataset,
            DataVersioningConfig(repository="git://127.0.0.1:9/data.git"),
            workdir=tmp_path,
            reporter=SilentReporter(),
        )
    assert "git://127.0.0.1:9/data.git cannot be reached" in error.value.message
    for key, address in (
        ("repository", "https://me:secret@git.example.com/x.git"),
        ("remote", "s3://me:secret@bucket/x"),
    ):
        with pytest.raises(ConfigurationError, match=f"data_versioning.{key}: the address of") as password_error:
            publish(dataset, DataVersioningConfig(**{key: address}), workdir=tmp_path, reporter=SilentReporter())
        assert "secret" not in password_error.value.message
        assert "~/.netrc" in password_error.value.hint


def test_persistent_lock_is_reported_and_the_retry_publishes(
    tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_dataset, second_dataset = make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)
    publish(first_dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    lock = tmp_path / "data-repository" / "refs" / "heads" / "main.lock"
    lock.touch()
    monkeypatch.setattr(revision_publishing, "PUBLISH_TIMEOUT_SECONDS", 2.0)
    with pytest.raises(DataVersioningError) as error:
        publish(second_dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert f"accepted no push for 2 seconds; lock files: {lock}" in error.value.message
    assert "Remove lock files that no git process holds" in error.value.hint
    assert "the files are already in the remote" in error.value.hint
    assert [version.content_sha256 for version in list_versions(CONFIG, workdir=tmp_path)] == [first_dataset.sha256]
    threading.Timer(1.0, lock.unlink).start()
    monkeypatch.setattr(revision_publishing, "PUBLISH_TIMEOUT_SECONDS", 60.0)
    assert publish(second_dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter()).tag == "dataset-v2"


def test_dvc_lock_in_a_user_clone_does_not_block_publishing(tmp_path: Path, make_dataset) -> None:
    from dvc.repo import Repo

    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    with Repo(str(tmp_path / "clone")).lock:
        assert (
            publish(make_dataset("two", SECOND_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter()).tag
            == "dataset-v2"
        )
        fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())


@pytest.mark.parametrize("location", ["remote", "repository", "workdir"])
def test_full_disk_is_reported_and_the_retry_publishes(tmp_path: Path, make_dataset, location: str) -> None:
    first_dataset, second_dataset = make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)
    with disk(tmp_path / "disk", "2m") as full_disk:
        if full_disk.enter:
            pytest.skip("this user may mount no file system for this process")
        workdir = full_disk.path / "wd" if location == "workdir" else tmp_path / "wd"
        settings = (
            {location: str(full_disk.path / location)}
            if location != "workdir"
            else {"repository": str(tmp_path / "r"), "remote": str(tmp_path / "f")}
        )
        config = DataVersioningConfig(**settings)
        publish(first_dataset, config, workdir=workdir, reporter=SilentReporter())
        full_disk.fill(0)
        with pytest.raises(DiskFullError) as error:
            publish(second_dataset, config, workdir=workdir, reporter=SilentReporter())
        assert "no space" in error.value.message
        assert str(full_disk.path) in error.value.message
        assert error.value.hint.startswith("Free ")
        assert [version.content_sha256 for version in list_versions(config, workdir=workdir)] == [first_dataset.sha256]
        full_disk.empty()
        assert publish(second_dataset, config, workdir=workdir, reporter=SilentReporter()).tag == "dataset-v2"
        for tag in ("dataset-v1", "dataset-v2"):
            fetch(tag, tmp_path / tag, config, workdir=workdir, reporter=SilentReporter())


def test_repository_configures_its_remote_for_stock_dvc(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    config = subprocess.run(
        ["git", "-C", str(tmp_path / "data-repository"), "show", "HEAD:.dvc/config"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "verify = True" in config
    assert "timeout" not in config
    assert json.dumps(str(tmp_path / "dvc-remote")).strip('"') in config
