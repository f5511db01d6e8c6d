"""`tuneline run`, killed at many random points. Opt-in: `make stress`. docs/reference/stress.md has the results."""

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

from components.common.artifacts import artifact_folder
from components.common.reporting import mlflow_tracking
from components.common.workspace.artifact_store import Workdir
from pipelines.runs import run_folder, run_status
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
    """Kills by stage, started commands, finished workdirs, and the seconds of an uninterrupted run."""

    run_seconds: float
    kills_by_stage: Counter[str] = field(default_factory=Counter)
    group_kills: int = 0
    commands: int = 0
    workdirs: int = 0

    @property
    def kills(self) -> int:
        return self.kills_by_stage.total()


@pytest.fixture
def code_snapshot(tmp_path: Path) -> Path:
    """A copy of the sources: an edit during the test would change every code digest."""
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return write_project(folder)


def test_run_killed_at_random_finishes_with_same_digests(project: Path, code_snapshot: Path) -> None:
    rng = random.Random(SEED)
    log(f"seed {SEED}, {KILLS} kills; {platform.platform()}, Python {platform.python_version()}")
    started = time.monotonic()
    expected = finish(project, "whole", start(project, "whole", code_snapshot))
    tally = Tally(time.monotonic() - started)
    verify_final_state(project, "whole", expected, expected)
    log(f"uninterrupted: {tally.run_seconds:.0f} s, digests {json.dumps(expected)}")
    kill_times = draw_kill_times(rng)
    while tally.kills < KILLS:
        name = f"wd{tally.workdirs}"
        digests = kill_until_finished(project, name, code_snapshot, kill_times, rng, tally)
        verify_final_state(project, name, digests, expected)
        tally.workdirs += 1
        shutil.rmtree(project / name)
    by_stage = ", ".join(f"{stage} {count}" for stage, count in tally.kills_by_stage.most_common())
    log(
        f"{tally.kills} kills ({tally.group_kills} of the whole process group) in {tally.workdirs} workdirs and {tally.commands} commands, "
        f"{time.monotonic() - started:.0f} s; hit: {by_stage}"
    )


def log(text: str) -> None:
    print(f"stress: {text}", flush=True)


def draw_kill_times(rng: random.Random) -> Iterator[float]:
    """Yield fractions of a run's duration, stratified by the number of kills and in random order."""
    while True:
        strata = list(range(KILLS))
        rng.shuffle(strata)
        yield from ((stratum + rng.random()) / KILLS for stratum in strata)


def kill_until_finished(
    project: Path, name: str, code_snapshot: Path, kill_times: Iterator[float], rng: random.Random, tally: Tally
) -> dict[str, str]:
    """Repeat the command, killing it at the next point each time, until it finishes first. Return its digests."""
    is_first_command = True
    while True:
        started, previous_runs = time.monotonic(), len(run_folder.list_runs(Workdir(project / name)))
        child = start(project, name, code_snapshot)
        tally.commands += 1
        if tally.kills >= KILLS:
            return finish(project, name, child)
        kill_after_seconds, is_group_kill = next(kill_times) * tally.run_seconds, rng.random() < GROUP_SHARE
        try:
            child.wait(kill_after_seconds)
        except subprocess.TimeoutExpired:
            kill(child, group=is_group_kill)
            stage = find_killed_stage(project / name, previous_runs)
            tally.kills_by_stage[stage] += 1
            tally.group_kills += is_group_kill
            log(
                f"kill {tally.kills}: {kill_after_seconds:.1f} s into a command, in {stage}"
                + (", the whole group" if is_group_kill else "")
            )
            wait_until_alone(project / name)
            is_first_command = False
        except KeyboardInterrupt:
            kill(child, group=True)
            raise
        else:
            if is_first_command:  # the machine is less busy than at the previous measurement
                tally.run_seconds = time.monotonic() - started
            return finish(project, name, child)


def kill(child: subprocess.Popen[str], *, group: bool) -> None:
    if group:
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.communicate()


def find_killed_stage(workdir: Path, previous_runs: int) -> str:
    """Return the stage that the newest run was in or had just finished, or "start" before its first stage."""
    runs = run_folder.list_runs(Workdir(workdir))
    events = run_status.read_events(runs[0]) if len(runs) > previous_runs else []
    if not events:
        return "start"
    stage = str(events[-1]["stage"])
    return f"after {stage}" if events[-1]["event"] == "finished" else stage


def finish(project: Path, name: str, child: subprocess.Popen[str]) -> dict[str, str]:
    """Wait for the run to succeed, verify its artifacts and return their digests."""
    output = child.communicate(timeout=900)[0]
    assert child.returncode == 0, output + (project / f"{name}.stderr").read_text()[-4000:]
    result: dict[str, Any] = json.loads(output)
    assert result["verdict"] in ("accepted", "unchanged"), result
    return {kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in result["artifacts"].items()}


def verify_final_state(project: Path, name: str, digests: dict[str, str], expected: dict[str, str]) -> None:
    """Check that the digests are those of an uninterrupted run and that killed runs left nothing behind."""
    assert digests == expected
    work = Workdir(project / name)
    assert left_of(work.root) == []
    assert list_files(work.store / "unfinished") == []
    assert list_files(work.state / "fine_tuning") == []
    assert [run.name for run in run_folder.list_runs(work) if run.reserve.exists()] == []
    assert [path.name for path in work.root.iterdir() if "lock" in path.name] == []
    states = Counter(run.state for run in run_folder.list_runs(work))
    assert set(states) <= {"finished", "killed"}, states
    verify_registry(work)


def list_files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def verify_registry(work: Workdir) -> None:
    client = mlflow_tracking.connect(f"sqlite:///{work.root / 'mlflow.db'}").MlflowClient()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    open_runs = client.search_runs(experiments, "attributes.status = 'RUNNING'")
    assert [(run.info.run_name, run.data.tags.get("mlflow.parentRunId")) for run in open_runs] == []
    versions = client.search_model_versions(f"name = '{MODEL}'")
    assert [str(version.version) for version in versions] == ["1"]
    assert str(client.get_model_version_by_alias(MODEL, "champion").version) == "1"
