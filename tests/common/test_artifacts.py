"""Artifacts are finished or not there, and never read unchecked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.common import artifacts, hashing, places
from components.common.artifacts import Artifact, Input
from components.common.errors import ArtifactDamagedError, OutputOccupiedError, UsageError


def make(folder: Path, *, key: str = "k", text: str = "rows", kind: str = "dataset", report: str = "seen") -> Artifact:
    assert artifacts.begin(folder, key) is None
    (folder / "data").mkdir()
    (folder / "data" / "rows.txt").write_text(text)
    (folder / "report.html").write_text(report)
    source = Input(kind="file", content_sha256="0" * 64, uri="raw.txt")
    return artifacts.publish(
        folder, kind, payload=["data/rows.txt"], inputs=[source], config={"a": 1}, seed=7, key=key, summary={"rows": 1}
    )


def test_a_published_artifact_reads_back_with_the_manifest_the_design_names(tmp_path: Path) -> None:
    made = make(tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["schema"] == "tuneline/dataset/v1"
    assert set(manifest) >= {"content_sha256", "inputs", "files", "config", "config_sha256", "seed", "produced_by", "summary"}
    assert {f["path"]: f["payload"] for f in manifest["files"]} == {"data/rows.txt": True, "report.html": False}
    digest = hashing.sha256_file(tmp_path / "a" / "data" / "rows.txt")
    assert manifest["content_sha256"] == hashing.digest([["data/rows.txt", digest]]) == made.sha256
    assert artifacts.read(tmp_path / "a", "dataset") == made


def test_identity_covers_the_payload_and_not_the_report(tmp_path: Path) -> None:
    one, two, other = make(tmp_path / "1"), make(tmp_path / "2", report="other"), make(tmp_path / "3", text="else")
    assert one.sha256 == two.sha256 != other.sha256


@pytest.mark.parametrize("path", ["data/rows.txt", "report.html"])
def test_a_changed_byte_is_refused_by_name(tmp_path: Path, path: str) -> None:
    make(tmp_path / "a")
    file = tmp_path / "a" / path
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(ArtifactDamagedError, match=path) as error:
        artifacts.read(tmp_path / "a")
    assert str(tmp_path / "a") in error.value.hint


def test_a_missing_file_a_torn_manifest_and_a_forged_digest_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "data" / "rows.txt").unlink()
    with pytest.raises(ArtifactDamagedError, match=r"rows\.txt of the dataset .* is missing"):
        artifacts.read(tmp_path / "a")
    make(tmp_path / "b")
    manifest = tmp_path / "b" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"content_sha256": "', '"content_sha256": "f', 1))
    with pytest.raises(ArtifactDamagedError, match="content_sha256"):
        artifacts.read(tmp_path / "b")
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(ArtifactDamagedError, match="unreadable"):
        artifacts.read(tmp_path / "b")


def test_an_unfinished_folder_is_never_read_and_is_started_over(tmp_path: Path) -> None:
    assert artifacts.begin(tmp_path / "a", "k") is None
    (tmp_path / "a" / "half").write_text("written")
    with pytest.raises(ArtifactDamagedError, match="never finished"):
        artifacts.read(tmp_path / "a")
    made = make(tmp_path / "a")
    assert not (made.path / "half").exists()


def test_the_same_key_returns_what_is_finished_and_another_needs_overwrite(tmp_path: Path) -> None:
    made = make(tmp_path / "a", key="one")
    assert artifacts.begin(tmp_path / "a", "one") == made
    with pytest.raises(OutputOccupiedError, match="another dataset") as error:
        artifacts.begin(tmp_path / "a", "two")
    assert "--overwrite" in error.value.hint
    assert artifacts.begin(tmp_path / "a", "two", overwrite=True) is None
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_torn_manifest_is_replaced_when_overwrite_says_so(tmp_path: Path) -> None:
    make(tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_text(manifest.read_text()[:60])
    with pytest.raises(ArtifactDamagedError, match="unreadable"):
        artifacts.begin(tmp_path / "a", "k")
    assert artifacts.begin(tmp_path / "a", "k", overwrite=True) is None
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.json").write_text("{ a web app's manifest")
    with pytest.raises(ArtifactDamagedError):
        artifacts.begin(tmp_path / "b", "k", overwrite=True)


def test_files_that_tuneline_did_not_write_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputOccupiedError, match="not written by tuneline"):
        artifacts.begin(tmp_path, "k", overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_artifact_of_another_kind_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(UsageError, match="holds a dataset, not a model"):
        artifacts.read(tmp_path / "a", "model")


def test_a_manifest_with_fields_of_a_later_version_is_read(tmp_path: Path) -> None:
    make(tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_later": [1]}))
    assert artifacts.read(tmp_path / "a").manifest.seed == 7


def test_the_store_builds_once_a_key_and_keeps_equal_content_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> Artifact:
        built.append(folder)
        return make(folder, key=str(len(built)))

    one, there = places.produce(tmp_path, "curate", "key-one", build)
    again, there_again = places.produce(tmp_path, "curate", "key-one", build)
    other, _ = places.produce(tmp_path, "curate", "key-two", build)
    assert (there, there_again, len(built)) == (False, True, 2)
    assert one.path == again.path == other.path == tmp_path / one.sha256
    assert not list((tmp_path / "unfinished").iterdir())


def test_equal_content_that_says_something_new_takes_the_place_of_the_old(tmp_path: Path) -> None:
    old, _ = places.produce(tmp_path, "package", "without-server", make)

    def prove(folder: Path) -> Artifact:
        made = make(folder, report="proven")
        summary = {"proof": "matched"}
        return artifacts.publish(made.path, "dataset", payload=["data/rows.txt"], inputs=[], config={}, seed=7, key="p", summary=summary)

    new, _ = places.produce(tmp_path, "package", "with-server", prove)
    assert new.path == old.path
    assert places.stored(tmp_path, old.sha256).manifest.summary == {"proof": "matched"}
    assert (new.path / "report.html").read_text() == "proven"
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_stored_artifact_that_was_damaged_is_refused_and_one_that_was_removed_is_built_again(tmp_path: Path) -> None:
    made, _ = places.produce(tmp_path, "curate", "key", make)
    (made.path / "data" / "rows.txt").write_text("rowz")
    with pytest.raises(ArtifactDamagedError, match=r"rows\.txt"):
        places.produce(tmp_path, "curate", "key", make)
    for file in sorted(made.path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert places.produce(tmp_path, "curate", "key", make)[1] is False
    assert places.stored(tmp_path, made.sha256).sha256 == made.sha256


def test_a_process_killed_between_any_two_writes_only_repeats_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    for moment in ("components.common.artifacts.write_atomically", "components.common.places.adopt"):
        with monkeypatch.context() as patched:
            patched.setattr(moment, kill)
            with pytest.raises(Killed):
                places.produce(tmp_path, "curate", "key", make_again)
    with monkeypatch.context() as patched:
        real = artifacts.write_atomically
        patched.setattr(artifacts, "write_atomically", lambda path, text: kill() if path.name == "key" else real(path, text))
        with pytest.raises(Killed):
            places.produce(tmp_path, "curate", "key", make_again)
    made, _ = places.produce(tmp_path, "curate", "key", make_again)
    assert places.stored(tmp_path, made.sha256).manifest.summary == {"rows": 1}


def make_again(folder: Path) -> Artifact:
    return artifacts.read(folder) if artifacts.begin(folder, "k") else make(folder)
