"""A workdir with artifacts, runs, checkpoints and deployments of different ages.

The tests replace the registry and the data repository; test_command.py uses real ones.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import job_folders
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import unreferenced_objects as data
from components.data_versioning.config import DataVersioningConfig
from components.model_registry import registry_retention as registry
from components.model_registry.registry_retention import RetainedDigests
from components.triton_packaging.deployment import deployment_state
from components.triton_packaging.deployment.deployment_state import DeploymentState, ServedVersion
from pipelines.operations.garbage_collection.inventory import CollectionRequest

DAY = 86_400.0
LIMIT = 30 * DAY
OLD, YOUNG = 40 * DAY, 3 * DAY
KINDS = ("dataset", "model", "evaluation", "repository")


@dataclass
class Workspace:
    """A workdir, and the artifacts that its registry and its data repository reference."""

    work: Workdir
    inputs: dict[str, list[str]] = field(default_factory=dict)  # of each artifact, by digest
    ages: dict[str, float] = field(default_factory=dict)
    aliased: list[str] = field(default_factory=list)
    revisions: list[str] = field(default_factory=list)

    def build_request(self, keep_runs: int = 0) -> CollectionRequest:
        return CollectionRequest(
            self.work, DataVersioningConfig(), SilentReporter(), LIMIT, keep_runs, no_registry=True, no_repository=True
        )

    def patch_services(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the registry and the data repository by ones with the references of this workspace."""
        patch.setattr(
            registry,
            "list_retained_digests",
            lambda _: [
                RetainedDigests(f"helper version {n} is champion", (sha,)) for n, sha in enumerate(self.aliased)
            ],
        )
        patch.setattr(
            data, "list_revisions", lambda *_, **__: [(f"dataset-v{n}", sha) for n, sha in enumerate(self.revisions)]
        )
        patch.setattr(data, "find_unreferenced", lambda *_, **__: data.UnreferencedObjects([]))
        patch.setattr(registry, "list_ended_runs", lambda *_: [])
        patch.setattr(registry, "list_unversioned_models", lambda *_: [])
        patch.setattr(registry, "count_foreign_items", lambda _: 0)

    def create_artifact(self, kind: str, content: str, parents: Sequence[str] = (), age: float = OLD) -> str:
        """Create an artifact last used `age` seconds ago and return its digest."""
        draft = self.work.store / f"draft-{content}"
        artifact_folder.claim_folder(draft, content)
        (draft / "payload").mkdir()
        (draft / "payload" / "one.bin").write_text(content)
        (draft / "report.html").write_text("<p>")
        inputs = [ArtifactInput(kind="dataset", content_sha256=sha, uri=f"store:{sha}") for sha in parents]
        artifact = artifact_folder.publish(
            draft, kind, payload=["payload/one.bin"], inputs=inputs, config={}, seed=1, key=content, summary={}
        )
        draft.rename(self.work.store / artifact.sha256)
        self.inputs[artifact.sha256] = list(parents)
        self.set_last_use(artifact.sha256, age)
        return artifact.sha256

    def set_last_use(self, sha256: str, age: float) -> None:
        self.ages[sha256] = age
        set_age(self.work.store / sha256, age)

    def find_reachable(self, roots: Sequence[str]) -> set[str]:
        """Return these artifacts and all their inputs."""
        reachable, pending = set[str](), list(roots)
        while pending:
            sha256 = pending.pop()
            if sha256 not in reachable:
                reachable.add(sha256)
                pending += self.inputs.get(sha256, [])
        return reachable

    def create_state(self, stage: str, key: str, age: float = OLD) -> Path:
        """Create work in progress last written `age` seconds ago."""
        folder = self.work.state / stage / key
        (folder / "checkpoint-5").mkdir(parents=True)
        (folder / "checkpoint-5" / "weights").write_text(key)
        set_age(folder, age)
        return folder

    def create_run(self, number: int, age: float = OLD, results: Sequence[str] = (), **fields: object) -> Path:
        """Create a run that ended `age` seconds ago."""
        folder = self.work.runs / f"20260101-{number:06d}-abcd"
        (folder / "logs").mkdir(parents=True)
        result = {"artifacts": {str(n): str(self.work.store / sha) for n, sha in enumerate(results)}}
        (folder / "run.json").write_text(
            json.dumps({"status": "finished", "result": result, "tracking_open": False, **fields})
        )
        set_age(folder, age)
        return folder

    def create_deployment(self, name: str, serving: str, *others: str) -> Path:
        """Create a serving folder with copies of packages, one of them in service."""
        folder = self.work.root / "serving" / name
        for sha256 in (serving, *others):
            (folder / "packages" / sha256).mkdir(parents=True)
            (folder / "packages" / sha256 / "manifest.json").write_text("{}")
            set_age(folder / "packages" / sha256, OLD)
        served = ServedVersion(version="1", repository_sha256=serving, model_sha256=serving)
        deployment_state.write_state(folder, DeploymentState(registered_model=name, alias="champion", serving=served))
        return folder


def set_age(path: Path, age: float) -> None:
    """Set the modification times of a file, or of a folder and its contents, to `age` seconds ago."""
    timestamp = time.time() - age
    for file in (*path.rglob("*"), path):
        os.utime(file, (timestamp, timestamp))


def create_history(workspace: Workspace, random_: random.Random, size: int) -> None:
    """Create random artifacts, each made of earlier ones; some are referenced, some were used recently."""
    digests: list[str] = []
    for n in range(size):
        parents = random_.sample(digests, min(len(digests), random_.choice((0, 1, 1, 2))))
        digests.append(
            workspace.create_artifact(
                random_.choice(KINDS), f"{size}-{n}", parents, random_.choice((OLD, OLD, OLD, YOUNG))
            )
        )
    workspace.aliased = random_.sample(digests, random_.randint(0, min(2, size)))
    workspace.revisions = random_.sample(digests, random_.randint(0, min(2, size)))
    for n in range(random_.randint(0, 3)):
        workspace.create_state("fine_tuning", f"key{n}", random_.choice((OLD, YOUNG)))
    for n in range(random_.randint(0, 3)):
        workspace.create_run(n, random_.choice((OLD, YOUNG)), random_.sample(digests, min(2, size)))
    if random_.random() < 0.5:
        workspace.create_deployment("helper", *random_.sample(digests, min(2, size)))


def find_required(workspace: Workspace, request: CollectionRequest) -> set[str]:
    """Return the artifacts to keep by the documented rules."""
    runs = [run for run in workspace.work.runs.glob("*") if _get_age(run) < request.older_than]
    run_results = [
        Path(path).name
        for run in runs
        for path in json.loads((run / "run.json").read_text())["result"]["artifacts"].values()
    ]
    served = [
        json.loads(state.read_text())["serving"]["repository_sha256"]
        for state in workspace.work.root.glob("serving/*/state.json")
    ]
    young = [sha for sha, age in workspace.ages.items() if age < request.older_than]
    return (
        workspace.find_reachable([*workspace.aliased, *workspace.revisions, *run_results, *served, *young])
        & workspace.ages.keys()
    )


def _get_age(folder: Path) -> float:
    return time.time() - (folder / "run.json").stat().st_mtime


@contextmanager
def open_workspace(folder: Path):  # type: ignore[no-untyped-def]
    """Yield a workspace in a folder with a replaced registry and data repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TUNELINE_STORE", raising=False)
        patch.delenv("TUNELINE_STATE", raising=False)
        workspace = Workspace(Workdir(folder))
        workspace.work.store.mkdir(parents=True)
        workspace.patch_services(patch)
        yield workspace


def list_private_folders(workspace: Workspace) -> list[Path]:
    """Return the private folders that were not removed."""
    return [*job_folders.list_folder(workspace.work.store / "unfinished"), *workspace.work.root.rglob(".removing.*")]
