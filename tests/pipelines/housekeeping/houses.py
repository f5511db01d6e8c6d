"""A workdir with a past: artifacts made of one another, runs, checkpoints and deployments, used long ago or lately.

What the registry and the data repository need is said by the test in their place: the real ones are asked in test_command.py.
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

from components.common import artifacts, jobs
from components.common.artifacts import Input
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_versioning import retention as data
from components.data_versioning.config import DataVersioningConfig
from components.model_registry import retention as registry
from components.model_registry.retention import Needed
from components.triton_packaging.deployment import state
from components.triton_packaging.deployment.state import Served, State
from pipelines.housekeeping.found import Asked

DAY = 86_400.0
LIMIT = 30 * DAY
OLD, YOUNG = 40 * DAY, 3 * DAY
KINDS = ("dataset", "model", "evaluation", "repository")


@dataclass
class House:
    """A workdir, and what its registry and its data repository need."""

    work: Workdir
    inputs: dict[str, list[str]] = field(default_factory=dict)  # of each artifact, by digest
    ages: dict[str, float] = field(default_factory=dict)
    aliased: list[str] = field(default_factory=list)
    revisions: list[str] = field(default_factory=list)

    def asked(self, keep_runs: int = 0) -> Asked:
        return Asked(self.work, DataVersioningConfig(), Silent(), LIMIT, keep_runs, no_registry=True, no_repository=True)

    def says(self, patch: pytest.MonkeyPatch) -> None:
        """Have the registry and the data repository say what this house has."""
        patch.setattr(
            registry, "needed", lambda _: [Needed(f"helper version {n} is champion", (sha,)) for n, sha in enumerate(self.aliased)]
        )
        patch.setattr(data, "revisions", lambda *_, **__: [(f"dataset-v{n}", sha) for n, sha in enumerate(self.revisions)])
        patch.setattr(data, "held", lambda *_, **__: data.Held([]))
        patch.setattr(registry, "ended_runs", lambda *_: [])
        patch.setattr(registry, "unversioned_models", lambda *_: [])
        patch.setattr(registry, "of_others", lambda _: 0)

    def make(self, kind: str, content: str, made_from: Sequence[str] = (), age: float = OLD) -> str:
        """An artifact that was used so long ago. Returns its digest."""
        draft = self.work.store / f"draft-{content}"
        artifacts.begin(draft, content)
        (draft / "payload").mkdir()
        (draft / "payload" / "one.bin").write_text(content)
        (draft / "report.html").write_text("<p>")
        inputs = [Input(kind="dataset", content_sha256=sha, uri=f"store:{sha}") for sha in made_from]
        made = artifacts.publish(draft, kind, payload=["payload/one.bin"], inputs=inputs, config={}, seed=1, key=content, summary={})
        draft.rename(self.work.store / made.sha256)
        self.inputs[made.sha256] = list(made_from)
        self.used(made.sha256, age)
        return made.sha256

    def used(self, sha256: str, age: float) -> None:
        self.ages[sha256] = age
        aged(self.work.store / sha256, age)

    def reached(self, roots: Sequence[str]) -> set[str]:
        """All artifacts that these need, themselves among them."""
        found, waiting = set[str](), list(roots)
        while waiting:
            sha256 = waiting.pop()
            if sha256 not in found:
                found.add(sha256)
                waiting += self.inputs.get(sha256, [])
        return found

    def state(self, stage: str, key: str, age: float = OLD) -> Path:
        """Work in progress that was last written so long ago."""
        folder = self.work.state / stage / key
        (folder / "checkpoint-5").mkdir(parents=True)
        (folder / "checkpoint-5" / "weights").write_text(key)
        aged(folder, age)
        return folder

    def run(self, number: int, age: float = OLD, made: Sequence[str] = (), **said: object) -> Path:
        """A run that ended so long ago."""
        folder = self.work.runs / f"20260101-{number:06d}-abcd"
        (folder / "logs").mkdir(parents=True)
        result = {"artifacts": {str(n): str(self.work.store / sha) for n, sha in enumerate(made)}}
        (folder / "run.json").write_text(json.dumps({"status": "finished", "result": result, "tracking_open": False, **said}))
        aged(folder, age)
        return folder

    def deployment(self, name: str, serving: str, *others: str) -> Path:
        """A serving folder with copies of packages, one of which is in service."""
        folder = self.work.root / "serving" / name
        for sha256 in (serving, *others):
            (folder / "packages" / sha256).mkdir(parents=True)
            (folder / "packages" / sha256 / "manifest.json").write_text("{}")
            aged(folder / "packages" / sha256, OLD)
        served = Served(version="1", repository_sha256=serving, model_sha256=serving)
        state.write(folder, State(registered_model=name, alias="champion", serving=served))
        return folder


def aged(path: Path, age: float) -> None:
    """Have a folder and all in it, or a file, look as if it was changed so many seconds ago."""
    then = time.time() - age
    for one in (*path.rglob("*"), path):
        os.utime(one, (then, then))


def history(house: House, random_: random.Random, size: int) -> None:
    """Artifacts of a random past, each made of earlier ones; some are needed by somebody, some were used lately."""
    made: list[str] = []
    for n in range(size):
        parents = random_.sample(made, min(len(made), random_.choice((0, 1, 1, 2))))
        made.append(house.make(random_.choice(KINDS), f"{size}-{n}", parents, random_.choice((OLD, OLD, OLD, YOUNG))))
    house.aliased = random_.sample(made, random_.randint(0, min(2, size)))
    house.revisions = random_.sample(made, random_.randint(0, min(2, size)))
    for n in range(random_.randint(0, 3)):
        house.state("fine_tuning", f"key{n}", random_.choice((OLD, YOUNG)))
    for n in range(random_.randint(0, 3)):
        house.run(n, random_.choice((OLD, YOUNG)), random_.sample(made, min(2, size)))
    if random_.random() < 0.5:
        house.deployment("helper", *random_.sample(made, min(2, size)))


def needed(house: House, asked: Asked) -> set[str]:
    """The artifacts that have to stay by the rules of the documentation, taken from what the test knows."""
    runs = [run for run in house.work.runs.glob("*") if _age(run) < asked.older_than]
    of_runs = [Path(path).name for run in runs for path in json.loads((run / "run.json").read_text())["result"]["artifacts"].values()]
    served = [json.loads(said.read_text())["serving"]["repository_sha256"] for said in house.work.root.glob("serving/*/state.json")]
    young = [sha for sha, age in house.ages.items() if age < asked.older_than]
    return house.reached([*house.aliased, *house.revisions, *of_runs, *served, *young]) & house.ages.keys()


def _age(folder: Path) -> float:
    return time.time() - (folder / "run.json").stat().st_mtime


@contextmanager
def empty(folder: Path):  # type: ignore[no-untyped-def]
    """A house in a folder, its registry and data repository saying what it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TUNELINE_STORE", raising=False)
        patch.delenv("TUNELINE_STATE", raising=False)
        house = House(Workdir(folder))
        house.work.store.mkdir(parents=True)
        house.says(patch)
        yield house


def left_over(house: House) -> list[Path]:
    """Private folders that nobody swept."""
    return [*jobs.listed(house.work.store / "unfinished"), *house.work.root.rglob(".removing.*")]
