"""A whole `tuneline run`, killed at many random moments. Opt-in: `make stress`. docs/stress.md has what it found."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, tracking
from components.common.places import Workdir
from pipelines import runs, status
from tests.pipelines.command import ROOT
from tests.pipelines.processes import left_of, start, wait_until_alone
from tests.pipelines.project import write_project

pytestmark = [pytest.mark.stress, pytest.mark.timeout(4 * 3600)]
KILLS = int(os.environ.get("TUNELINE_STRESS_KILLS", "30"))
SEED = int(os.environ.get("TUNELINE_STRESS_SEED") or random.SystemRandom().randrange(2**32))
GROUP_SHARE = 1 / 3
MODEL = "tiny-helper"


@dataclass
class Tally:
    """What happened: kills by the stage they hit, commands that came to their end, seconds."""

    seconds_whole: float
    hits: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    commands: int = 0
    workdirs: int = 0

    @property
    def kills(self) -> int:
        return self.hits.total()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The sources as they are now: an edit while the test runs would change every digest of the code."""
    for name in ("components", "pipelines", "data"):
        shutil.copytree(ROOT / name, tmp_path / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return write_project(folder)


def test_killed_at_random_moments_the_same_command_always_finishes_with_the_same_digests(project: Path, code: Path) -> None:
    chance = random.Random(SEED)
    say(f"seed {SEED}, {KILLS} kills; {platform.platform()}, Python {platform.python_version()}")
    began = time.monotonic()
    expected = finish(project, "whole", start(project, "whole", code))
    tally = Tally(time.monotonic() - began)
    check_end(project, "whole", expected, expected)
    say(f"uninterrupted: {tally.seconds_whole:.0f} s, digests {json.dumps(expected)}")
    planned = moments(chance)
    while tally.kills < KILLS:
        name = f"wd{tally.workdirs}"
        found = kill_until_finished(project, name, code, planned, chance, tally)
        check_end(project, name, found, expected)
        tally.workdirs += 1
        shutil.rmtree(project / name)
    by_stage = ", ".join(f"{stage} {n}" for stage, n in tally.hits.most_common())
    say(
        f"{tally.kills} kills ({tally.groups} of the whole process group) in {tally.workdirs} workdirs and {tally.commands} commands, "
        f"{time.monotonic() - began:.0f} s; hit: {by_stage}"
    )


def say(text: str) -> None:
    print(f"stress: {text}", flush=True)


def moments(chance: random.Random) -> Iterator[float]:
    """Moments spread evenly over a whole run, as parts of its duration: as many strata as kills, in random order, again and again."""
    while True:
        strata = list(range(KILLS))
        chance.shuffle(strata)
        yield from ((stratum + chance.random()) / KILLS for stratum in strata)


def kill_until_finished(
    project: Path, name: str, code: Path, planned: Iterator[float], chance: random.Random, tally: Tally
) -> dict[str, str]:
    """Start the same command again and again, each time killed at the next moment, until one comes to its end before. Its digests."""
    fresh = True
    while True:
        began, before = time.monotonic(), len(runs.every(Workdir(project / name)))
        child = start(project, name, code)
        tally.commands += 1
        if tally.kills >= KILLS:
            return finish(project, name, child)
        moment, group = next(planned) * tally.seconds_whole, chance.random() < GROUP_SHARE
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            kill(child, group=group)
            hit = stage_hit(project / name, before)
            tally.hits[hit] += 1
            tally.groups += group
            say(f"kill {tally.kills}: {moment:.1f} s into a command, in {hit}" + (", the whole group" if group else ""))
            wait_until_alone(project / name)
            fresh = False
        except KeyboardInterrupt:
            kill(child, group=True)
            raise
        else:
            if fresh:  # the machine has less to do than when a whole run was measured last
                tally.seconds_whole = time.monotonic() - began
            return finish(project, name, child)


def kill(child: subprocess.Popen[str], *, group: bool) -> None:
    if group:
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.communicate()


def stage_hit(workdir: Path, before: int) -> str:
    """The stage the newest run was in or had just ended; "start" before its first one. `before` runs were there when it was started."""
    known = runs.every(Workdir(workdir))
    told = status.read_events(known[0]) if len(known) > before else []
    if not told:
        return "start"
    stage = str(told[-1]["stage"])
    return f"after {stage}" if told[-1]["event"] == "finished" else stage


def finish(project: Path, name: str, child: subprocess.Popen[str]) -> dict[str, str]:
    """Let a run come to its end. The digests of what it made, each read and checked."""
    said = child.communicate(timeout=900)[0]
    assert child.returncode == 0, said + (project / f"{name}.stderr").read_text()[-4000:]
    result: dict[str, Any] = json.loads(said)
    assert result["verdict"] in ("accepted", "unchanged"), result
    return {kind: artifacts.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items()}


def check_end(project: Path, name: str, found: dict[str, str], expected: dict[str, str]) -> None:
    """The digests are those of an uninterrupted run, and nothing is left of those that were killed."""
    assert found == expected
    work = Workdir(project / name)
    assert left_of(work.root) == []
    assert files(work.store / "unfinished") == []
    assert files(work.state / "fine_tuning") == []
    assert [run.name for run in runs.every(work) if run.reserve.exists()] == []
    assert [path.name for path in work.root.iterdir() if "lock" in path.name] == []
    states = Counter(run.state for run in runs.every(work))
    assert set(states) <= {"finished", "killed"}, states
    check_registry(work)


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def check_registry(work: Workdir) -> None:
    client = tracking.connect(f"sqlite:///{work.root / 'mlflow.db'}").MlflowClient()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    open_runs = client.search_runs(experiments, "attributes.status = 'RUNNING'")
    assert [(run.info.run_name, run.data.tags.get("mlflow.parentRunId")) for run in open_runs] == []
    versions = client.search_model_versions(f"name = '{MODEL}'")
    assert [str(version.version) for version in versions] == ["1"]
    assert str(client.get_model_version_by_alias(MODEL, "champion").version) == "1"
