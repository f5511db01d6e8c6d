"""Where a data repository may lie: in a folder elsewhere, behind a URL; and what a lock or a full disk there does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from components.common import artifacts
from components.common.errors import ConfigurationError, DiskFullError
from components.common.hashing import ROOT
from components.common.progress import Silent
from components.data_versioning import publishing
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.stage import check, diff, entries, fetch, obtain, publish, show, versions
from tests.git_server import git_daemon, git_over_http
from tests.pipelines.test_wrong_input import disk

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
ROWS = {"train": ["a", "b", "c"], "test": ["d"]}
MORE = {"train": ["a", "b", "x", "y"], "test": ["d"]}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An empty bare repository elsewhere, as a git server has it."""
    folder = tmp_path / "srv" / "data.git"
    subprocess.run(["git", "init", "-q", "--bare", "--initial-branch=trunk", str(folder)], check=True)
    return folder


def test_a_repository_behind_a_url_is_cloned_read_and_pushed_to(tmp_path: Path, make_dataset, bare: Path) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    with git_daemon(bare.parent) as server:
        config = DataVersioningConfig(repository=f"{server}/data.git", remote=str(tmp_path / "files"))
        here, there = tmp_path / "here", tmp_path / "there"
        assert versions(config, workdir=here) == []
        first = publish(one, config, workdir=here, reporter=Silent(), message="From here.")
        second = publish(two, config, workdir=there, reporter=Silent(), tag="release")
        assert (second.tag, second.repo, second.uri.partition("@")[0]) == ("dataset-v2", config.repository, f"dvc://{config.repository}")
        assert [(e.tag, e.message, e.tags) for e in entries(config, workdir=here)] == [
            ("dataset-v1", "From here.", []),
            ("dataset-v2", "", ["release"]),
        ]
        fetched = fetch("release", tmp_path / "out", config, workdir=here, reporter=Silent())
        assert artifacts.read(fetched.path).sha256 == two.sha256
        assert diff("dataset-v1", "release", config, workdir=here, reporter=Silent())["rows"]["added"] == 2
        assert check(first.uri, CONFIG, workdir=here, reporter=Silent())[0].tag == "dataset-v1"
        source = obtain(f"dvc://{config.repository}@release:datasets/dataset/train.parquet", tmp_path / "sources", Silent())
        assert source.read_bytes() == (two.path / "train.parquet").read_bytes()
    with pytest.raises(DataVersioningError) as refused:
        show("dataset-v1", config, workdir=here)
    assert f"the data repository {config.repository} cannot be reached" in refused.value.message
    assert f"git ls-remote {config.repository}" in refused.value.hint


def test_a_server_that_wants_a_password_is_given_that_of_the_environment(
    tmp_path: Path, make_dataset, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a secret brings it to a pod, whose user may have no name: ssh refuses to start for one."""
    dataset = make_dataset("one", ROWS)
    subprocess.run(["git", "-C", str(bare), "config", "http.receivepack", "true"], check=True)
    with git_over_http(bare.parent, "pipeline", 'a "b" $c') as server:
        config = DataVersioningConfig(repository=f"{server}/data.git", remote=str(tmp_path / "files"))
        with pytest.raises(DataVersioningError, match="could not read Username") as refused:
            publish(dataset, config, workdir=tmp_path / "here", reporter=Silent())
        assert "GIT_USERNAME and GIT_PASSWORD" in refused.value.hint
        monkeypatch.setenv("GIT_USERNAME", "pipeline")
        monkeypatch.setenv("GIT_PASSWORD", "wrong")
        with pytest.raises(DataVersioningError, match="Authentication failed"):
            publish(dataset, config, workdir=tmp_path / "here", reporter=Silent())
        monkeypatch.setenv("GIT_PASSWORD", 'a "b" $c')
        assert publish(dataset, config, workdir=tmp_path / "here", reporter=Silent()).tag == "dataset-v1"
        assert [one.tag for one in versions(config, workdir=tmp_path / "there")] == ["dataset-v1"]


def test_two_publishers_at_once_to_a_url_both_land(tmp_path: Path, make_dataset, bare: Path) -> None:
    datasets = [make_dataset("one", ROWS), make_dataset("two", MORE)]
    code = (
        "import sys; from pathlib import Path; from components.common import artifacts; from components.common.progress import Silent\n"
        "from components.data_versioning.config import DataVersioningConfig as C; from components.data_versioning.stage import publish\n"
        "print(publish(artifacts.read(Path(sys.argv[1])), C(repository=sys.argv[2], remote=sys.argv[3]), "
        "workdir=Path(sys.argv[4]), reporter=Silent()).tag)"
    )
    with git_daemon(bare.parent) as server:
        said = [f"{server}/data.git", str(tmp_path / "files"), str(tmp_path / "wd")]
        commands = [[sys.executable, "-c", code, str(dataset.path), *said] for dataset in datasets]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        jobs = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
        told = [job.communicate(timeout=120) for job in jobs]
        assert sorted(out.strip() for out, _ in told) == ["dataset-v1", "dataset-v2"], told
        config = DataVersioningConfig(repository=said[0], remote=said[1])
        assert {v.content_sha256 for v in versions(config, workdir=tmp_path / "wd")} == {d.sha256 for d in datasets}


def test_a_bare_repository_elsewhere_is_used_by_path_and_by_file_url_and_made_where_it_is_missing(
    tmp_path: Path, make_dataset, bare
) -> None:
    dataset = make_dataset("one", ROWS)
    for address in (str(bare), f"file://{bare}", f"file://{tmp_path}/srv/new%20one.git"):
        config = DataVersioningConfig(repository=address, remote=str(tmp_path / "files"))
        assert publish(dataset, config, workdir=tmp_path, reporter=Silent()).tag == "dataset-v1"
    assert (tmp_path / "srv" / "new one.git" / "HEAD").exists()
    assert publish(dataset, config, workdir=tmp_path, reporter=Silent()).created is False


def test_a_url_that_cannot_be_reached_or_holds_a_password_is_told(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", ROWS)
    with pytest.raises(DataVersioningError) as refused:
        publish(dataset, DataVersioningConfig(repository="git://127.0.0.1:9/data.git"), workdir=tmp_path, reporter=Silent())
    assert "git://127.0.0.1:9/data.git cannot be reached" in refused.value.message
    for key, address in (("repository", "https://me:secret@git.example.com/x.git"), ("remote", "s3://me:secret@bucket/x")):
        with pytest.raises(ConfigurationError, match=f"data_versioning.{key}: the address of") as told:
            publish(dataset, DataVersioningConfig(**{key: address}), workdir=tmp_path, reporter=Silent())
        assert "secret" not in told.value.message
        assert "~/.netrc" in told.value.hint


def test_a_lock_that_stays_is_named_nothing_is_lost_and_the_next_try_works(
    tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    publish(one, CONFIG, workdir=tmp_path, reporter=Silent())
    lock = tmp_path / "data-repository" / "refs" / "heads" / "main.lock"
    lock.touch()
    monkeypatch.setattr(publishing, "PATIENCE", 2.0)
    with pytest.raises(DataVersioningError) as refused:
        publish(two, CONFIG, workdir=tmp_path, reporter=Silent())
    assert f"let nothing through for 2 seconds; {lock} is in the way" in refused.value.message
    assert "a lock file that no git process holds may be removed" in refused.value.hint
    assert "the files are in the remote already" in refused.value.hint
    assert [v.content_sha256 for v in versions(CONFIG, workdir=tmp_path)] == [one.sha256]
    threading.Timer(1.0, lock.unlink).start()
    monkeypatch.setattr(publishing, "PATIENCE", 60.0)
    assert publish(two, CONFIG, workdir=tmp_path, reporter=Silent()).tag == "dataset-v2"


def test_a_lock_of_a_dvc_that_works_in_a_users_clone_does_not_matter(tmp_path: Path, make_dataset) -> None:
    from dvc.repo import Repo

    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    with Repo(str(tmp_path / "clone")).lock:
        assert publish(make_dataset("two", MORE), CONFIG, workdir=tmp_path, reporter=Silent()).tag == "dataset-v2"
        fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())


@pytest.mark.parametrize("what", ["remote", "repository", "workdir"])
def test_a_full_disk_is_told_nothing_is_lost_and_with_space_the_next_try_works(tmp_path: Path, make_dataset, what: str) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    with disk(tmp_path / "disk", "2m") as small:
        if small.enter:
            pytest.skip("this user may mount no file system for this process")
        workdir = small.path / "wd" if what == "workdir" else tmp_path / "wd"
        places = {what: str(small.path / what)} if what != "workdir" else {"repository": str(tmp_path / "r"), "remote": str(tmp_path / "f")}
        config = DataVersioningConfig(**places)
        publish(one, config, workdir=workdir, reporter=Silent())
        small.fill(0)
        with pytest.raises(DiskFullError) as refused:
            publish(two, config, workdir=workdir, reporter=Silent())
        assert "no space" in refused.value.message
        assert str(small.path) in refused.value.message
        assert "same command again" in refused.value.hint
        assert [v.content_sha256 for v in versions(config, workdir=workdir)] == [one.sha256]
        small.empty()
        assert publish(two, config, workdir=workdir, reporter=Silent()).tag == "dataset-v2"
        for tag in ("dataset-v1", "dataset-v2"):
            fetch(tag, tmp_path / tag, config, workdir=workdir, reporter=Silent())


def test_the_repository_names_its_remote_for_a_stock_dvc(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    config = subprocess.run(
        ["git", "-C", str(tmp_path / "data-repository"), "show", "HEAD:.dvc/config"], capture_output=True, text=True, check=True
    ).stdout
    assert "verify = True" in config
    assert "timeout" not in config
    assert json.dumps(str(tmp_path / "dvc-remote")).strip('"') in config
