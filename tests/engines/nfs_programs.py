"""Programs for clients of a real NFS server: `python -P -m tests.engines.nfs_programs NAME SECONDS FOLDER…`.

Each repeats one operation for SECONDS or until the folder has a file `stop`, at least once, in a process per folder.
Prints a JSON object with the number of each result for each folder.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError, BusyError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store, job_folders
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import stage as data_versioning
from components.data_versioning.config import DataVersioningConfig
from components.fine_tuning import checkpoints
from pipelines.runs import run_folder
from tests.datasets import small_dataset

RUN = "20261123-000000-aaaa"
HOST = socket.gethostname()
CACHE_SECONDS = 70.0  # a client with default options caches names for 60 seconds
HELD_PUBLICATIONS = ("files", "manifest", "replacement")
CHECKPOINT_FILES = [f"part-{number}" for number in range(4)]


def write_run(folder: Path) -> str:
    run_folder.Run(folder / "runs" / RUN).update(status="finished", written=time.time())
    return "written"


def read_run(folder: Path) -> str:
    return "whole" if run_folder.Run(folder / "runs" / RUN).read() else "empty"


def rename_file(folder: Path) -> str:
    first, second = folder / "first", folder / "second"
    if not first.exists() and not second.exists():
        first.touch()
    source, target = (first, second) if first.exists() else (second, first)
    filesystem.rename(source, target)
    return "done"


def link_file(folder: Path) -> str:
    (folder / "first").touch()
    filesystem.link(folder / "first", folder / f"link.{time.monotonic_ns()}")
    return "done"


def move_folder(folder: Path) -> str:
    source = folder / "made"
    source.mkdir(exist_ok=True)
    (source / "file").touch()
    found = job_folders.move_into_place(source, folder / "published", lambda: None, folder / "aside")
    return "done" if found is None else "found"


def remove_folder(folder: Path) -> str:
    nested = folder / "removed" / "part"
    nested.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        (nested / f"file-{number}").touch()
    filesystem.remove_tree(folder / "removed")
    return "kept" if (folder / "removed").exists() else "done"


def lock_workdir(folder: Path) -> str:
    with run_folder.lock_workdir(Workdir(folder)):
        return "done"


def publish_artifact(folder: Path) -> str:
    """Publish an artifact in the same second as the other client, and an artifact that only this client publishes."""
    second = int(time.time()) + 1
    time.sleep(second - time.time())
    # With different inputs, each client replaces the artifact of the other one.
    source = "both" if second % 2 else HOST
    for name, content in ((f"{source}-{second}", f"both {second}"), (f"{HOST}-only-{second}", f"{HOST} {second}")):
        publish(folder, content, name)
    return "published"


def publish(folder: Path, content: str, source: str) -> Artifact:
    """Publish an artifact and record its digest, as a step of the pipeline does."""
    store, build = folder / "store", partial(build_artifact, content=content, source=source)
    artifact = artifact_store.get_or_build(store, "extract", hashing.digest([content, source]), build)[0]
    assert artifact_store.load_artifact(store, artifact.sha256).sha256 == artifact.sha256
    record(folder, artifact.sha256)
    return artifact


def record(folder: Path, published: str) -> None:
    """Record what this client has published, for the other one."""
    with (folder / f"published-{HOST}").open("a") as file:
        file.write(f"{published}\n")


def read_records(folder: Path) -> set[str]:
    return {line for path in folder.glob("published-*") for line in path.read_text().split()}


def build_artifact(folder: Path, *, content: str, source: str) -> Artifact:
    """Write an artifact whose digest depends on `content`, and its manifest also on `source`."""
    artifact_folder.claim_folder(folder, source)
    files = ["first.txt", "second.txt"]
    for name in files:
        (folder / name).write_text(f"{content} {name}\n" * 1000)
    inputs = [ArtifactInput(kind="file", content_sha256="1" * 64, uri=source)]
    return artifact_folder.publish(
        folder, "extract", payload=files, inputs=inputs, config={}, seed=0, key=source, summary={}
    )


def verify_artifacts(folder: Path) -> str:
    """Load every artifact that a client has published, as soon as this client sees it."""

    def load_all() -> int:
        published = read_records(folder)
        assert set(artifact_store.list_artifacts(folder / "store")) == published
        for sha256 in published:
            artifact_store.load_artifact(folder / "store", sha256)
        return len(published)

    return wait_until_visible(load_all)


def wait_until_visible(read: Callable[[], int]) -> str:
    """Call `read` until it succeeds; return its result, and whether the first call succeeded."""
    deadline = time.monotonic() + CACHE_SECONDS
    for attempt in itertools.count():
        try:
            return f"{read()} intact {'later' if attempt else 'at once'}"
        except (AssertionError, ArtifactDamagedError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    raise AssertionError


class StepReporter(SilentReporter):
    """Touches a file with the first word of each step, so that the test can interrupt the step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, name: str) -> None:
        (self.folder / f"{name.split()[0]}-{HOST}").touch()


def locate_versions(folder: Path) -> DataVersioningConfig:
    """Return the repository and the remote of both clients; each client has a local workdir."""
    return DataVersioningConfig(repository=str(folder / "data.git"), remote=str(folder / "versions"))


def publish_version(folder: Path) -> str:
    """Publish a dataset as a version, and fetch the version again."""
    with TemporaryDirectory() as private:
        dataset = small_dataset(Path(private) / "dataset", start=time.time_ns() % 2**31)
        workdir, reporter = Path(private) / "work", StepReporter(folder)
        version = data_versioning.publish(dataset, locate_versions(folder), workdir=workdir, reporter=reporter)
        assert version.created
        assert fetch_version(folder, version.tag) == dataset.sha256
    record(folder, f"{version.tag}={dataset.sha256}")
    return "published"


def fetch_version(folder: Path, tag: str) -> str:
    """Fetch a version, which verifies its files, and return the digest of the dataset."""
    with TemporaryDirectory() as private:
        output, config = Path(private) / "dataset", locate_versions(folder)
        return data_versioning.fetch(tag, output, config, workdir=Path(private), reporter=SilentReporter()).sha256


def verify_versions(folder: Path) -> str:
    """Fetch every version, as soon as this client sees those that the clients have published."""

    def fetch_all() -> int:
        versions = data_versioning.list_versions(locate_versions(folder), workdir=folder)
        fetched = {f"{version.tag}={fetch_version(folder, version.tag)}" for version in versions}
        # A client may lose power before it records a version.
        assert read_records(folder) <= fetched
        return len(fetched)

    return wait_until_visible(fetch_all)


def hold(folder: Path, point: str) -> None:
    """Tell the test that this process has reached a point, and wait for the power cut."""
    (folder / f"held-{point}").touch()
    time.sleep(600)


def hold_publication(folder: Path) -> str:
    """Stop half-way in the publication of an artifact; the name of the folder is the point."""
    place, point = folder.parent, folder.name

    def build(job: Path) -> Artifact:
        if point == "files":
            artifact_folder.claim_folder(job, point)
            (job / "first.txt").write_text("half")
            hold(place, point)
        artifact = build_artifact(job, content=point, source="new")
        if point == "manifest":
            hold(place, point)
        return artifact

    original = filesystem.rename

    def rename(source: Path, target: Path) -> None:
        original(source, target)
        if target.parent.parent.name == artifact_store.ASIDE_FOLDER:
            hold(place, point)

    if point == "replacement":
        publish(place, point, "old")
    with mock.patch.object(filesystem, "rename", rename):
        artifact_store.get_or_build(place / "store", "extract", hashing.digest([point, "new"]), build)
    return "not held"


def recover_publication(folder: Path) -> str:
    """Read the artifact of a client without power, and publish it again."""
    place, point = folder.parent, folder.name
    with TemporaryDirectory() as private:
        sha256 = build_artifact(Path(private) / "built", content=point, source="new").sha256
    assert artifact_store.find_by_key(place / "store", "extract", hashing.digest([point, "new"])) is None
    try:
        stored = artifact_store.load_artifact(place / "store", sha256)
    except ArtifactDamagedError as error:
        found = "absent" if "is not in the artifact store" in error.message else error.message
    else:
        found = stored.manifest.inputs[0].uri
    assert publish(place, point, "new").manifest.inputs[0].uri == "new"
    return f"{found}, then published"


def request_lease(folder: Path) -> str:
    """Try to write to a checkpoint folder that another client may use."""
    try:
        with job_folders.folder_lock(folder, job_folders.WRITER_LOCK_FILENAME):
            return "writes"
    except BusyError:
        return "refused"


def write_checkpoints(folder: Path) -> str:
    """Write checkpoints as a training run does, until the file `stop` appears; the content of the files is the host."""
    lock = job_folders.folder_lock(
        folder, job_folders.WRITER_LOCK_FILENAME, wait_seconds=job_folders.LOCK_STALE_AFTER_SECONDS + 30
    )
    with lock as verify:
        newest = checkpoints.find_newest(folder, SilentReporter(), lambda _: True)
        saving = checkpoints.create_saving_folder(folder)
        (folder / f"writes-{HOST}").touch()
        for step in itertools.count(checkpoints.parse_step(newest) + 1 if newest else 1):
            verify()
            try:
                save_checkpoint(saving / f"checkpoint-{step}")
            except OSError:
                verify()
                raise
            checkpoints.publish(saving / f"checkpoint-{step}", folder, verify)
            if (folder / "stop").exists():
                return "stopped"
    raise AssertionError


def save_checkpoint(checkpoint: Path) -> None:
    checkpoint.mkdir()
    for name in CHECKPOINT_FILES:
        (checkpoint / name).write_text(HOST * 10_000)
        time.sleep(0.3)
    (checkpoint / checkpoints.STATE_FILENAME).write_text("{}")


def read_checkpoints(folder: Path) -> str:
    """Return the hosts of the complete checkpoints in the order of their steps, such as "b* c*"."""
    hosts = []
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=checkpoints.parse_step):
        writers = {character for name in CHECKPOINT_FILES for character in (checkpoint / name).read_text()}
        hosts.append("".join(sorted(writers)) if checkpoints.is_complete(checkpoint) else f"incomplete {checkpoint}")
    return " ".join(f"{host}*" for host, _ in itertools.groupby(hosts))


PROGRAMS: dict[str, Callable[[Path], str]] = {
    program.__name__: program
    for program in (
        write_run,
        read_run,
        rename_file,
        link_file,
        move_folder,
        remove_folder,
        lock_workdir,
        publish_artifact,
        verify_artifacts,
        publish_version,
        verify_versions,
        hold_publication,
        recover_publication,
        request_lease,
        write_checkpoints,
        read_checkpoints,
    )
}


def repeat(name: str, seconds: float, folder: Path) -> dict[str, int]:
    """Repeat a program and return how often it returned each result or raised each error."""
    (folder / "runs" / RUN).mkdir(parents=True, exist_ok=True)
    (folder / "ready").touch()
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    # Only a listing shows a new file at once to a client with default options.
    while not counts or (time.monotonic() < end and folder / "stop" not in list(folder.iterdir())):
        try:
            counts[PROGRAMS[name](folder)] += 1
        except Exception as error:
            counts[f"{type(error).__name__}: {error}"[:400]] += 1
    return counts


def main(name: str, seconds: float, folders: list[Path]) -> None:
    """Repeat a program in a process per folder, and print the results."""
    with multiprocessing.get_context("fork").Pool(len(folders)) as pool:  # the libraries are imported once
        counts = pool.map(partial(repeat, name, seconds), folders, chunksize=1)
    print(json.dumps(dict(zip(map(str, folders), counts, strict=True))))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
