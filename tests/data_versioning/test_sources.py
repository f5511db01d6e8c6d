"""Sources in stock DVC repositories."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.artifacts.code_digest import ROOT
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.data_versioning import dvc_sources
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.stage import fetch_source

pytestmark = pytest.mark.dvc
FETCH_SCRIPT = """
import sys
from pathlib import Path
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.stage import fetch_source
print(fetch_source(sys.argv[1], Path(sys.argv[2]), SilentReporter()))
"""


def run_command(folder: Path, *command: str) -> None:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    settings = {
        "DVC_SITE_CACHE_DIR": str(folder.parent / "site"),
        "DVC_NO_ANALYTICS": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    completed = subprocess.run(
        command, cwd=folder, env={**os.environ, **identity, **settings}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


def run_dvc(folder: Path, *arguments: str) -> None:
    run_command(folder, sys.executable, "-m", "dvc", *arguments, "-q")


@pytest.fixture(scope="module")
def dvc_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a stock DVC repository with a file, a folder and a git-tracked file; its remote has a relative path and no verify."""
    folder = tmp_path_factory.mktemp("dvc")
    corpus = folder / "corpus"
    (corpus / "raw" / "letters").mkdir(parents=True)
    (corpus / "raw" / "one.jsonl").write_text('{"text": "first"}\n')
    (corpus / "raw" / "letters" / "a.txt").write_text("a letter\n" * 30)
    (corpus / "raw" / "letters" / "b.txt").write_text("another\n" * 30)
    (corpus / "LICENSE").write_text("free\n")
    run_command(corpus, "git", "init", "-q", "-b", "main")
    run_dvc(corpus, "init")
    run_dvc(corpus, "remote", "add", "-d", "beside", "../remote")
    run_dvc(corpus, "add", "raw/one.jsonl", "raw/letters")
    run_command(corpus, "git", "add", "--all")
    run_command(corpus, "git", "commit", "-q", "-m", "one")
    run_command(corpus, "git", "tag", "v1")
    run_dvc(corpus, "push")
    (corpus / "raw" / "one.jsonl").write_text('{"text": "second"}\n')
    run_dvc(corpus, "add", "raw/one.jsonl")
    run_command(corpus, "git", "commit", "-q", "-a", "-m", "two")
    run_dvc(corpus, "push")
    shutil.rmtree(corpus / ".dvc" / "cache")
    return folder


@pytest.fixture
def corpus(dvc_repository: Path, tmp_path: Path) -> Path:
    """Copy the repository for one test."""
    return Path(shutil.copytree(dvc_repository, tmp_path / "copy", symlinks=True)) / "corpus"


def fetch_path(corpus: Path | str, rev: str, path: str, folder: Path) -> Path:
    return fetch_source(f"dvc://{corpus}@{rev}:{path}", folder, SilentReporter())


def test_file_is_fetched_at_any_revision(corpus: Path, tmp_path: Path) -> None:
    old = fetch_path(corpus, "v1", "raw/one.jsonl", tmp_path / "old")
    assert (old.name, old.read_text()) == ("one.jsonl", '{"text": "first"}\n')
    assert old.is_relative_to(tmp_path / "old")
    assert fetch_path(corpus, "main", "raw/one.jsonl", tmp_path / "new").read_text() == '{"text": "second"}\n'
    assert [path.name for path in old.parent.glob("[!.]*")] == ["one.jsonl"]
    assert [path for path in (tmp_path / "old").iterdir() if not old.is_relative_to(path)] == []


def test_any_branch_is_a_revision(corpus: Path, tmp_path: Path) -> None:
    run_command(corpus, "git", "branch", "feature/old", "v1")
    assert fetch_path(corpus, "feature/old", "raw/one.jsonl", tmp_path / "out").read_text() == '{"text": "first"}\n'
    run_command(corpus, "git", "branch", "v1", "main")
    assert fetch_path(corpus, "v1", "raw/one.jsonl", tmp_path / "out").read_text() == '{"text": "first"}\n'
    with pytest.raises(DataVersioningError, match="has no revision feature/new") as error:
        fetch_path(corpus, "feature/new", "raw/one.jsonl", tmp_path / "out")
    branches = error.value.hint.partition("a branch (")[2].partition(")")[0]
    assert sorted(branches.split(", ")) == ["feature/old", "main", "v1"]


def test_folder_and_a_file_in_it_are_fetched(corpus: Path, tmp_path: Path) -> None:
    letters = fetch_path(corpus, "v1", "raw/letters", tmp_path)
    assert sorted(path.name for path in letters.iterdir()) == ["a.txt", "b.txt"]
    assert fetch_path(f"file://{corpus}", "v1", "raw/letters/a.txt", tmp_path).read_text() == "a letter\n" * 30


def test_folder_is_fetched_with_its_dvc_tracked_content(corpus: Path, tmp_path: Path) -> None:
    raw = fetch_path(corpus, "v1", "raw", tmp_path)
    assert sorted(path.name for path in raw.rglob("*") if path.name != ".gitignore") == [
        "a.txt",
        "b.txt",
        "letters",
        "one.jsonl",
    ]


def test_git_tracked_file_comes_from_git(corpus: Path, tmp_path: Path) -> None:
    assert fetch_path(corpus, "v1", "LICENSE", tmp_path).read_text() == "free\n"


def test_fetched_copy_is_unchanged_when_the_branch_moves(corpus: Path, tmp_path: Path) -> None:
    run_command(corpus, "git", "branch", "moving", "v1")
    before = fetch_path(corpus, "moving", "raw/one.jsonl", tmp_path)
    run_command(corpus, "git", "branch", "--force", "moving", "main")
    after = fetch_path(corpus, "moving", "raw/one.jsonl", tmp_path)
    assert (before.read_text(), after.read_text()) == ('{"text": "first"}\n', '{"text": "second"}\n')
    assert (before.name, after.name) == ("one.jsonl", "one.jsonl")


def test_local_path_is_stable_while_the_content_is_equal(corpus: Path, tmp_path: Path) -> None:
    before = fetch_path(corpus, "main", "raw/one.jsonl", tmp_path)
    (corpus / "LICENSE").write_text("freer\n")
    run_command(corpus, "git", "commit", "-q", "-a", "-m", "three")
    assert fetch_path(corpus, "main", "raw/one.jsonl", tmp_path) == before


def test_folder_includes_dvc_pipeline_outputs(corpus: Path, tmp_path: Path) -> None:
    (corpus / "data").mkdir()
    (corpus / "data" / "seed.jsonl").write_text('{"text": "seed"}\n')
    stage = (
        "stages: {make: {cmd: cp data/seed.jsonl data/made.jsonl, deps: [data/seed.jsonl], outs: [data/made.jsonl]}}\n"
    )
    (corpus / "dvc.yaml").write_text(stage)
    run_dvc(corpus, "repro")
    run_command(corpus, "git", "add", "--all")
    run_command(corpus, "git", "commit", "-q", "-m", "a pipeline")
    run_dvc(corpus, "push")
    folder = fetch_path(corpus, "main", "data", tmp_path)
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["made.jsonl", "seed.jsonl"]
    assert (folder / "made.jsonl").read_text() == '{"text": "seed"}\n'


def test_uncached_output_comes_from_git_and_missing_output_is_skipped(corpus: Path, tmp_path: Path) -> None:
    (corpus / "data").mkdir()
    (corpus / "data" / "seed.jsonl").write_text('{"text": "seed"}\n')
    run_stage = "count: {cmd: wc -l data/seed.jsonl > data/metrics.json, deps: [data/seed.jsonl], metrics: [data/metrics.json: {cache: false}]}"
    skipped_stage = "never: {cmd: cp data/seed.jsonl data/never.jsonl, outs: [data/never.jsonl]}"
    (corpus / "dvc.yaml").write_text(f"stages:\n  {run_stage}\n  {skipped_stage}\n")
    run_dvc(corpus, "repro", "count")
    (corpus / "data" / "metrics.json").write_text("edited since\n")
    run_command(corpus, "git", "add", "--all")
    run_command(corpus, "git", "commit", "-q", "-m", "a pipeline")
    (corpus.parent / "remote").rename(corpus.parent / "away")
    folder = fetch_path(corpus, "main", "data", tmp_path)
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["metrics.json", "seed.jsonl"]
    assert fetch_path(corpus, "main", "data/metrics.json", tmp_path).read_text() == "edited since\n"
    with pytest.raises(
        DataVersioningError, match=r"DVC tracks data/never\.jsonl in .*, but main records no content for the path"
    ):
        fetch_path(corpus, "main", "data/never.jsonl", tmp_path)


def test_broken_dvc_yaml_blocks_folders_but_not_git_files(corpus: Path, tmp_path: Path) -> None:
    (corpus / "notes").mkdir()
    (corpus / "notes" / "a.txt").write_text("a note\n")
    (corpus / "dvc.yaml").write_text("stages: [broken\n")
    run_command(corpus, "git", "add", "--all")
    run_command(corpus, "git", "commit", "-q", "-m", "broken")
    assert fetch_path(corpus, "main", "notes/a.txt", tmp_path).read_text() == "a note\n"
    with pytest.raises(DataVersioningError, match=r"DVC cannot read .* at main"):
        fetch_path(corpus, "main", "notes", tmp_path)


def test_links_are_followed_only_within_the_repository(corpus: Path, tmp_path: Path) -> None:
    (corpus / "notes").mkdir()
    (corpus / "notes" / "latest.txt").symlink_to("../LICENSE")
    run_command(corpus, "git", "add", "--all")
    run_command(corpus, "git", "commit", "-q", "-m", "a link")
    assert fetch_path(corpus, "main", "notes/latest.txt", tmp_path).read_text() == "free\n"
    notes = fetch_path(corpus, "main", "notes", tmp_path)
    assert (notes / "latest.txt").read_text() == "free\n"
    assert not (notes / "latest.txt").is_symlink()
    for target in ("latest.txt", "/etc/hostname", "nowhere", "../../../secret", "../.git/config", "../raw"):
        (corpus / "notes" / "latest.txt").unlink()
        (corpus / "notes" / "latest.txt").symlink_to(target)
        run_command(corpus, "git", "commit", "-q", "-a", "-m", "a bad link")
        for path in ("notes", "notes/latest.txt"):
            with pytest.raises(ConfigurationError, match=r"notes/latest\.txt in the repository is a link"):
                fetch_path(corpus, "main", path, tmp_path)


def test_sources_are_fetched_without_file_locks(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    monkeypatch.setattr(fcntl, "lockf", raise_no_locks)
    assert fetch_path(corpus, "v1", "raw/one.jsonl", tmp_path).exists()


def test_outdated_copy_is_deleted_after_a_week_without_use(corpus: Path, tmp_path: Path) -> None:
    run_command(corpus, "git", "branch", "moving", "v1")
    before = fetch_path(corpus, "moving", "raw/one.jsonl", tmp_path / "out")
    os.utime(before.parent, (0, 0))
    assert fetch_path(corpus, "moving", "raw/one.jsonl", tmp_path / "out") == before
    run_command(corpus, "git", "branch", "--force", "moving", "main")
    fetch_path(corpus, "moving", "raw/one.jsonl", tmp_path / "out")
    assert before.exists()
    os.utime(before.parent, (0, 0))
    after = fetch_path(corpus, "moving", "raw/one.jsonl", tmp_path / "out")
    assert [path.parent.name for path in (tmp_path / "out").rglob("one.jsonl")] == [after.parent.name]


def test_concurrent_fetches_all_get_the_complete_folder(corpus: Path, tmp_path: Path) -> None:
    uri = f"dvc://{corpus}@v1:raw/letters"
    command = [sys.executable, "-c", FETCH_SCRIPT, uri, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], outputs
    [path] = {Path(output.strip()) for output, _ in outputs}
    assert [(file.name, file.read_text()) for file in sorted(path.iterdir())] == [
        ("a.txt", "a letter\n" * 30),
        ("b.txt", "another\n" * 30),
    ]
    assert [file.name for file in (tmp_path / "out").iterdir()] == [path.parent.parent.name]


def test_later_fetch_reuses_the_copy_of_a_concurrent_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_original, copies = dvc_sources._fetch_path, list[tuple[Path, int]]()

    def fetch_after_another(address: dvc_sources.DvcUri, clone: Path) -> Path:
        with monkeypatch.context() as context:
            context.setattr(dvc_sources, "_fetch_path", fetch_original)
            path = fetch_path(corpus, "v1", "raw/one.jsonl", tmp_path)
        copies.append((path, path.stat().st_ino))
        return fetch_original(address, clone)

    monkeypatch.setattr(dvc_sources, "_fetch_path", fetch_after_another)
    later = fetch_path(corpus, "v1", "raw/one.jsonl", tmp_path)
    assert copies == [(later, later.stat().st_ino)]


def test_same_commit_is_fetched_again_only_after_a_local_change(corpus: Path, tmp_path: Path) -> None:
    first = fetch_source(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", SilentReporter())
    inode = first.stat().st_ino
    (corpus.parent / "remote").rename(corpus.parent / "away")
    assert fetch_source(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", SilentReporter()).stat().st_ino == inode
    first.write_text("changed\n")
    with pytest.raises(TunelineError):
        fetch_source(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", SilentReporter())
    (corpus.parent / "away").rename(corpus.parent / "remote")
    assert (
        fetch_source(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", SilentReporter()).read_text()
        == '{"text": "first"}\n'
    )
    assert (
        fetch_source(f"dvc://{corpus}@main:raw/one.jsonl", tmp_path / "out", SilentReporter()).read_text()
        == '{"text": "second"}\n'
    )


def test_tampered_or_missing_objects_are_refused_without_verify(corpus: Path, tmp_path: Path) -> None:
    objects = [path for path in (corpus.parent / "remote").rglob("*") if path.is_file()]
    assert len(objects) == 5
    unrelated = [path for path in objects if b"second" in path.read_bytes()]
    for path in objects:
        original = path.read_bytes()
        path.chmod(0o644)
        for content in (bytes([original[0] ^ 1]) + original[1:], None):
            path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
            if path in unrelated:
                fetch_path(corpus, "v1", "raw", tmp_path / "whole")
                continue
            with pytest.raises(
                ArtifactDamagedError, match=r"objects of raw at v1 are missing .* or damaged: "
            ) as error:
                fetch_path(corpus, "v1", "raw", tmp_path / "out")
            assert "Restore the objects in the remote" in error.value.hint
            assert list((tmp_path / "out").iterdir()) == []
        path.write_bytes(original)
    fetch_path(corpus, "v1", "raw", tmp_path / "out")


def test_repository_locked_by_dvc_can_be_read(corpus: Path, tmp_path: Path) -> None:
    from dvc.repo import Repo

    with Repo(str(corpus)).lock:
        assert fetch_path(corpus, "v1", "raw/one.jsonl", tmp_path).exists()


@pytest.mark.parametrize(
    ("uri", "message", "hint"),
    [
        ("dvc://corpus:raw", "is not a DVC source", "Write dvc://REPOSITORY@REVISION:PATH"),
        ("dvc://{corpus}@v1:../../etc/passwd", "expected a revision without", "Write dvc://"),
        ("dvc:///nowhere/at/all@v1:raw", "/nowhere/at/all of a dvc:// source does not exist", "Write dvc://"),
        ("dvc://https://me:secret@host/x.git@v1:raw", "the address of host contains a password", "~/.netrc"),
        ("dvc://{corpus}@v9:raw", "has no revision v9", "Choose a tag (v1), a branch (main) or a commit."),
        (
            "dvc://{corpus}@v1:raw/two.jsonl",
            "raw/two.jsonl is not in",
            "the paths that DVC tracks: raw/letters, raw/one.jsonl",
        ),
        ("dvc://{corpus}@v1:raw/letters/c.txt", "raw/letters/c.txt", ""),
    ],
)
def test_invalid_source_address_is_reported(corpus: Path, tmp_path: Path, uri: str, message: str, hint: str) -> None:
    with pytest.raises((ConfigurationError, DataVersioningError, ArtifactDamagedError)) as error:
        fetch_source(uri.format(corpus=corpus), tmp_path / "out", SilentReporter())
    assert message in error.value.message
    assert hint in error.value.hint
    assert "secret" not in error.value.message
    assert not list((tmp_path / "out").glob("*"))
