"""Artifact folders: publication, verification on read, overwrite rules and the store's build cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError, UsageError
from components.common.workspace import artifact_store
from tests.manifests import read_fields, reseal


def publish_dataset(
    folder: Path, *, key: str = "k", text: str = "rows", kind: str = "dataset", report: str = "seen"
) -> Artifact:
    assert artifact_folder.claim_folder(folder, key) is None
    (folder / "data").mkdir()
    (folder / "data" / "rows.txt").write_text(text)
    (folder / "report.html").write_text(report)
    source = ArtifactInput(kind="file", content_sha256="0" * 64, uri="raw.txt")
    return artifact_folder.publish(
        folder, kind, payload=["data/rows.txt"], inputs=[source], config={"a": 1}, seed=7, key=key, summary={"rows": 1}
    )


def test_published_artifact_reads_back_with_documented_manifest(tmp_path: Path) -> None:
    artifact = publish_dataset(tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["schema"] == "tuneline/dataset/v2"
    assert set(manifest) >= {
        "content_sha256",
        "inputs",
        "files",
        "config",
        "config_sha256",
        "seed",
        "produced_by",
        "summary",
    }
    assert {f["path"]: f["payload"] for f in manifest["files"]} == {"data/rows.txt": True, "report.html": False}
    digest = hashing.sha256_file(tmp_path / "a" / "data" / "rows.txt")
    assert manifest["content_sha256"] == hashing.digest([["data/rows.txt", digest]]) == artifact.sha256
    assert artifact_folder.read(tmp_path / "a", "dataset") == artifact


def test_identity_covers_payload_but_not_report(tmp_path: Path) -> None:
    first = publish_dataset(tmp_path / "1")
    other_report = publish_dataset(tmp_path / "2", report="other")
    other_payload = publish_dataset(tmp_path / "3", text="else")
    assert first.sha256 == other_report.sha256 != other_payload.sha256


@pytest.mark.parametrize("path", ["data/rows.txt", "report.html"])
def test_changed_byte_is_refused_with_file_name(tmp_path: Path, path: str) -> None:
    publish_dataset(tmp_path / "a")
    file = tmp_path / "a" / path
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(ArtifactDamagedError, match=path) as error:
        artifact_folder.read(tmp_path / "a")
    assert str(tmp_path / "a") in error.value.hint


def test_missing_file_corrupt_manifest_and_forged_digest_are_refused(tmp_path: Path) -> None:
    publish_dataset(tmp_path / "a")
    (tmp_path / "a" / "data" / "rows.txt").unlink()
    with pytest.raises(ArtifactDamagedError, match=r"rows\.txt of the dataset .* is missing"):
        artifact_folder.read(tmp_path / "a")
    publish_dataset(tmp_path / "b")
    manifest = tmp_path / "b" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"content_sha256": "', '"content_sha256": "f', 1))
    with pytest.raises(ArtifactDamagedError, match="has changed since it was published: manifest_sha256"):
        artifact_folder.read(tmp_path / "b")
    reseal(tmp_path / "b")
    with pytest.raises(ArtifactDamagedError, match="does not match its own content_sha256"):
        artifact_folder.read(tmp_path / "b")
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(ArtifactDamagedError, match="unreadable"):
        artifact_folder.read(tmp_path / "b")


def test_unfinished_folder_is_not_read_and_is_cleared(tmp_path: Path) -> None:
    assert artifact_folder.claim_folder(tmp_path / "a", "k") is None
    (tmp_path / "a" / "half").write_text("written")
    with pytest.raises(ArtifactDamagedError, match="unfinished"):
        artifact_folder.read(tmp_path / "a")
    artifact = publish_dataset(tmp_path / "a")
    assert not (artifact.path / "half").exists()


def test_same_key_returns_finished_artifact_and_other_key_needs_overwrite(tmp_path: Path) -> None:
    artifact = publish_dataset(tmp_path / "a", key="one")
    assert artifact_folder.claim_folder(tmp_path / "a", "one") == artifact
    with pytest.raises(OutputOccupiedError, match="another dataset") as error:
        artifact_folder.claim_folder(tmp_path / "a", "two")
    assert "--overwrite" in error.value.hint
    assert artifact_folder.claim_folder(tmp_path / "a", "two", overwrite=True) is None
    assert not (tmp_path / "a" / "report.html").exists()


def test_overwrite_replaces_corrupt_manifest(tmp_path: Path) -> None:
    publish_dataset(tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_text(manifest.read_text()[:60])
    with pytest.raises(ArtifactDamagedError, match="unreadable"):
        artifact_folder.claim_folder(tmp_path / "a", "k")
    assert artifact_folder.claim_folder(tmp_path / "a", "k", overwrite=True) is None
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.json").write_text("{ a web app's manifest")
    with pytest.raises(ArtifactDamagedError):
        artifact_folder.claim_folder(tmp_path / "b", "k", overwrite=True)


def test_foreign_files_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputOccupiedError, match="not written by tuneline"):
        artifact_folder.claim_folder(tmp_path, "k", overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_artifact_of_other_kind_is_refused(tmp_path: Path) -> None:
    publish_dataset(tmp_path / "a")
    with pytest.raises(UsageError, match="contains a dataset; expected a model"):
        artifact_folder.read(tmp_path / "a", "model")


def test_manifest_with_fields_of_later_version_is_read(tmp_path: Path) -> None:
    publish_dataset(tmp_path / "a")
    reseal(tmp_path / "a", added_later=[1])
    assert artifact_folder.read(tmp_path / "a").manifest.seed == 7


def test_store_builds_once_per_key_and_keeps_equal_content_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> Artifact:
        built.append(folder)
        return publish_dataset(folder, key=str(len(built)))

    first, first_cached = artifact_store.get_or_build(tmp_path, "curate", "key-one", build)
    repeated, repeated_cached = artifact_store.get_or_build(tmp_path, "curate", "key-one", build)
    other, _ = artifact_store.get_or_build(tmp_path, "curate", "key-two", build)
    assert (first_cached, repeated_cached, len(built)) == (False, True, 2)
    assert first.path == repeated.path == other.path == tmp_path / first.sha256
    assert not list((tmp_path / "unfinished").iterdir())


def test_equal_content_with_new_statements_replaces_stored_artifact(tmp_path: Path) -> None:
    old, _ = artifact_store.get_or_build(tmp_path, "package", "without-server", publish_dataset)

    def build_with_proof(folder: Path) -> Artifact:
        artifact = publish_dataset(folder, report="proven")
        summary = {"proof": "matched"}
        return artifact_folder.publish(
            artifact.path, "dataset", payload=["data/rows.txt"], inputs=[], config={}, seed=7, key="p", summary=summary
        )

    new, _ = artifact_store.get_or_build(tmp_path, "package", "with-server", build_with_proof)
    assert new.path == old.path
    assert artifact_store.load_artifact(tmp_path, old.sha256).manifest.summary == {"proof": "matched"}
    assert (new.path / "report.html").read_text() == "proven"
    assert not list((tmp_path / "unfinished").iterdir())


def test_damaged_stored_artifact_is_refused_and_removed_one_is_rebuilt(tmp_path: Path) -> None:
    artifact, _ = artifact_store.get_or_build(tmp_path, "curate", "key", publish_dataset)
    (artifact.path / "data" / "rows.txt").write_text("rowz")
    with pytest.raises(ArtifactDamagedError, match=r"rows\.txt"):
        artifact_store.get_or_build(tmp_path, "curate", "key", publish_dataset)
    for file in sorted(artifact.path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert artifact_store.get_or_build(tmp_path, "curate", "key", publish_dataset)[1] is False
    assert artifact_store.load_artifact(tmp_path, artifact.sha256).sha256 == artifact.sha256


def test_process_killed_between_two_writes_only_repeats_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    for target in (
        "components.common.artifacts.artifact_folder.write_atomically",
        "components.common.workspace.artifact_store.add_artifact",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, kill)
            with pytest.raises(Killed):
                artifact_store.get_or_build(tmp_path, "curate", "key", resume_or_publish)
    with monkeypatch.context() as patched:
        original_write = artifact_folder.write_atomically
        patched.setattr(
            artifact_folder,
            "write_atomically",
            lambda path, text: kill() if path.name == "key" else original_write(path, text),
        )
        with pytest.raises(Killed):
            artifact_store.get_or_build(tmp_path, "curate", "key", resume_or_publish)
    artifact, _ = artifact_store.get_or_build(tmp_path, "curate", "key", resume_or_publish)
    assert artifact_store.load_artifact(tmp_path, artifact.sha256).manifest.summary == {"rows": 1}


def resume_or_publish(folder: Path) -> Artifact:
    return artifact_folder.read(folder) if artifact_folder.claim_folder(folder, "k") else publish_dataset(folder)


def test_manifest_of_schema_version_1_is_read_without_its_digest(tmp_path: Path) -> None:
    publish_dataset(tmp_path / "a")
    fields = read_fields(tmp_path / "a") | {"schema": "tuneline/dataset/v1"}
    del fields["manifest_sha256"]
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(fields))
    assert artifact_folder.read(tmp_path / "a").manifest.schema_version == 1
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(fields | {"schema": "tuneline/dataset"}))
    with pytest.raises(ArtifactDamagedError, match=r"expected tuneline/<kind>/v<number>"):
        artifact_folder.read(tmp_path / "a")
