"""The artifact store in a bucket of a real S3 server: uploads, downloads, removal, interruptions and errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder, hashing, object_storage
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, EngineMissingError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store, s3_store
from components.common.workspace.artifact_store import Workdir
from components.data_versioning.config import DataVersioningConfig
from components.model_registry import (
    checkpoints,
    model_versions,
    promotion_checks,
    signature_checks,
    signing_keys,
    trust_root,
)
from pipelines.operations.garbage_collection import deletion, inventory
from pipelines.operations.garbage_collection.retention_plan import build_plan
from tests.engines.s3_server import S3
from tests.pipelines.command import ROOT, answer
from tests.pipelines.project import write_project
from tests.tiny import tiny_model

pytestmark = pytest.mark.s3
CACHED_STAGES = {"data_curation", "fine_tuning", "evaluation", "triton_packaging"}


@pytest.fixture
def address(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a new store in a bucket, used by this process and its children, with a separate cache."""
    s3_server.use(monkeypatch)
    bucket = f"store-{hashing.digest(str(tmp_path))[:12]}"
    s3_server.client().create_bucket(Bucket=bucket)
    monkeypatch.setenv("TUNELINE_STORE", f"s3://{bucket}/team-a/tuneline")
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "cache"))
    return os.environ["TUNELINE_STORE"]


def switch_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "elsewhere") -> Path:
    """Simulate another machine with an empty cache; return its store folder."""
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / name))
    return Workdir.from_environment().store


def list_objects(client: Any, address: str) -> dict[str, int]:
    """Return the objects below an address with their sizes in bytes."""
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    entries = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {entry["Key"].removeprefix(f"{prefix}/"): entry["Size"] for entry in entries}


def replace_object(client: Any, address: str, name: str, change: Callable[[bytes], bytes]) -> None:
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    content = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
    client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=change(content))


def build(folder: Path, *, report: str = "<p>", rows: str = "a row\n") -> Artifact:
    folder.mkdir(parents=True)
    (folder / "train.parquet").write_text(rows)
    (folder / "report.html").write_text(report)
    return artifact_folder.publish(
        folder,
        "dataset",
        payload=["train.parquet"],
        inputs=[],
        config={},
        seed=1,
        key="key",
        summary={"report": report},
    )


def test_artifact_is_written_once_and_read_from_another_machine(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Workdir.from_environment().store
    artifact, cached = artifact_store.get_or_build(store, "data_curation", "key", build)
    assert not cached
    report = hashing.sha256_file(artifact.path / "report.html")
    artifact_names = {"train.parquet", f"_beside/{report}/report.html", "manifest.json"}
    notes = {"keys/data_curation/key", f"used/{artifact.sha256}"}
    assert set(list_objects(s3_server.client(), address)) == {
        *(f"{artifact.sha256}/{name}" for name in artifact_names),
        *notes,
    }
    other_store = switch_machine(tmp_path, monkeypatch)
    assert not artifact_store.has_local_copy(other_store, artifact.sha256)
    loaded, cached = artifact_store.get_or_build(
        other_store, "data_curation", "key", lambda _: pytest.fail("the artifact exists already")
    )
    assert (loaded.sha256, cached, loaded.path) == (artifact.sha256, True, other_store / artifact.sha256)
    assert (loaded.path / "report.html").read_text() == "<p>"
    assert (artifact_store.get_artifact_uri(loaded), artifact_store.list_artifacts(other_store)) == (
        f"{address}/{artifact.sha256}",
        [artifact.sha256],
    )
    assert artifact_store.resolve_artifact_uri(artifact_store.get_artifact_uri(loaded)) == loaded.path


def test_signature_and_checkpoint_in_a_bucket_are_read_from_another_machine(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public, _ = signing_keys.generate_key_pair(tmp_path / "keys")
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(private))
    artifact = artifact_store.add_artifact(Workdir.from_environment().store, build(tmp_path / "built"))
    signature_checks.sign_version([artifact], artifact_store.get_artifact_uri(artifact), SilentReporter())
    checkpoints.write("helper", 1, "seal", "")
    other_store = switch_machine(tmp_path, monkeypatch)
    loaded = artifact_store.load_artifact(other_store, artifact.sha256)
    trust = trust_root.load_trust([public])
    signature_checks.require_signature(loaded, trust)
    checkpoint = checkpoints.read("helper")
    assert checkpoint is not None
    assert checkpoint.head == "seal"
    assert artifact_store.list_artifacts(other_store) == [artifact.sha256]
    [name] = [name for name in list_objects(s3_server.client(), address) if name.startswith("signatures/")]
    replace_object(s3_server.client(), address, name, lambda content: content.replace(b'"sig":"ME', b'"sig":"MF'))
    with pytest.raises(trust_root.SignatureInvalidError, match="forged or damaged"):
        signature_checks.require_signature(loaded, trust)


def test_large_file_moves_in_parallel_parts_and_reports_progress(address: str, tmp_path: Path) -> None:
    path, progress = tmp_path / "large", list[int]()
    path.write_bytes(os.urandom(1 << 20) * 100 + b"an odd end")
    object_storage.upload_file(path, f"{address}/large", progress.append)
    assert len(progress) >= 3
    assert sum(progress) == path.stat().st_size
    progress.clear()
    object_storage.download_file(f"{address}/large", tmp_path / "back", path.stat().st_size, progress.append)
    assert len(progress) == 4
    assert hashing.sha256_file(tmp_path / "back") == hashing.sha256_file(path)


KILLED_UPLOAD_SCRIPT = """
import os, signal, sys
from pathlib import Path
from components.common.artifacts import object_storage
from components.common.workspace import artifact_store
from tests.engines.test_s3_store import build
upload_file, write_object, moment = object_storage.upload_file, object_storage.write_object, sys.argv[1]
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def upload_one_file(path, uri, progress):
    upload_file(path, uri, progress)
    kill()
def write_all_but_manifest(uri, text):
    kill() if uri.endswith("manifest.json") else write_object(uri, text)
if moment == "between two files":
    object_storage.upload_file = upload_one_file
elif moment == "before the manifest":
    object_storage.write_object = write_all_but_manifest
else:
    artifact_store.write_note = kill
artifact_store.get_or_build(artifact_store.Workdir.from_environment().store, "data_curation", "key", build)
"""


@pytest.mark.parametrize("moment", ["between two files", "before the manifest", "before the key"])
def test_next_run_completes_a_killed_upload(s3_server: S3, address: str, moment: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLED_UPLOAD_SCRIPT, moment],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=120,
    )
    assert child.returncode == -9
    store = Workdir.from_environment().store
    finished = [name for name in list_objects(s3_server.client(), address) if name.endswith("manifest.json")]
    assert len(finished) == len(artifact_store.list_artifacts(store)) == (1 if moment == "before the key" else 0)
    assert artifact_store.find_by_key(store, "data_curation", "key") is None
    artifact, cached = artifact_store.get_or_build(store, "data_curation", "key", build)
    assert not cached
    assert artifact_store.find_by_key(store, "data_curation", "key") == artifact.sha256
    assert artifact_store.load_artifact(store, artifact.sha256).sha256 == artifact.sha256


def test_concurrent_writers_of_the_same_content_do_not_conflict(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads upload equal payloads with different reports."""
    from components.common.workspace import s3_store

    artifacts = [build(tmp_path / f"job{n}", report=f"<p>{n}") for n in range(2)]
    assert artifacts[0].sha256 == artifacts[1].sha256
    threads = [
        threading.Thread(target=s3_store.upload_artifact, args=(address, artifact, SilentReporter()))
        for artifact in artifacts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = artifact_store.load_artifact(switch_machine(tmp_path, monkeypatch), artifacts[0].sha256)
    assert (loaded.path / "report.html").read_text() == loaded.manifest.summary["report"]


@pytest.mark.parametrize("name", ["train.parquet", "manifest.json"])
def test_damaged_object_is_rejected_by_name(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    artifact, _ = artifact_store.get_or_build(Workdir.from_environment().store, "data_curation", "key", build)
    replace_object(s3_server.client(), address, f"{artifact.sha256}/{name}", lambda data: data.replace(b"a", b"b"))
    with pytest.raises(ArtifactDamagedError) as error:
        artifact_store.load_artifact(switch_machine(tmp_path, monkeypatch), artifact.sha256)
    assert error.value.message.startswith(f"{address}/{artifact.sha256}/{name} ")
    assert f"delete all objects below {address}/{artifact.sha256}/" in error.value.hint


def test_missing_object_is_rejected_and_damaged_copy_is_refetched(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Workdir.from_environment().store
    artifact, _ = artifact_store.get_or_build(store, "data_curation", "key", build)
    (artifact.path / "train.parquet").write_text("b row\n")
    assert artifact_store.load_artifact(store, artifact.sha256).sha256 == artifact.sha256
    assert (artifact.path / "train.parquet").read_text() == "a row\n"
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    s3_server.client().delete_object(Bucket=bucket, Key=f"{prefix}/{artifact.sha256}/train.parquet")
    with pytest.raises(ArtifactDamagedError, match=r"train\.parquet is missing"):
        artifact_store.load_artifact(switch_machine(tmp_path, monkeypatch), artifact.sha256)


def test_artifact_removed_from_bucket_is_rebuilt_despite_local_copy(s3_server: S3, address: str) -> None:
    store, client = Workdir.from_environment().store, s3_server.client()
    artifact, _ = artifact_store.get_or_build(store, "data_curation", "key", build)
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    for name in list_objects(client, f"{address}/{artifact.sha256}"):
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{artifact.sha256}/{name}")
    assert not artifact_store.has_artifact(store, artifact.sha256)
    with pytest.raises(ArtifactDamagedError, match=f"{artifact.sha256} is not in the artifact store {address}"):
        artifact_store.load_artifact(store, artifact.sha256)
    assert artifact_store.get_or_build(store, "data_curation", "key", build)[1] is False
    assert artifact_store.has_artifact(store, artifact.sha256)


def test_unusable_bucket_errors_name_the_cause(s3_server: S3, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_lookup_error() -> EngineMissingError:
        with pytest.raises(EngineMissingError) as error:
            artifact_store.find_by_key(Workdir.from_environment().store, "data_curation", "key")
        assert s3_server.secret_key not in error.value.message + error.value.hint
        return error.value

    monkeypatch.setenv("TUNELINE_STORE", "s3://nobody-made-this/tuneline")
    assert f"is in a bucket that does not exist at {s3_server.endpoint}" in get_lookup_error().message
    monkeypatch.setenv("TUNELINE_STORE", address)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    error = get_lookup_error()
    assert "is not permitted with these credentials" in error.message
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in error.hint
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "cannot be reached at http://127.0.0.1:9: " in get_lookup_error().message
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "requires credentials" in get_lookup_error().message


@pytest.mark.parametrize(
    "address", ["s3://", "s3:///prefix", "gs://bucket/x", "s3://key:secret@bucket/x", "s3://bucket/a b"]
)
def test_invalid_store_address_is_rejected(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("TUNELINE_STORE", address)
    with pytest.raises(ConfigurationError, match="TUNELINE_STORE is ") as error:
        _ = Workdir.from_environment().store
    assert "secret" not in error.value.message


def test_artifact_replaced_during_upload_keeps_report_and_manifest_paired(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, replacement = build(tmp_path / "mine"), build(tmp_path / "other", report="<q>")
    list_sizes = object_storage.list_sizes

    def list_sizes_after_replacement(folder: str) -> dict[str, int]:
        """Replace the artifact right after its manifest was read."""
        if replacement.path.exists():
            shutil.rmtree(artifact.path)
            replacement.path.rename(artifact.path)
        return list_sizes(folder)

    monkeypatch.setattr(object_storage, "list_sizes", list_sizes_after_replacement)
    s3_store.upload_artifact(address, artifact, SilentReporter())
    manifest = s3_store.read_manifest_bytes(address, artifact.sha256)
    assert manifest == (artifact.path / artifact_folder.MANIFEST_FILENAME).read_bytes()
    fetched = s3_store.fetch_artifact(
        address, artifact.sha256, manifest or b"", tmp_path / "fetched", tmp_path / "none", SilentReporter()
    )
    assert (fetched.path / "report.html").read_text() == "<q>"
    assert artifact_folder.read(fetched.path).sha256 == artifact.sha256


def test_artifact_with_changed_report_is_not_uploaded(address: str, tmp_path: Path) -> None:
    artifact = build(tmp_path / "made")
    (artifact.path / "report.html").write_text("<x>")
    with pytest.raises(ArtifactDamagedError, match=r"differ from manifest\.json"):
        s3_store.upload_artifact(address, artifact, SilentReporter())
    assert s3_store.read_manifest_bytes(address, artifact.sha256) is None


def test_base_model_imported_into_bucket_is_read_on_another_machine(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder = tiny_model(tmp_path / "tiny")
    env = {name: os.environ[name] for name in ("TUNELINE_STORE", "TUNELINE_CACHE")}
    result = answer("models", "import", model_folder, "--accept-license", cwd=tmp_path, **env)
    store = switch_machine(tmp_path, monkeypatch)
    assert model_loading.find_local_base_model(result["base_model"]) is None, "it would have to be fetched"
    assert model_loading.load_outline(result["base_model"]).config.model_type == "llama"
    base = model_loading.resolve_base_model(result["base_model"])
    assert (base.sha256, base.path) == (
        model_loading.resolve_base_model(str(model_folder)).sha256,
        store / result["sha256"],
    )


def run_pipeline(project: Path, workdir: str, **extra: str) -> dict[str, Any]:
    return answer("run", "-c", "customization.yaml", "--workdir", workdir, cwd=project, **extra)


def get_digests(result: dict[str, Any]) -> dict[str, str]:
    return {kind: Path(path).name for kind, path in result["artifacts"].items()}


def list_cached_stages(result: dict[str, Any]) -> set[str]:
    return {stage["name"] for stage in result["stages"] if stage["cached"]}


@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.triton
@pytest.mark.timeout(1800)  # complete runs, next to tests of other engines
@pytest.mark.stress
def test_bucket_and_folder_runs_have_equal_digests(
    address: str, first_digests: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run whose store is a folder is the first run of the session."""
    (tmp_path / "project").mkdir()
    project = write_project(tmp_path / "project")
    first_machine, second_machine = (
        {"TUNELINE_STORE": address, "TUNELINE_CACHE": str(tmp_path / name)} for name in ("one", "other")
    )
    first_run = run_pipeline(project, "bucket", **first_machine)
    assert get_digests(first_run) == first_digests
    assert (first_run["verdict"], list_cached_stages(first_run)) == ("accepted", set())
    assert not (project / "bucket" / "store").exists()
    moved_run = run_pipeline(project, "moved", **second_machine)
    assert get_digests(moved_run) == get_digests(first_run)
    assert list_cached_stages(moved_run) == CACHED_STAGES - {"fine_tuning"}, (
        "a training's key includes the data revision, which belongs to the workdir"
    )
    check_lineage_and_package_from_other_machines(project, address, get_digests(first_run), monkeypatch)


def check_lineage_and_package_from_other_machines(
    project: Path, address: str, digests: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"TUNELINE_STORE": address, "TUNELINE_CACHE": str(project.parent / "third")}
    chain = answer(
        "lineage", "tiny-helper@champion", "-c", "customization.yaml", "--workdir", "bucket", cwd=project, **env
    )["chain"]
    links = {link["kind"]: link for link in chain}
    for kind in ("repository", "evaluation", "model", "dataset"):
        assert (links[kind]["uri"], links[kind]["status"]) == (f"{address}/{digests[kind]}", "intact"), kind
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / 'bucket' / 'mlflow.db'}")
    monkeypatch.delenv("TUNELINE_STORE")
    monkeypatch.setenv("TUNELINE_CACHE", str(project.parent / "fourth"))
    with model_versions.registry_client() as client:
        version = client.get_model_version_by_alias("tiny-helper", "champion")
    with promotion_checks.open_artifact(version, "repository", digests["repository"]) as package:
        assert package.sha256 == digests["repository"]


def test_unused_artifact_is_removed_from_the_bucket(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Workdir.from_environment().store
    artifact, _ = artifact_store.get_or_build(store, "data_curation", "key", build)
    assert not artifact_store.remove_artifact(store, artifact.sha256, 3600)
    [(sha256, (size, idle_seconds))] = (artifact_store.measure_bucket_idle_times(store) or {}).items()
    assert (sha256, size) == (
        artifact.sha256,
        sum(size for name, size in list_objects(s3_server.client(), address).items() if sha256 in name),
    )
    assert 0 <= idle_seconds < 3600
    assert artifact_store.remove_artifact(store, artifact.sha256, 0)
    assert set(list_objects(s3_server.client(), address)) == {"keys/data_curation/key"}
    assert (artifact_store.list_artifacts(store), artifact_store.find_by_key(store, "data_curation", "key")) == (
        [],
        None,
    )
    rebuilt, cached = artifact_store.get_or_build(switch_machine(tmp_path, monkeypatch), "data_curation", "key", build)
    assert (rebuilt.sha256, cached) == (artifact.sha256, False)


KILLED_REMOVAL_SCRIPT = """
import os, signal, sys
from components.common.artifacts import object_storage
from components.common.workspace import artifact_store
delete_object = object_storage.delete_object
def delete_one_object(uri):
    delete_object(uri)
    os.kill(os.getpid(), signal.SIGKILL)
object_storage.delete_object = delete_one_object
artifact_store.remove_artifact(artifact_store.Workdir.from_environment().store, sys.argv[1], 0)
"""


def test_killed_removal_is_completed_or_rebuilt(s3_server: S3, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Workdir.from_environment().store
    artifact, _ = artifact_store.get_or_build(store, "data_curation", "key", build)
    child = subprocess.run(
        [sys.executable, "-c", KILLED_REMOVAL_SCRIPT, artifact.sha256],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=120,
    )
    assert child.returncode == -9
    remaining = set(list_objects(s3_server.client(), address))
    assert f"{artifact.sha256}/train.parquet" in remaining
    assert f"{artifact.sha256}/manifest.json" not in remaining
    monkeypatch.setattr(s3_store, "REMOVAL_LEASE_SECONDS", 0.5)  # the lease of the killed process expires
    rebuilt, cached = artifact_store.get_or_build(store, "data_curation", "key", build)
    assert (rebuilt.sha256, cached) == (artifact.sha256, False)
    assert artifact_store.load_artifact(store, artifact.sha256).sha256 == artifact.sha256
    monkeypatch.setattr(s3_store, "REMOVAL_LEASE_SECONDS", 600.0)
    subprocess.run(
        [sys.executable, "-c", KILLED_REMOVAL_SCRIPT, artifact.sha256],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=120,
    )
    assert artifact_store.remove_artifact(store, artifact.sha256, 0)
    assert not any(name.startswith(artifact.sha256) for name in list_objects(s3_server.client(), address))


def test_reader_waits_for_a_removal_in_progress(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Workdir.from_environment().store
    artifact, _ = artifact_store.get_or_build(store, "data_curation", "key", build)
    delete, started = object_storage.delete_object, threading.Event()

    def delete_slowly(uri: str) -> None:
        started.set()
        time.sleep(0.5)
        delete(uri)

    monkeypatch.setattr(object_storage, "delete_object", delete_slowly)
    remover = threading.Thread(target=artifact_store.remove_artifact, args=(store, artifact.sha256, 0))
    remover.start()
    assert started.wait(60)
    with pytest.raises(ArtifactDamagedError, match="is not in the artifact store"):
        artifact_store.load_artifact(store, artifact.sha256)
    assert not any(name.endswith(artifact.sha256) for name in object_storage.list_sizes(f"{address}/removing"))
    remover.join()
    assert artifact_store.list_artifacts(store) == []


def test_garbage_collection_on_bucket_keeps_pinned_artifacts(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = Workdir.from_environment()
    workdir.root.mkdir(parents=True)
    pinned, _ = artifact_store.get_or_build(workdir.store, "data_curation", "kept", build)
    unreferenced, _ = artifact_store.get_or_build(
        workdir.store, "data_curation", "gone", lambda folder: build(folder, rows="another row\n")
    )
    inventory.pin(workdir, pinned.sha256, "the audit")
    request = inventory.CollectionRequest(
        workdir, DataVersioningConfig(), SilentReporter(), 0.0, no_registry=True, no_repository=True
    )
    contents = inventory.take_inventory(request)
    plan = build_plan(contents.items, contents.roots, request.policy)
    assert {item.item.path for item in plan.to_delete if item.item.kind == "artifact"} == {
        f"{address}/{unreferenced.sha256}"
    }
    assert not any(outcome.kept_because for outcome in deletion.delete_unreferenced(plan, contents, request))
    assert artifact_store.list_artifacts(workdir.store) == [pinned.sha256]
    assert artifact_store.list_notes(workdir.store, inventory.PINS_FOLDER) == [pinned.sha256]
    inventory.unpin(workdir, pinned.sha256)
    assert artifact_store.list_notes(workdir.store, inventory.PINS_FOLDER) == []
