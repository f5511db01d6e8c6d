"""The artifact store in a bucket of a real S3 server: written once, read from anywhere, whole or not at all."""

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

from components.common import artifacts, bucket_store, buckets, hashing, models, places
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, ConfigurationError, EngineMissingError
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.model_registry import checks, versions
from pipelines.housekeeping import found, removal
from pipelines.housekeeping.plan import plan
from tests.engines.s3_server import S3
from tests.pipelines.command import ROOT, answer
from tests.pipelines.project import write_project
from tests.tiny import tiny_model

pytestmark = pytest.mark.s3
MADE_BY_STAGES = {"data_curation", "fine_tuning", "evaluation", "triton_packaging"}


@pytest.fixture
def address(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A new bucket with a prefix as the store of this process and those it starts, and a place of the test's own for copies."""
    s3_server.use(monkeypatch)
    bucket = f"store-{hashing.digest(str(tmp_path))[:12]}"
    s3_server.client().create_bucket(Bucket=bucket)
    monkeypatch.setenv("TUNELINE_STORE", f"s3://{bucket}/team-a/tuneline")
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "cache"))
    return os.environ["TUNELINE_STORE"]


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "elsewhere") -> Path:
    """Go to another machine, which has none of the copies. Returns the store's folder there."""
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / name))
    return Workdir.from_environment().store


def objects(client: Any, address: str) -> dict[str, int]:
    """What lies below an address, with its bytes."""
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {one["Key"].removeprefix(f"{prefix}/"): one["Size"] for one in found}


def replace(client: Any, address: str, name: str, change: Callable[[bytes], bytes]) -> None:
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    before = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
    client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=change(before))


def build(folder: Path, *, report: str = "<p>", rows: str = "a row\n") -> Artifact:
    folder.mkdir(parents=True)
    (folder / "train.parquet").write_text(rows)
    (folder / "report.html").write_text(report)
    return artifacts.publish(
        folder, "dataset", payload=["train.parquet"], inputs=[], config={}, seed=1, key="key", summary={"report": report}
    )


def test_an_artifact_is_written_once_and_read_from_another_machine(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Workdir.from_environment().store
    made, cached = places.produce(here, "data_curation", "key", build)
    assert not cached
    report = hashing.sha256_file(made.path / "report.html")
    said = {"train.parquet", f"_beside/{report}/report.html", "manifest.json"}
    noted = {"keys/data_curation/key", f"used/{made.sha256}"}
    assert set(objects(s3_server.client(), address)) == {*(f"{made.sha256}/{name}" for name in said), *noted}
    there = elsewhere(tmp_path, monkeypatch)
    assert not places.is_here(there, made.sha256)
    found, cached = places.produce(there, "data_curation", "key", lambda _: pytest.fail("it is made already"))
    assert (found.sha256, cached, found.path) == (made.sha256, True, there / made.sha256)
    assert (found.path / "report.html").read_text() == "<p>"
    assert (places.uri(found), places.listed(there)) == (f"{address}/{made.sha256}", [made.sha256])
    assert places.folder_of(places.uri(found)) == found.path


def test_large_files_go_in_parts_side_by_side_and_tell_how_far_they_are(address: str, tmp_path: Path) -> None:
    path, moved = tmp_path / "large", list[int]()
    path.write_bytes(os.urandom(1 << 20) * 100 + b"an odd end")
    buckets.put(path, f"{address}/large", moved.append)
    assert len(moved) >= 3
    assert sum(moved) == path.stat().st_size
    moved.clear()
    buckets.get(f"{address}/large", tmp_path / "back", path.stat().st_size, moved.append)
    assert len(moved) == 4
    assert hashing.sha256_file(tmp_path / "back") == hashing.sha256_file(path)


KILLED = """
import os, signal, sys
from pathlib import Path
from components.common import buckets, places
from tests.engines.test_s3_store import build
put, write, moment = buckets.put, buckets.write, sys.argv[1]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def one(path, uri, moved):
    put(path, uri, moved)
    die()
def but_the_manifest(uri, text):
    die() if uri.endswith("manifest.json") else write(uri, text)
if moment == "between two files":
    buckets.put = one
elif moment == "before the manifest":
    buckets.write = but_the_manifest
else:
    places.write_note = die
places.produce(places.Workdir.from_environment().store, "data_curation", "key", build)
"""


@pytest.mark.parametrize("moment", ["between two files", "before the manifest", "before the key"])
def test_an_upload_that_is_killed_leaves_nothing_that_looks_finished_and_the_next_run_completes_it(
    s3_server: S3, address: str, moment: str
) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED, moment], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=120)
    assert child.returncode == -9
    store = Workdir.from_environment().store
    finished = [name for name in objects(s3_server.client(), address) if name.endswith("manifest.json")]
    assert len(finished) == len(places.listed(store)) == (1 if moment == "before the key" else 0)
    assert places.noted(store, "data_curation", "key") is None
    made, cached = places.produce(store, "data_curation", "key", build)
    assert not cached
    assert places.noted(store, "data_curation", "key") == made.sha256
    assert places.stored(store, made.sha256).sha256 == made.sha256


def test_two_writers_of_the_same_content_meet_harmlessly(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process writes for both, each with its copies and its own report."""
    from components.common import bucket_store

    made = [build(tmp_path / f"job{n}", report=f"<p>{n}") for n in range(2)]
    assert made[0].sha256 == made[1].sha256
    threads = [threading.Thread(target=bucket_store.upload, args=(address, one, Silent())) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = places.stored(elsewhere(tmp_path, monkeypatch), made[0].sha256)
    assert (found.path / "report.html").read_text() == found.manifest.summary["report"]


@pytest.mark.parametrize("name", ["train.parquet", "manifest.json"])
def test_a_damaged_object_is_refused_by_name(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made, _ = places.produce(Workdir.from_environment().store, "data_curation", "key", build)
    replace(s3_server.client(), address, f"{made.sha256}/{name}", lambda data: data.replace(b"a", b"b"))
    with pytest.raises(ArtifactDamagedError) as error:
        places.stored(elsewhere(tmp_path, monkeypatch), made.sha256)
    assert error.value.message.startswith(f"{address}/{made.sha256}/{name} ")
    assert f"remove all below {address}/{made.sha256}/" in error.value.hint


def test_a_missing_object_is_refused_and_a_damaged_copy_is_fetched_again(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Workdir.from_environment().store
    made, _ = places.produce(store, "data_curation", "key", build)
    (made.path / "train.parquet").write_text("b row\n")
    assert places.stored(store, made.sha256).sha256 == made.sha256
    assert (made.path / "train.parquet").read_text() == "a row\n"
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    s3_server.client().delete_object(Bucket=bucket, Key=f"{prefix}/{made.sha256}/train.parquet")
    with pytest.raises(ArtifactDamagedError, match=r"train\.parquet is missing"):
        places.stored(elsewhere(tmp_path, monkeypatch), made.sha256)


def test_what_was_removed_from_the_bucket_is_made_again_although_a_copy_is_here(s3_server: S3, address: str) -> None:
    store, client = Workdir.from_environment().store, s3_server.client()
    made, _ = places.produce(store, "data_curation", "key", build)
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    for name in objects(client, f"{address}/{made.sha256}"):
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{made.sha256}/{name}")
    assert not places.holds(store, made.sha256)
    with pytest.raises(ArtifactDamagedError, match=f"{made.sha256} is not in the artifact store {address}"):
        places.stored(store, made.sha256)
    assert places.produce(store, "data_curation", "key", build)[1] is False
    assert places.holds(store, made.sha256)


def test_a_bucket_that_cannot_be_used_is_told_as_what_it_is(s3_server: S3, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> EngineMissingError:
        with pytest.raises(EngineMissingError) as error:
            places.noted(Workdir.from_environment().store, "data_curation", "key")
        assert s3_server.secret_key not in error.value.message + error.value.hint
        return error.value

    monkeypatch.setenv("TUNELINE_STORE", "s3://nobody-made-this/tuneline")
    assert f"is in a bucket that does not exist at {s3_server.endpoint}" in told().message
    monkeypatch.setenv("TUNELINE_STORE", address)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    refused = told()
    assert "is refused to these keys" in refused.message
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refused.hint
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "cannot be reached: http://127.0.0.1:9 says" in told().message
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "cannot be asked for without keys" in told().message


@pytest.mark.parametrize("named", ["s3://", "s3:///prefix", "gs://bucket/x", "s3://key:secret@bucket/x", "s3://bucket/a b"])
def test_an_address_that_is_no_store_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("TUNELINE_STORE", named)
    with pytest.raises(ConfigurationError, match="TUNELINE_STORE: ") as error:
        _ = Workdir.from_environment().store
    assert "secret" not in error.value.message


def test_an_artifact_that_another_job_replaces_while_it_is_uploaded_has_its_own_report_under_its_manifest(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = build(tmp_path / "mine"), build(tmp_path / "other", report="<q>")
    sizes = buckets.sizes

    def replaced(home: str) -> dict[str, int]:
        """The other job comes right after the manifest was read."""
        if other.path.exists():
            shutil.rmtree(mine.path)
            other.path.rename(mine.path)
        return sizes(home)

    monkeypatch.setattr(buckets, "sizes", replaced)
    bucket_store.upload(address, mine, Silent())
    said = bucket_store.manifest(address, mine.sha256)
    assert said == (mine.path / artifacts.MANIFEST).read_bytes()
    found = bucket_store.fetch(address, mine.sha256, said or b"", tmp_path / "fetched", tmp_path / "none", Silent())
    assert (found.path / "report.html").read_text() == "<q>"
    assert artifacts.read(found.path).sha256 == mine.sha256


def test_an_artifact_whose_report_was_changed_is_not_uploaded(address: str, tmp_path: Path) -> None:
    made = build(tmp_path / "made")
    (made.path / "report.html").write_text("<x>")
    with pytest.raises(ArtifactDamagedError, match=r"are not what its manifest\.json says"):
        bucket_store.upload(address, made, Silent())
    assert bucket_store.manifest(address, made.sha256) is None


def test_a_base_model_is_imported_into_the_bucket_and_read_on_another_machine(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tiny_model(tmp_path / "tiny")
    given = {name: os.environ[name] for name in ("TUNELINE_STORE", "TUNELINE_CACHE")}
    done = answer("models", "import", there, "--accept-license", cwd=tmp_path, **given)
    store = elsewhere(tmp_path, monkeypatch)
    assert models.base_model_here(done["base_model"]) is None, "it would have to be fetched"
    assert models.outline(done["base_model"]).config.model_type == "llama"
    base = models.base_model(done["base_model"])
    assert (base.sha256, base.path) == (models.base_model(str(there)).sha256, store / done["sha256"])


def run(project: Path, workdir: str, **extra: str) -> dict[str, Any]:
    return answer("run", "-c", "customization.yaml", "--workdir", workdir, cwd=project, **extra)


def digests(result: dict[str, Any]) -> dict[str, str]:
    return {kind: Path(path).name for kind, path in result["artifacts"].items()}


def cached(result: dict[str, Any]) -> set[str]:
    return {stage["name"] for stage in result["stages"] if stage["cached"]}


@pytest.mark.daft
@pytest.mark.dvc
@pytest.mark.mlflow
@pytest.mark.triton
@pytest.mark.timeout(1800)  # five whole runs, with other engines beside them
def test_a_run_on_a_bucket_gives_the_digests_of_a_run_on_a_folder_and_other_machines_have_its_artifacts(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    project = write_project(tmp_path / "project")
    one, other = ({"TUNELINE_STORE": address, "TUNELINE_CACHE": str(tmp_path / name)} for name in ("one", "other"))
    on_a_folder = run(project, "folder", TUNELINE_CACHE=str(tmp_path / "none"))
    first = run(project, "bucket", **one)
    assert digests(first) == digests(on_a_folder)
    assert (first["verdict"], cached(first)) == ("accepted", set())
    assert not (project / "bucket" / "store").exists()
    again = run(project, "bucket", **one)
    assert (again["verdict"], cached(again)) == ("unchanged", MADE_BY_STAGES | {"data_versioning"})
    moved = run(project, "moved", **other)
    assert digests(moved) == digests(first)
    assert cached(moved) == MADE_BY_STAGES - {"fine_tuning"}, "a training names its data's revision, which is of the work folder"
    lineage_and_package_are_found_from_a_third_machine(project, address, digests(first), monkeypatch)


def lineage_and_package_are_found_from_a_third_machine(
    project: Path, address: str, digests: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    third = {"TUNELINE_STORE": address, "TUNELINE_CACHE": str(project.parent / "third")}
    chain = answer("lineage", "tiny-helper@champion", "-c", "customization.yaml", "--workdir", "bucket", cwd=project, **third)["chain"]
    found = {link["kind"]: link for link in chain}
    for kind in ("repository", "evaluation", "model", "dataset"):
        assert (found[kind]["uri"], found[kind]["status"]) == (f"{address}/{digests[kind]}", "intact"), kind
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / 'bucket' / 'mlflow.db'}")
    monkeypatch.delenv("TUNELINE_STORE")
    monkeypatch.setenv("TUNELINE_CACHE", str(project.parent / "fourth"))
    with versions.talking() as client:
        version = client.get_model_version_by_alias("tiny-helper", "champion")
    with checks.found_at(version, "repository", digests["repository"]) as package:
        assert package.sha256 == digests["repository"]


def test_an_artifact_is_removed_from_the_bucket_once_nobody_has_used_it_for_long(
    s3_server: S3, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Workdir.from_environment().store
    made, _ = places.produce(store, "data_curation", "key", build)
    assert not places.remove(store, made.sha256, 3600)
    [(sha256, (size, unused))] = (places.unused_in_bucket(store) or {}).items()
    assert (sha256, size) == (made.sha256, sum(size for name, size in objects(s3_server.client(), address).items() if sha256 in name))
    assert 0 <= unused < 3600
    assert places.remove(store, made.sha256, 0)
    assert set(objects(s3_server.client(), address)) == {"keys/data_curation/key"}
    assert (places.listed(store), places.noted(store, "data_curation", "key")) == ([], None)
    again, cached = places.produce(elsewhere(tmp_path, monkeypatch), "data_curation", "key", build)
    assert (again.sha256, cached) == (made.sha256, False)


REMOVED = """
import os, signal, sys
from components.common import buckets, places
delete = buckets.delete
def one(uri):
    delete(uri)
    os.kill(os.getpid(), signal.SIGKILL)
buckets.delete = one
places.remove(places.Workdir.from_environment().store, sys.argv[1], 0)
"""


def test_a_removal_that_is_killed_leaves_nothing_that_looks_finished_and_is_completed_or_made_good(
    s3_server: S3, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Workdir.from_environment().store
    made, _ = places.produce(store, "data_curation", "key", build)
    child = subprocess.run(
        [sys.executable, "-c", REMOVED, made.sha256], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=120
    )
    assert child.returncode == -9
    left = set(objects(s3_server.client(), address))
    assert f"{made.sha256}/train.parquet" in left
    assert f"{made.sha256}/manifest.json" not in left
    monkeypatch.setattr(bucket_store, "LEASE", 0.5)  # seconds after which the dead one is waited for no more
    again, cached = places.produce(store, "data_curation", "key", build)
    assert (again.sha256, cached) == (made.sha256, False)
    assert places.stored(store, made.sha256).sha256 == made.sha256
    monkeypatch.setattr(bucket_store, "LEASE", 600.0)
    subprocess.run([sys.executable, "-c", REMOVED, made.sha256], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=120)
    assert places.remove(store, made.sha256, 0)
    assert not any(name.startswith(made.sha256) for name in objects(s3_server.client(), address))


def test_who_wants_an_artifact_that_is_being_removed_waits_until_it_is_gone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Workdir.from_environment().store
    made, _ = places.produce(store, "data_curation", "key", build)
    delete, begun = buckets.delete, threading.Event()

    def slowly(uri: str) -> None:
        begun.set()
        time.sleep(0.5)
        delete(uri)

    monkeypatch.setattr(buckets, "delete", slowly)
    remover = threading.Thread(target=places.remove, args=(store, made.sha256, 0))
    remover.start()
    assert begun.wait(60)
    with pytest.raises(ArtifactDamagedError, match="is not in the artifact store"):
        places.stored(store, made.sha256)
    assert not any(name.endswith(made.sha256) for name in buckets.sizes(f"{address}/removing"))
    remover.join()
    assert places.listed(store) == []


def test_what_is_pinned_is_kept_in_the_bucket_and_the_house_is_kept_there_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workdir.from_environment()
    work.root.mkdir(parents=True)
    kept, _ = places.produce(work.store, "data_curation", "kept", build)
    gone, _ = places.produce(work.store, "data_curation", "gone", lambda folder: build(folder, rows="another row\n"))
    found.pin(work, kept.sha256, "the audit")
    asked = found.Asked(work, DataVersioningConfig(), Silent(), 0.0, no_registry=True, no_repository=True)
    world = found.look(asked)
    decided = plan(world.things, world.roots, asked.policy)
    assert {item.thing.path for item in decided.going if item.thing.kind == "artifact"} == {f"{address}/{gone.sha256}"}
    assert not any(outcome.kept for outcome in removal.carry_out(decided, world, asked))
    assert places.listed(work.store) == [kept.sha256]
    assert places.notes(work.store, found.PINS) == [kept.sha256]
    found.unpin(work, kept.sha256)
    assert places.notes(work.store, found.PINS) == []
