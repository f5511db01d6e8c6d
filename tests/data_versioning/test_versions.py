"""Publishing, finding and fetching dataset versions, on real git and DVC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.common import artifacts
from components.common.errors import ArtifactDamagedError, ConfigurationError, EngineMissingError, OutputOccupiedError, UsageError
from components.common.progress import Silent
from components.data_versioning import repository
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.stage import fetch, publish, show, versions

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
ROWS = {"train": ["a", "b", "c"], "validation": ["d"], "test": ["e"]}
MORE = {"train": ["a", "b", "x", "y"], "validation": ["d"], "test": ["e"]}


def objects(workdir: Path) -> list[Path]:
    return sorted(p for p in (workdir / "dvc-remote").rglob("*") if p.is_file())


def tamper(path: Path) -> None:
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    path.chmod(0o444)  # DVC writes objects read-only


def test_the_same_content_is_published_once(tmp_path: Path, make_dataset) -> None:
    first = publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    again = publish(make_dataset("same", ROWS, report="another report"), CONFIG, workdir=tmp_path, reporter=Silent())
    assert first.created
    assert not again.created
    assert again == first.model_copy(update={"created": False})
    assert first.tag == "dataset-v1"
    assert first.md5.endswith(".dir")
    assert first.uri == f"dvc://{tmp_path / 'data-repository'}@{first.rev}:datasets/dataset"
    assert not list((tmp_path / "state" / "data_versioning").iterdir())


def test_every_version_comes_back_by_tag_and_by_commit(tmp_path: Path, make_dataset) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    first = publish(one, CONFIG, workdir=tmp_path, reporter=Silent())
    second = publish(two, CONFIG, workdir=tmp_path, reporter=Silent())
    assert [v.tag for v in versions(CONFIG, workdir=tmp_path)] == ["dataset-v1", "dataset-v2"]
    by_tag = fetch("dataset-v1", tmp_path / "by-tag", CONFIG, workdir=tmp_path, reporter=Silent())
    by_commit = fetch(second.rev[:12], tmp_path / "by-commit", CONFIG, workdir=tmp_path, reporter=Silent())
    assert artifacts.read(by_tag.path, "dataset").sha256 == one.sha256 == first.content_sha256
    assert artifacts.read(by_commit.path, "dataset").sha256 == two.sha256
    assert (by_tag.path / "manifest.json").read_bytes() == (one.path / "manifest.json").read_bytes()
    (by_tag.path / "train.parquet").write_bytes(b"mine to change")


def test_a_stock_clone_and_dvc_pull_give_the_dataset(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", ROWS)
    publish(dataset, CONFIG, workdir=tmp_path, reporter=Silent())
    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    pull = [sys.executable, "-m", "dvc", "pull", "-q"]
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    subprocess.run(pull, cwd=tmp_path / "clone", env=environment, check=True)
    assert artifacts.read(tmp_path / "clone" / "datasets" / "dataset", "dataset").sha256 == dataset.sha256


def test_show_tells_what_a_version_holds(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    publish(make_dataset("two", MORE), CONFIG, workdir=tmp_path, reporter=Silent())
    told = show("dataset-v2", CONFIG, workdir=tmp_path)
    assert told["summary"] == {"rows": 3}
    assert told["tag"] == "dataset-v2"


def test_an_unknown_revision_is_answered_with_those_that_exist(tmp_path: Path, make_dataset) -> None:
    with pytest.raises(DataVersioningError, match="no published revision dataset-v1"):
        fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    with pytest.raises(DataVersioningError) as refused:
        fetch("dataset-v7", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())
    assert "dataset-v1" in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_every_object_of_the_remote_is_refused_by_name_when_tampered_with(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    for damaged in objects(tmp_path):
        whole = damaged.read_bytes()
        if not whole:
            continue
        tamper(damaged)
        with pytest.raises(ArtifactDamagedError) as refused:
            fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())
        assert f"{damaged.parent.name}/{damaged.name}" in refused.value.message
        assert not (tmp_path / "out").exists()
        damaged.chmod(0o644)
        damaged.write_bytes(whole)
    fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())


def test_a_missing_object_of_the_remote_is_refused_by_name(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    for gone in objects(tmp_path):
        whole = gone.read_bytes()
        gone.unlink()
        with pytest.raises(ArtifactDamagedError, match=f"{gone.parent.name}/{gone.name}"):
            fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())
        gone.write_bytes(whole)


def test_publishing_again_repairs_what_the_remote_lost_or_damaged(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", ROWS)
    first = publish(dataset, CONFIG, workdir=tmp_path, reporter=Silent())
    stored = objects(tmp_path)
    for damage in (lambda: stored[0].unlink(), lambda: [tamper(p) for p in stored if p.stat().st_size]):
        damage()
        again = publish(dataset, CONFIG, workdir=tmp_path, reporter=Silent())
        assert (again.tag, again.rev, again.created) == (first.tag, first.rev, False)
        assert objects(tmp_path) == stored
        fetched = fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent(), overwrite=True)
        assert artifacts.read(fetched.path).sha256 == dataset.sha256


def test_a_version_that_cannot_be_repaired_is_published_anew(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS, report="the report"), CONFIG, workdir=tmp_path, reporter=Silent())
    report = next(p for p in objects(tmp_path) if p.read_bytes() == b"the report")
    report.unlink()
    again = publish(make_dataset("same", ROWS, report="another"), CONFIG, workdir=tmp_path, reporter=Silent())
    assert (again.tag, again.created) == ("dataset-v2", True)
    fetch("dataset-v2", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())


def test_a_new_version_does_not_rest_on_a_damaged_object_of_an_older_one(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    for stored in objects(tmp_path):
        if stored.stat().st_size:
            tamper(stored)
    publish(make_dataset("two", MORE), CONFIG, workdir=tmp_path, reporter=Silent())
    fetched = fetch("dataset-v2", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=Silent())
    assert artifacts.read(fetched.path, "dataset").sha256 == fetched.sha256


def test_a_fetched_output_is_kept_and_another_one_is_not_overwritten(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    publish(make_dataset("two", MORE), CONFIG, workdir=tmp_path, reporter=Silent())
    out = tmp_path / "out"
    first = fetch("dataset-v1", out, CONFIG, workdir=tmp_path, reporter=Silent())
    written = (out / "manifest.json").stat().st_mtime_ns
    assert fetch("dataset-v1", out, CONFIG, workdir=tmp_path, reporter=Silent()).sha256 == first.sha256
    assert (out / "manifest.json").stat().st_mtime_ns == written
    with pytest.raises(OutputOccupiedError):
        fetch("dataset-v2", out, CONFIG, workdir=tmp_path, reporter=Silent())
    second = fetch("dataset-v2", out, CONFIG, workdir=tmp_path, reporter=Silent(), overwrite=True)
    assert artifacts.read(out).sha256 == second.sha256 != first.sha256


def test_two_datasets_live_in_one_repository(tmp_path: Path, make_dataset) -> None:
    other = DataVersioningConfig(name="other")
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    version = publish(make_dataset("two", MORE), other, workdir=tmp_path, reporter=Silent())
    assert version.tag == "other-v1"
    assert [v.tag for v in versions(CONFIG, workdir=tmp_path)] == ["dataset-v1"]


@pytest.mark.parametrize("tag", ["dataset-v9", "tickets-v1", "my-own_tickets-v12"])
def test_a_tag_that_would_look_like_a_version_of_any_dataset_is_refused(tmp_path: Path, make_dataset, tag: str) -> None:
    with pytest.raises(UsageError) as refused:
        publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent(), tag=tag)
    assert refused.value.message == f"--tag {tag}: tags that end in -v1, -v2, … are given by tuneline"
    assert refused.value.hint == f"Choose another name, for instance {tag.replace('-v', '-')}."
    assert versions(CONFIG, workdir=tmp_path) == []


def test_tags_that_only_look_like_versions_of_a_dataset_do_not_break_it(tmp_path: Path, make_dataset) -> None:
    tickets = DataVersioningConfig(name="tickets")
    other = publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    blob = repository.git(tmp_path / "data-repository", "rev-parse", f"{other.rev}:datasets/dataset.dvc").strip()
    for tag, named in (("tickets-v1", other.rev), ("tickets-v2", blob)):
        repository.git(tmp_path / "data-repository", "tag", tag, named)
    assert versions(tickets, workdir=tmp_path) == []
    assert publish(make_dataset("two", MORE), tickets, workdir=tmp_path, reporter=Silent()).tag == "tickets-v3"
    assert [v.tag for v in versions(tickets, workdir=tmp_path)] == ["tickets-v3"]
    assert [v.tag for v in versions(CONFIG, workdir=tmp_path)] == ["dataset-v1"]


def test_a_version_whose_tag_was_signed_off_with_a_tag_of_it_is_still_there(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", ROWS)
    version = publish(dataset, CONFIG, workdir=tmp_path, reporter=Silent())
    who = ("-c", "user.name=Auditor", "-c", "user.email=auditor@example.com")
    repository.git(tmp_path / "data-repository", *who, "tag", "-a", "-f", "-m", "signed off", version.tag, version.tag)
    repository.git(tmp_path / "data-repository", *who, "tag", "-a", "-m", "released", "release", version.tag)
    assert [(v.tag, v.rev) for v in versions(CONFIG, workdir=tmp_path)] == [(version.tag, version.rev)]
    assert show("release", CONFIG, workdir=tmp_path)["tag"] == version.tag
    assert publish(dataset, CONFIG, workdir=tmp_path, reporter=Silent()).tag == version.tag


def test_a_version_whose_commit_is_damaged_is_told_and_not_passed_over(tmp_path: Path, make_dataset) -> None:
    version = publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    tree = repository.git(tmp_path / "data-repository", "rev-parse", f"{version.rev}:datasets").strip()
    (tmp_path / "data-repository" / "objects" / tree[:2] / tree[2:]).unlink()
    with pytest.raises(DataVersioningError, match=r"failed in .*data-repository") as refused:
        versions(CONFIG, workdir=tmp_path)
    assert refused.value.hint == "Check that the folder is a git repository you may read and write."


def test_nothing_but_a_bare_repository_or_an_empty_place_is_taken_as_the_data_repository(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", ROWS)
    subprocess.run(["git", "init", "-q", str(tmp_path / "working-copy")], check=True)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter.txt").write_text("dear")
    for folder in ("working-copy", "documents"):
        with pytest.raises(ConfigurationError, match=r"data_versioning\.repository"):
            publish(dataset, DataVersioningConfig(repository=folder), workdir=tmp_path, reporter=Silent())
    assert (tmp_path / "documents" / "letter.txt").read_text() == "dear"


def test_a_remote_that_cannot_be_written_is_a_clear_error_and_publishes_nothing(tmp_path: Path, make_dataset) -> None:
    (tmp_path / "a-file").write_text("")
    config = DataVersioningConfig(remote="a-file")
    with pytest.raises(DataVersioningError, match="a-file"):
        publish(make_dataset("one", ROWS), config, workdir=tmp_path, reporter=Silent())
    assert versions(config, workdir=tmp_path) == []


def test_without_git_the_missing_engine_is_named(tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissingError, match="git"):
        publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())


def test_a_lock_that_a_dead_git_left_is_cleared(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    lock = tmp_path / "data-repository" / "refs" / "heads" / "main.lock"
    lock.touch()
    os.utime(lock, (0, 0))
    assert publish(make_dataset("two", MORE), CONFIG, workdir=tmp_path, reporter=Silent()).tag == "dataset-v2"


def test_a_living_lock_is_waited_for(tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(make_dataset("one", ROWS), CONFIG, workdir=tmp_path, reporter=Silent())
    lock = tmp_path / "data-repository" / "refs" / "heads" / "main.lock"
    lock.touch()
    refused: list[bool] = []
    push = repository.push

    def released_after_one_try(*arguments) -> None:
        try:
            push(*arguments)
            refused.append(False)
        except repository.Collision:
            refused.append(True)
            raise
        finally:
            lock.unlink(missing_ok=True)

    monkeypatch.setattr(repository, "push", released_after_one_try)
    assert publish(make_dataset("two", MORE), CONFIG, workdir=tmp_path, reporter=Silent()).tag == "dataset-v2"
    assert refused == [True, False]
