"""Publication, listing and fetching of dataset versions with real git and DVC."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import (
    ArtifactDamagedError,
    ConfigurationError,
    EngineMissingError,
    OutputOccupiedError,
    UsageError,
)
from components.common.runtime.reporters import SilentReporter
from components.data_versioning import git_repository
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.stage import fetch, list_versions, publish, show
from tests.lost_answers import lose_answers

pytestmark = pytest.mark.dvc
CONFIG = DataVersioningConfig()
FIRST_ROWS = {"train": ["a", "b", "c"], "validation": ["d"], "test": ["e"]}
SECOND_ROWS = {"train": ["a", "b", "x", "y"], "validation": ["d"], "test": ["e"]}


def list_remote_objects(workdir: Path) -> list[Path]:
    return sorted(p for p in (workdir / "dvc-remote").rglob("*") if p.is_file())


def flip_first_byte(path: Path) -> None:
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    path.chmod(0o444)  # DVC writes objects read-only


def test_same_content_is_published_once(tmp_path: Path, make_dataset) -> None:
    first = publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    second = publish(
        make_dataset("same", FIRST_ROWS, report="another report"), CONFIG, workdir=tmp_path, reporter=SilentReporter()
    )
    assert first.created
    assert not second.created
    assert second == first.model_copy(update={"created": False})
    assert first.tag == "dataset-v1"
    assert first.md5.endswith(".dir")
    assert first.uri == f"dvc://{tmp_path / 'data-repository'}@{first.rev}:datasets/dataset"
    assert not list((tmp_path / "state" / "data_versioning").iterdir())


def test_version_is_published_and_fetched_over_a_server_whose_answers_are_lost(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    with lose_answers(tmp_path, ["mkdir"]) as lost:  # DVC itself fails if an answer to its link or rename is lost
        version = publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
        fetched = fetch(version.tag, tmp_path / "fetched", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert lost == {"mkdir"}
    assert fetched.sha256 == dataset.sha256


def test_versions_are_fetched_by_tag_and_by_commit(tmp_path: Path, make_dataset) -> None:
    first_dataset, second_dataset = make_dataset("one", FIRST_ROWS), make_dataset("two", SECOND_ROWS)
    first = publish(first_dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    second = publish(second_dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert [v.tag for v in list_versions(CONFIG, workdir=tmp_path)] == ["dataset-v1", "dataset-v2"]
    by_tag = fetch("dataset-v1", tmp_path / "by-tag", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    by_commit = fetch(second.rev[:12], tmp_path / "by-commit", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert artifact_folder.read(by_tag.path, "dataset").sha256 == first_dataset.sha256 == first.content_sha256
    assert artifact_folder.read(by_commit.path, "dataset").sha256 == second_dataset.sha256
    assert (by_tag.path / "manifest.json").read_bytes() == (first_dataset.path / "manifest.json").read_bytes()
    (by_tag.path / "train.parquet").write_bytes(b"mine to change")


def test_git_clone_and_dvc_pull_give_the_dataset(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    pull = [sys.executable, "-m", "dvc", "pull", "-q"]
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    subprocess.run(pull, cwd=tmp_path / "clone", env=environment, check=True)
    assert artifact_folder.read(tmp_path / "clone" / "datasets" / "dataset", "dataset").sha256 == dataset.sha256


def test_show_returns_tag_and_summary_of_a_version(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    publish(make_dataset("two", SECOND_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    details = show("dataset-v2", CONFIG, workdir=tmp_path)
    assert details["summary"] == {"rows": 3}
    assert details["tag"] == "dataset-v2"


def test_unknown_revision_error_lists_the_existing_ones(tmp_path: Path, make_dataset) -> None:
    with pytest.raises(DataVersioningError, match="no published revision dataset-v1"):
        fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    with pytest.raises(DataVersioningError) as error:
        fetch("dataset-v7", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert "dataset-v1" in error.value.hint
    assert not (tmp_path / "out").exists()


def test_each_tampered_remote_object_is_refused_by_name(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    for path in list_remote_objects(tmp_path):
        content = path.read_bytes()
        if not content:
            continue
        flip_first_byte(path)
        with pytest.raises(ArtifactDamagedError) as error:
            fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())
        assert f"{path.parent.name}/{path.name}" in error.value.message
        assert not (tmp_path / "out").exists()
        path.chmod(0o644)
        path.write_bytes(content)
    fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())


def test_each_missing_remote_object_is_refused_by_name(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    for path in list_remote_objects(tmp_path):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ArtifactDamagedError, match=f"{path.parent.name}/{path.name}"):
            fetch("dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())
        path.write_bytes(content)


def test_republishing_repairs_lost_or_damaged_remote_objects(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    first = publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    paths = list_remote_objects(tmp_path)
    for damage in (lambda: paths[0].unlink(), lambda: [flip_first_byte(path) for path in paths if path.stat().st_size]):
        damage()
        second = publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
        assert (second.tag, second.rev, second.created) == (first.tag, first.rev, False)
        assert list_remote_objects(tmp_path) == paths
        fetched = fetch(
            "dataset-v1", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter(), overwrite=True
        )
        assert artifact_folder.read(fetched.path).sha256 == dataset.sha256


def test_irreparable_version_is_published_as_a_new_one(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS, report="the report"), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    report = next(path for path in list_remote_objects(tmp_path) if path.read_bytes() == b"the report")
    report.unlink()
    second = publish(
        make_dataset("same", FIRST_ROWS, report="another"), CONFIG, workdir=tmp_path, reporter=SilentReporter()
    )
    assert (second.tag, second.created) == ("dataset-v2", True)
    fetch("dataset-v2", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())


def test_new_version_does_not_reuse_damaged_objects(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    for path in list_remote_objects(tmp_path):
        if path.stat().st_size:
            flip_first_byte(path)
    publish(make_dataset("two", SECOND_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    fetched = fetch("dataset-v2", tmp_path / "out", CONFIG, workdir=tmp_path, reporter=SilentReporter())
    assert artifact_folder.read(fetched.path, "dataset").sha256 == fetched.sha256


def test_publishing_does_not_change_objects_that_another_job_has_just_written(
    tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dvc_objects.fs import generic

    transfer, kept = generic.transfer, tmp_path / "kept"
    kept.mkdir()

    def transfer_after_other_job(source_fs, sources: list[str], target_fs, targets: list[str], **options) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target.startswith(str(tmp_path / "dvc-remote")):
                shutil.copyfile(source, target)
                os.link(target, kept / Path(target).name)
        transfer(source_fs, sources, target_fs, targets, **options)

    monkeypatch.setattr(generic, "transfer", transfer_after_other_job)
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    objects = list_remote_objects(tmp_path)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {p.name: p.read_bytes() for p in objects}


def test_fetch_keeps_equal_output_and_does_not_overwrite_another(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    publish(make_dataset("two", SECOND_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    out = tmp_path / "out"
    first = fetch("dataset-v1", out, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    modified_ns = (out / "manifest.json").stat().st_mtime_ns
    assert fetch("dataset-v1", out, CONFIG, workdir=tmp_path, reporter=SilentReporter()).sha256 == first.sha256
    assert (out / "manifest.json").stat().st_mtime_ns == modified_ns
    with pytest.raises(OutputOccupiedError):
        fetch("dataset-v2", out, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    second = fetch("dataset-v2", out, CONFIG, workdir=tmp_path, reporter=SilentReporter(), overwrite=True)
    assert artifact_folder.read(out).sha256 == second.sha256 != first.sha256


def test_repository_holds_two_datasets(tmp_path: Path, make_dataset) -> None:
    other = DataVersioningConfig(name="other")
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    version = publish(make_dataset("two", SECOND_ROWS), other, workdir=tmp_path, reporter=SilentReporter())
    assert version.tag == "other-v1"
    assert [v.tag for v in list_versions(CONFIG, workdir=tmp_path)] == ["dataset-v1"]


@pytest.mark.parametrize("tag", ["dataset-v9", "tickets-v1", "my-own_tickets-v12"])
def test_tag_in_version_format_is_refused(tmp_path: Path, make_dataset, tag: str) -> None:
    with pytest.raises(UsageError) as error:
        publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter(), tag=tag)
    assert error.value.message == f"--tag {tag}: tags that end in -v1, -v2, … are reserved for versions"
    assert error.value.hint == f"Choose another name, for instance {tag.replace('-v', '-')}."
    assert list_versions(CONFIG, workdir=tmp_path) == []


def test_foreign_tags_in_version_format_are_ignored(tmp_path: Path, make_dataset) -> None:
    tickets = DataVersioningConfig(name="tickets")
    dataset_version = publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    blob = git_repository.run_git(
        tmp_path / "data-repository", "rev-parse", f"{dataset_version.rev}:datasets/dataset.dvc"
    ).strip()
    for tag, target in (("tickets-v1", dataset_version.rev), ("tickets-v2", blob)):
        git_repository.run_git(tmp_path / "data-repository", "tag", tag, target)
    assert list_versions(tickets, workdir=tmp_path) == []
    assert (
        publish(make_dataset("two", SECOND_ROWS), tickets, workdir=tmp_path, reporter=SilentReporter()).tag
        == "tickets-v3"
    )
    assert [v.tag for v in list_versions(tickets, workdir=tmp_path)] == ["tickets-v3"]
    assert [v.tag for v in list_versions(CONFIG, workdir=tmp_path)] == ["dataset-v1"]


def test_version_with_an_annotated_tag_is_listed(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    version = publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter())
    identity = ("-c", "user.name=Auditor", "-c", "user.email=auditor@example.com")
    git_repository.run_git(
        tmp_path / "data-repository", *identity, "tag", "-a", "-f", "-m", "signed off", version.tag, version.tag
    )
    git_repository.run_git(
        tmp_path / "data-repository", *identity, "tag", "-a", "-m", "released", "release", version.tag
    )
    assert [(v.tag, v.rev) for v in list_versions(CONFIG, workdir=tmp_path)] == [(version.tag, version.rev)]
    assert show("release", CONFIG, workdir=tmp_path)["tag"] == version.tag
    assert publish(dataset, CONFIG, workdir=tmp_path, reporter=SilentReporter()).tag == version.tag


def test_version_with_a_damaged_commit_is_reported(tmp_path: Path, make_dataset) -> None:
    version = publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    tree = git_repository.run_git(tmp_path / "data-repository", "rev-parse", f"{version.rev}:datasets").strip()
    (tmp_path / "data-repository" / "objects" / tree[:2] / tree[2:]).unlink()
    with pytest.raises(DataVersioningError, match=r"failed in .*data-repository") as error:
        list_versions(CONFIG, workdir=tmp_path)
    assert error.value.hint == "Check that the folder is a git repository with read and write access."


def test_data_repository_must_be_bare_or_a_new_folder(tmp_path: Path, make_dataset) -> None:
    dataset = make_dataset("one", FIRST_ROWS)
    subprocess.run(["git", "init", "-q", str(tmp_path / "working-copy")], check=True)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter.txt").write_text("dear")
    for folder in ("working-copy", "documents"):
        with pytest.raises(ConfigurationError, match=r"data_versioning\.repository"):
            publish(dataset, DataVersioningConfig(repository=folder), workdir=tmp_path, reporter=SilentReporter())
    assert (tmp_path / "documents" / "letter.txt").read_text() == "dear"


def test_unwritable_remote_is_reported_and_nothing_is_published(tmp_path: Path, make_dataset) -> None:
    (tmp_path / "a-file").write_text("")
    config = DataVersioningConfig(remote="a-file")
    with pytest.raises(DataVersioningError, match="a-file"):
        publish(make_dataset("one", FIRST_ROWS), config, workdir=tmp_path, reporter=SilentReporter())
    assert list_versions(config, workdir=tmp_path) == []


def test_missing_git_is_reported(tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissingError, match="git"):
        publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())


def test_stale_git_lock_is_removed(tmp_path: Path, make_dataset) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    lock = tmp_path / "data-repository" / "refs" / "heads" / "main.lock"
    lock.touch()
    os.utime(lock, (0, 0))
    assert (
        publish(make_dataset("two", SECOND_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter()).tag
        == "dataset-v2"
    )


def test_publish_waits_for_a_held_lock(tmp_path: Path, make_dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(make_dataset("one", FIRST_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter())
    lock = tmp_path / "data-repository" / "refs" / "heads" / "main.lock"
    lock.touch()
    collisions: list[bool] = []
    push = git_repository.push

    def push_and_release_lock(*arguments) -> None:
        try:
            push(*arguments)
            collisions.append(False)
        except git_repository.CollisionError:
            collisions.append(True)
            raise
        finally:
            lock.unlink(missing_ok=True)

    monkeypatch.setattr(git_repository, "push", push_and_release_lock)
    assert (
        publish(make_dataset("two", SECOND_ROWS), CONFIG, workdir=tmp_path, reporter=SilentReporter()).tag
        == "dataset-v2"
    )
    assert collisions == [True, False]
