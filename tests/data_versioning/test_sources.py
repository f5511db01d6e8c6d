"""Sources in other people's DVC repositories."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.errors import ArtifactDamagedError, ConfigurationError, TunelineError
from components.common.hashing import ROOT
from components.common.progress import Silent
from components.data_versioning import sources
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.stage import obtain

pytestmark = pytest.mark.dvc
OBTAIN = """
import sys
from pathlib import Path
from components.common.progress import Silent
from components.data_versioning.stage import obtain
print(obtain(sys.argv[1], Path(sys.argv[2]), Silent()))
"""


def run(folder: Path, *command: str) -> None:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    settings = {"DVC_SITE_CACHE_DIR": str(folder.parent / "site"), "DVC_NO_ANALYTICS": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **names, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def dvc(folder: Path, *arguments: str) -> None:
    run(folder, sys.executable, "-m", "dvc", *arguments, "-q")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock DVC repository: its remote is named by a relative path and not told to verify; a file, a folder, and a file of git's."""
    place = tmp_path_factory.mktemp("dvc")
    corpus = place / "corpus"
    (corpus / "raw" / "letters").mkdir(parents=True)
    (corpus / "raw" / "one.jsonl").write_text('{"text": "first"}\n')
    (corpus / "raw" / "letters" / "a.txt").write_text("a letter\n" * 30)
    (corpus / "raw" / "letters" / "b.txt").write_text("another\n" * 30)
    (corpus / "LICENSE").write_text("free\n")
    run(corpus, "git", "init", "-q", "-b", "main")
    dvc(corpus, "init")
    dvc(corpus, "remote", "add", "-d", "beside", "../remote")
    dvc(corpus, "add", "raw/one.jsonl", "raw/letters")
    run(corpus, "git", "add", "--all")
    run(corpus, "git", "commit", "-q", "-m", "one")
    run(corpus, "git", "tag", "v1")
    dvc(corpus, "push")
    (corpus / "raw" / "one.jsonl").write_text('{"text": "second"}\n')
    dvc(corpus, "add", "raw/one.jsonl")
    run(corpus, "git", "commit", "-q", "-a", "-m", "two")
    dvc(corpus, "push")
    shutil.rmtree(corpus / ".dvc" / "cache")
    return place


@pytest.fixture
def corpus(made: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(made, tmp_path / "copy", symlinks=True)) / "corpus"


def got(corpus: Path | str, rev: str, path: str, folder: Path) -> Path:
    return obtain(f"dvc://{corpus}@{rev}:{path}", folder, Silent())


def test_a_file_of_any_revision_is_fetched(corpus: Path, tmp_path: Path) -> None:
    old = got(corpus, "v1", "raw/one.jsonl", tmp_path / "old")
    assert (old.name, old.read_text()) == ("one.jsonl", '{"text": "first"}\n')
    assert old.is_relative_to(tmp_path / "old")
    assert got(corpus, "main", "raw/one.jsonl", tmp_path / "new").read_text() == '{"text": "second"}\n'
    assert [p.name for p in old.parent.glob("[!.]*")] == ["one.jsonl"]
    assert [p for p in (tmp_path / "old").iterdir() if not old.is_relative_to(p)] == []


def test_a_branch_that_is_not_the_default_one_is_a_revision_too(corpus: Path, tmp_path: Path) -> None:
    run(corpus, "git", "branch", "feature/old", "v1")
    assert got(corpus, "feature/old", "raw/one.jsonl", tmp_path / "out").read_text() == '{"text": "first"}\n'
    run(corpus, "git", "branch", "v1", "main")
    assert got(corpus, "v1", "raw/one.jsonl", tmp_path / "out").read_text() == '{"text": "first"}\n'
    with pytest.raises(DataVersioningError, match="has no revision feature/new") as refused:
        got(corpus, "feature/new", "raw/one.jsonl", tmp_path / "out")
    branches = refused.value.hint.partition("Its branches are: ")[2].partition(".")[0]
    assert sorted(branches.split(", ")) == ["feature/old", "main", "v1"]


def test_a_folder_and_a_file_in_it_are_fetched(corpus: Path, tmp_path: Path) -> None:
    letters = got(corpus, "v1", "raw/letters", tmp_path)
    assert sorted(p.name for p in letters.iterdir()) == ["a.txt", "b.txt"]
    assert got(f"file://{corpus}", "v1", "raw/letters/a.txt", tmp_path).read_text() == "a letter\n" * 30


def test_a_folder_that_holds_tracked_things_is_fetched_with_them(corpus: Path, tmp_path: Path) -> None:
    raw = got(corpus, "v1", "raw", tmp_path)
    assert sorted(p.name for p in raw.rglob("*") if p.name != ".gitignore") == ["a.txt", "b.txt", "letters", "one.jsonl"]


def test_what_git_itself_holds_is_taken_from_git(corpus: Path, tmp_path: Path) -> None:
    assert got(corpus, "v1", "LICENSE", tmp_path).read_text() == "free\n"


def test_what_a_job_was_given_stays_as_it_is_when_the_revision_moves_on(corpus: Path, tmp_path: Path) -> None:
    run(corpus, "git", "branch", "moving", "v1")
    before = got(corpus, "moving", "raw/one.jsonl", tmp_path)
    run(corpus, "git", "branch", "--force", "moving", "main")
    after = got(corpus, "moving", "raw/one.jsonl", tmp_path)
    assert (before.read_text(), after.read_text()) == ('{"text": "first"}\n', '{"text": "second"}\n')
    assert (before.name, after.name) == ("one.jsonl", "one.jsonl")


def test_what_a_branch_names_is_called_the_same_until_its_content_is_another(corpus: Path, tmp_path: Path) -> None:
    before = got(corpus, "main", "raw/one.jsonl", tmp_path)
    (corpus / "LICENSE").write_text("freer\n")
    run(corpus, "git", "commit", "-q", "-a", "-m", "three")
    assert got(corpus, "main", "raw/one.jsonl", tmp_path) == before


def test_what_a_pipeline_of_the_repository_makes_is_part_of_its_folder(corpus: Path, tmp_path: Path) -> None:
    (corpus / "data").mkdir()
    (corpus / "data" / "seed.jsonl").write_text('{"text": "seed"}\n')
    stage = "stages: {make: {cmd: cp data/seed.jsonl data/made.jsonl, deps: [data/seed.jsonl], outs: [data/made.jsonl]}}\n"
    (corpus / "dvc.yaml").write_text(stage)
    dvc(corpus, "repro")
    run(corpus, "git", "add", "--all")
    run(corpus, "git", "commit", "-q", "-m", "a pipeline")
    dvc(corpus, "push")
    folder = got(corpus, "main", "data", tmp_path)
    assert sorted(p.name for p in folder.glob("[!.]*")) == ["made.jsonl", "seed.jsonl"]
    assert (folder / "made.jsonl").read_text() == '{"text": "seed"}\n'


def test_what_a_stage_makes_and_git_holds_is_gits_own_and_what_was_never_made_is_left_out_of_its_folder(
    corpus: Path, tmp_path: Path
) -> None:
    (corpus / "data").mkdir()
    (corpus / "data" / "seed.jsonl").write_text('{"text": "seed"}\n')
    count = "count: {cmd: wc -l data/seed.jsonl > data/metrics.json, deps: [data/seed.jsonl], metrics: [data/metrics.json: {cache: false}]}"
    never = "never: {cmd: cp data/seed.jsonl data/never.jsonl, outs: [data/never.jsonl]}"
    (corpus / "dvc.yaml").write_text(f"stages:\n  {count}\n  {never}\n")
    dvc(corpus, "repro", "count")
    (corpus / "data" / "metrics.json").write_text("edited since\n")
    run(corpus, "git", "add", "--all")
    run(corpus, "git", "commit", "-q", "-m", "a pipeline")
    (corpus.parent / "remote").rename(corpus.parent / "away")
    folder = got(corpus, "main", "data", tmp_path)
    assert sorted(p.name for p in folder.glob("[!.]*")) == ["metrics.json", "seed.jsonl"]
    assert got(corpus, "main", "data/metrics.json", tmp_path).read_text() == "edited since\n"
    with pytest.raises(DataVersioningError, match=r"data/never\.jsonl is what a stage of .* makes, and it was never made"):
        got(corpus, "main", "data/never.jsonl", tmp_path)


def test_a_file_of_gits_is_had_where_dvc_cannot_read_its_own_and_a_folder_is_refused_for_that(corpus: Path, tmp_path: Path) -> None:
    (corpus / "notes").mkdir()
    (corpus / "notes" / "a.txt").write_text("a note\n")
    (corpus / "dvc.yaml").write_text("stages: [broken\n")
    run(corpus, "git", "add", "--all")
    run(corpus, "git", "commit", "-q", "-m", "broken")
    assert got(corpus, "main", "notes/a.txt", tmp_path).read_text() == "a note\n"
    with pytest.raises(DataVersioningError, match=r"DVC cannot read .* at main"):
        got(corpus, "main", "notes", tmp_path)


def test_a_link_in_the_repository_gives_its_file_and_one_out_of_it_is_refused(corpus: Path, tmp_path: Path) -> None:
    (corpus / "notes").mkdir()
    (corpus / "notes" / "latest.txt").symlink_to("../LICENSE")
    run(corpus, "git", "add", "--all")
    run(corpus, "git", "commit", "-q", "-m", "a link")
    assert got(corpus, "main", "notes/latest.txt", tmp_path).read_text() == "free\n"
    notes = got(corpus, "main", "notes", tmp_path)
    assert (notes / "latest.txt").read_text() == "free\n"
    assert not (notes / "latest.txt").is_symlink()
    for leads in ("latest.txt", "/etc/hostname", "nowhere", "../../../secret", "../.git/config", "../raw"):
        (corpus / "notes" / "latest.txt").unlink()
        (corpus / "notes" / "latest.txt").symlink_to(leads)
        run(corpus, "git", "commit", "-q", "-a", "-m", "a bad link")
        for path in ("notes", "notes/latest.txt"):
            with pytest.raises(ConfigurationError, match=r"notes/latest\.txt in the repository is a link"):
                got(corpus, "main", path, tmp_path)


def test_sources_are_fetched_where_files_cannot_be_locked(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert got(corpus, "v1", "raw/one.jsonl", tmp_path).exists()


def test_a_copy_of_another_content_goes_when_no_job_has_asked_for_it_in_a_week(corpus: Path, tmp_path: Path) -> None:
    run(corpus, "git", "branch", "moving", "v1")
    before = got(corpus, "moving", "raw/one.jsonl", tmp_path / "out")
    os.utime(before.parent, (0, 0))
    assert got(corpus, "moving", "raw/one.jsonl", tmp_path / "out") == before
    run(corpus, "git", "branch", "--force", "moving", "main")
    got(corpus, "moving", "raw/one.jsonl", tmp_path / "out")
    assert before.exists()
    os.utime(before.parent, (0, 0))
    after = got(corpus, "moving", "raw/one.jsonl", tmp_path / "out")
    assert [path.parent.name for path in (tmp_path / "out").rglob("one.jsonl")] == [after.parent.name]


def test_jobs_that_fetch_the_same_at_once_all_get_it_whole(corpus: Path, tmp_path: Path) -> None:
    uri = f"dvc://{corpus}@v1:raw/letters"
    command = [sys.executable, "-c", OBTAIN, uri, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    told = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], told
    [path] = {Path(said.strip()) for said, _ in told}
    assert [(p.name, p.read_text()) for p in sorted(path.iterdir())] == [("a.txt", "a letter\n" * 30), ("b.txt", "another\n" * 30)]
    assert [p.name for p in (tmp_path / "out").iterdir()] == [path.parent.parent.name]


def test_a_job_that_comes_second_takes_the_copy_of_the_first(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = sources._fetched, list[tuple[Path, int]]()

    def overtaken(address: sources.Address, clone: Path) -> Path:
        with monkeypatch.context() as other:
            other.setattr(sources, "_fetched", real)
            path = got(corpus, "v1", "raw/one.jsonl", tmp_path)
        first.append((path, path.stat().st_ino))
        return real(address, clone)

    monkeypatch.setattr(sources, "_fetched", overtaken)
    second = got(corpus, "v1", "raw/one.jsonl", tmp_path)
    assert first == [(second, second.stat().st_ino)]


def test_what_was_fetched_of_the_same_commit_is_not_fetched_again_unless_it_was_changed(corpus: Path, tmp_path: Path) -> None:
    first = obtain(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", Silent())
    inode = first.stat().st_ino
    (corpus.parent / "remote").rename(corpus.parent / "away")
    assert obtain(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", Silent()).stat().st_ino == inode
    first.write_text("changed\n")
    with pytest.raises(TunelineError):
        obtain(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", Silent())
    (corpus.parent / "away").rename(corpus.parent / "remote")
    assert obtain(f"dvc://{corpus}@v1:raw/one.jsonl", tmp_path / "out", Silent()).read_text() == '{"text": "first"}\n'
    assert obtain(f"dvc://{corpus}@main:raw/one.jsonl", tmp_path / "out", Silent()).read_text() == '{"text": "second"}\n'


def test_every_tampered_or_lost_object_is_refused_though_the_repository_does_not_verify(corpus: Path, tmp_path: Path) -> None:
    stored = [p for p in (corpus.parent / "remote").rglob("*") if p.is_file()]
    assert len(stored) == 5
    of_another = [p for p in stored if b"second" in p.read_bytes()]
    for damaged in stored:
        whole = damaged.read_bytes()
        damaged.chmod(0o644)
        for content in (bytes([whole[0] ^ 1]) + whole[1:], None):
            damaged.unlink(missing_ok=True) if content is None else damaged.write_bytes(content)
            if damaged in of_another:
                got(corpus, "v1", "raw", tmp_path / "whole")
                continue
            with pytest.raises(ArtifactDamagedError, match="lacks objects of raw at v1, or holds them damaged") as refused:
                got(corpus, "v1", "raw", tmp_path / "out")
            assert "Restore them there" in refused.value.hint
            assert list((tmp_path / "out").iterdir()) == []
        damaged.write_bytes(whole)
    got(corpus, "v1", "raw", tmp_path / "out")


def test_a_repository_that_another_dvc_has_locked_can_be_read(corpus: Path, tmp_path: Path) -> None:
    from dvc.repo import Repo

    with Repo(str(corpus)).lock:
        assert got(corpus, "v1", "raw/one.jsonl", tmp_path).exists()


@pytest.mark.parametrize(
    ("uri", "message", "hint"),
    [
        ("dvc://corpus:raw", "is no DVC source", "Write dvc://REPOSITORY@REVISION:PATH"),
        ("dvc://{corpus}@v1:../../etc/passwd", "the revision or the path cannot be meant", "Write dvc://"),
        ("dvc:///nowhere/at/all@v1:raw", "/nowhere/at/all of a dvc:// source does not exist", "Write dvc://"),
        ("dvc://https://me:secret@host/x.git@v1:raw", "the address of host holds a password", "~/.netrc"),
        ("dvc://{corpus}@v9:raw", "has no revision v9", "Its tags are: v1. Its branches are: main."),
        ("dvc://{corpus}@v1:raw/two.jsonl", "raw/two.jsonl is not in", "DVC tracks there: raw/letters, raw/one.jsonl"),
        ("dvc://{corpus}@v1:raw/letters/c.txt", "raw/letters/c.txt", ""),
    ],
)
def test_what_names_nothing_is_told(corpus: Path, tmp_path: Path, uri: str, message: str, hint: str) -> None:
    with pytest.raises((ConfigurationError, DataVersioningError, ArtifactDamagedError)) as refused:
        obtain(uri.format(corpus=corpus), tmp_path / "out", Silent())
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert "secret" not in refused.value.message
    assert not list((tmp_path / "out").glob("*"))
