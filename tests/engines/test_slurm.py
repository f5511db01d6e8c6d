"""Batch jobs on a real Slurm of two nodes: whatever happens to the job or to who watches it, no job is lost, none is started twice, and a
training ends with the weights of one that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.launch import EVENTS
from tests.datasets import small_dataset
from tests.engines import slurm_cluster
from tests.engines.slurm_cluster import Cluster
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.tiny import tiny_model

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
STEPS = 30
RECIPE = {
    "max_steps": STEPS,
    "batch_size": 4,
    "micro_batch_size": 2,
    "checkpoint_every": 5,
    "max_length": 96,
    "learning_rate": 0.001,
    "warmup_steps": 1,
    "device": "cpu",
}
# Watches a job that counts to 50 in ten seconds, and prints its outcome.
WATCH = """
import json, sys
from pathlib import Path
from components.common import launch, process, progress
from components.common.errors import TunelineError
from components.common.launch.choice import launcher
from components.common.launch.settings import LauncherSettings
what, folder, settings = sys.argv[1], Path(sys.argv[2]), LauncherSettings.model_validate_json(sys.argv[3])
process.hear_stops()
try:
    command = launch.Command("tests.common.launched", [what, str(folder)])
    print(json.dumps(launch.run(launcher(settings), command, folder, progress.Events(folder / "told.jsonl", "fine_tuning"))))
except TunelineError as error:
    print(json.dumps(error.as_dict()))
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.two_nodes() as found:
        yield found


def wait_until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.1)


@dataclass
class Watched:
    """A command that runs a job, in a folder of its own, where what it complains of is kept."""

    cluster: Cluster
    folder: Path
    place: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What the launcher is told."""
        return {"kind": "slurm", "looks_every": 0.3, "threads": 1, **self.place}

    @property
    def variables(self) -> dict[str, str]:
        """What the command finds in its environment."""
        return {"SLURM_CONF": str(self.cluster.configuration)}

    @property
    def work(self) -> Path:
        """The job's folder."""
        return self.folder

    def command(self) -> list[str]:
        """The command."""
        return [sys.executable, "-P", "-c", WATCH, "count", str(self.folder), json.dumps(self.settings)]

    def start(self) -> subprocess.Popen[str]:
        """Start the command, which leads a session of its own."""
        env = environment(ROOT, **self.variables)
        with (self.folder / "stderr").open("ab") as err:
            return subprocess.Popen(
                self.command(), cwd=self.folder, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True, env=env
            )

    def end(self, child: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
        """What it printed; no job of it is left then."""
        said = child.communicate(timeout=300)[0]
        assert child.returncode == code, said + (self.folder / "stderr").read_text()
        wait_until(lambda: not self.cluster.jobs(), 30)
        found: dict[str, Any] = json.loads(said)
        return found.get("error", found)

    def run(self, code: int = 0) -> dict[str, Any]:
        """The command to its end."""
        return self.end(self.start(), code)

    def job(self) -> str:
        """The one job that waits or runs."""
        wait_until(lambda: len(self.cluster.jobs()) == 1, 60)
        return self.cluster.jobs()[0]

    def wait_for(self, step: int) -> str:
        """Until the job has come so far. Returns its number."""
        job = self.job()
        wait_until(lambda: max(self.steps(), default=0) >= step, 120)
        return job

    def steps(self) -> list[int]:
        """The steps that the job told so far."""
        path = self.work / EVENTS
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event["done"] for event in events if event["event"] == "progress" and event["unit"] == "steps"]

    def told(self) -> str:
        """What was said of the job."""
        events = [json.loads(line) for line in (self.folder / "told.jsonl").read_text().splitlines()]
        return "\n".join(event["text"] for event in events if event["event"] == "note")

    def queue_at_once(self, job: str) -> None:
        """Slurm lets a requeued job wait for two minutes. It needs some seconds: a node refuses what is as old as the first try's end."""
        wait_until(lambda: self.cluster.run("squeue", "-h", "-j", job, "-o", "%T %r").split() == ["PENDING", "BeginTime"], 100)
        time.sleep(6)
        self.cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def kill(self, child: subprocess.Popen[str]) -> None:
        """Kill the command and all it started here."""
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def counting(cluster: Cluster, tmp_path: Path) -> Watched:
    cluster.wait_idle()
    return Watched(cluster, tmp_path)


def test_a_job_that_ends_without_a_word_is_told_of_from_its_own_log(counting: Watched) -> None:
    counting.place = {"slurm": {"setup": ["echo the file system scratch is not mounted >&2", "exit 9"]}}
    error = counting.run(1)
    assert error["kind"] == "job_lost"
    assert error["message"].endswith("ended without an outcome: the file system scratch is not mounted")


def test_a_job_that_slurm_refuses_is_refused_in_slurms_words(counting: Watched) -> None:
    counting.place = {"slurm": {"partition": "nowhere"}}
    error = counting.run(1)
    assert error["kind"] == "launcher"
    assert "invalid partition specified: nowhere" in error["message"]


def test_a_job_whose_dependency_has_failed_ends_and_one_whose_dependency_comes_runs(counting: Watched) -> None:
    first = counting.cluster.run("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "exit 1").strip()
    counting.place = {"slurm": {"dependency": f"afterok:{first}"}}
    child = counting.start()
    wait_until((counting.folder / "told.jsonl").exists, 60)
    wait_until(lambda: "waits: PENDING (Dependency)" in counting.told(), 60)
    counting.cluster.run("scontrol", "release", first)
    error = counting.end(child, 1)
    assert error["kind"] == "job_ended"
    assert "was ended from outside: CANCELLED (DependencyNeverSatisfied)" in error["message"]
    counting.place = {"slurm": {"dependency": f"afternotok:{first}"}}
    assert counting.run() == {"counted": 50, "starts": 1}


def test_a_job_waits_while_all_nodes_are_drained_and_one_that_somebody_cancels_saves_and_goes_on_when_asked_again(
    counting: Watched,
) -> None:
    for node in ("n1", "n2"):
        counting.cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=maintenance")
    child = counting.start()
    job = counting.job()
    wait_until(lambda: f"Slurm job {job} waits: PENDING (" in counting.told(), 30)
    for node in ("n1", "n2"):
        counting.cluster.resume(node)
    counting.wait_for(10)
    counting.cluster.run("scancel", job)
    error = counting.end(child, 75)
    assert error["message"].startswith(f"Slurm job {job} was ended from outside: CANCELLED")
    saved = int(error["message"].split("; saved at ")[1])
    assert counting.run() == {"counted": 50, "starts": 2}
    assert counting.steps()[0] == saved + 1


def test_a_job_out_of_time_saves_and_queues_itself_anew_as_often_as_it_may(counting: Watched) -> None:
    """Slurm looks at time limits twice a minute, and may send the signal a minute early: at any second of this job."""
    (counting.folder / "goal").write_text("500")
    counting.place = {"resumes": 1, "slurm": {"time_limit": "1", "save_seconds": 30}}
    child = counting.start()
    job = counting.wait_for(1)
    counting.queue_at_once(job)
    saved = counting.steps()[-1]
    counting.wait_for(saved + 1)
    assert saved < 500
    counting.cluster.run("scancel", "--signal=TERM", job)  # it was resumed as often as it may
    error = counting.end(child, 75)
    assert error["message"] == f"saved at {counting.steps()[-1]}"
    assert (counting.folder / f"slurm-{job}.log").read_text().count("queued anew") == 1


def test_a_job_whose_node_is_lost_and_one_that_a_better_job_preempts_run_again_by_themselves(counting: Watched) -> None:
    child = counting.start()
    job = counting.wait_for(10)
    node = counting.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    counting.cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    counting.queue_at_once(job)
    counting.cluster.resume(node)
    first = counting.steps()[-1]
    counting.wait_for(first + 1)
    urgent = ["sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    other = counting.cluster.run(*urgent).strip()
    wait_until(lambda: counting.cluster.state(other) in ("COMPLETED", ""), 60)
    counting.queue_at_once(job)
    result = counting.end(child)
    assert (result["counted"], result["starts"]) == (50, 3)


def test_slurmctld_may_be_gone_before_a_job_is_handed_in_and_while_it_runs(counting: Watched) -> None:
    counting.cluster.end("slurmctld")
    child = counting.start()
    time.sleep(12)
    assert child.poll() is None
    counting.cluster.start_controller()
    job = counting.wait_for(5)
    counting.cluster.end("slurmctld", signal.SIGKILL)
    wait_until(lambda: "Slurm does not answer" in counting.told(), 60)
    counting.cluster.start_controller()
    assert counting.end(child) == {"counted": 50, "starts": 1}
    assert counting.told().count("was started") == 1
    assert [path.name for path in counting.folder.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_a_slurm_that_stays_silent_is_told_of_and_the_job_is_found_again(counting: Watched) -> None:
    counting.place = {"patience_seconds": 1}
    child = counting.start()
    job = counting.wait_for(2)
    counting.cluster.end("slurmctld", signal.SIGKILL)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 1
    assert json.loads(said)["kind"] == "engine_missing"
    counting.cluster.start_controller()
    wait_until(lambda: counting.cluster.state(job) in ("RUNNING", "COMPLETED"), 60)
    assert counting.run() == {"counted": 50, "starts": 1}
    assert "is there already" in counting.told()


@pytest.mark.parametrize("ended", [False, True], ids=["while the job runs", "when the job has ended"])
def test_who_watches_may_be_killed_and_finds_the_job_again(counting: Watched, ended: bool) -> None:
    child = counting.start()
    job = counting.wait_for(3)
    counting.kill(child)
    assert counting.cluster.jobs() == [job]
    if ended:
        counting.cluster.wait_for(job, "COMPLETED")
    assert counting.run() == {"counted": 50, "starts": 1}
    events = [json.loads(line) for line in (counting.folder / "told.jsonl").read_text().splitlines()]
    steps = [event["done"] for event in events if event["event"] == "progress"]
    assert steps == sorted(set(steps)), "what was told is not told again"


def test_who_is_killed_between_handing_a_job_in_and_writing_its_number_down_finds_it_again(counting: Watched) -> None:
    child = counting.start()
    job = counting.wait_for(3)
    counting.kill(child)
    (counting.folder / "slurm.json").unlink()
    assert counting.run() == {"counted": 50, "starts": 1}
    assert [path.name for path in counting.folder.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_a_step_that_is_cancelled_has_its_job_save_and_end_for_good(counting: Watched) -> None:
    child = counting.start()
    counting.wait_for(10)
    child.terminate()
    error = counting.end(child, 75)
    assert error["message"] == f"saved at {counting.steps()[-1]}"
    time.sleep(2)
    assert counting.cluster.jobs() == []


@dataclass
class Training(Watched):
    """A `tuneline finetune`, as a person on a login node gives it."""

    world: Path = Path()
    recipe: dict[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        recipe = {**RECIPE, "base_model": str(self.world / "tiny"), **self.recipe}
        (self.folder / "c.yaml").write_text(yaml.safe_dump({"seed": 3, "fine_tuning": recipe}))
        (self.folder / "platform.yaml").write_text(yaml.safe_dump({"launcher": self.settings}))
        words = ["finetune", str(self.world / "dataset"), "-o", "model", "-c", "c.yaml", "-p", "platform.yaml", "--workdir", "wd", "--json"]
        return [*COMMAND, *words]

    @property
    def work(self) -> Path:
        return next(iter(self.folder.glob("wd/state/fine_tuning/*/launch")), self.folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a dataset."""
    folder = tmp_path_factory.mktemp("world")
    tiny_model(folder / "tiny")
    small_dataset(folder / "dataset")
    return folder


@pytest.fixture
def training(cluster: Cluster, world: Path, tmp_path: Path) -> Training:
    cluster.wait_idle()
    return Training(cluster, tmp_path, world=world)


def test_a_training_on_two_nodes_that_is_stopped_at_the_end_of_its_time_has_the_weights_of_two_processes_on_one(
    training: Training, cluster: Cluster, tmp_path: Path
) -> None:
    training.recipe, training.place = {"processes": 2}, {"nodes": 2}
    child = training.start()
    job = training.wait_for(8)
    assert "NumNodes=2" in cluster.run("scontrol", "show", "job", job)
    cluster.run("scancel", "--signal=TERM", job)  # as Slurm itself, `save_seconds` before the limit
    training.queue_at_once(job)
    result = training.end(child)
    assert result["steps"] == STEPS
    assert 8 <= result["resumed_from"] < STEPS
    (tmp_path / "one").mkdir()
    here = Training(cluster, tmp_path / "one", {"kind": "process"}, training.world, training.recipe)
    assert here.run()["sha256"] == result["sha256"]


def test_a_sweep_is_an_array_whose_tasks_go_on_when_nobody_watches_and_are_found_again(
    training: Training, cluster: Cluster, tmp_path: Path
) -> None:
    training.recipe = {"sweep": {"vary": {"learning_rate": [0.001, 0.0001, 0.00001]}, "parallel": 1}, "max_steps": 6, "checkpoint_every": 3}

    def tasks() -> list[str]:
        return cluster.run("squeue", "-r", "-h", "-o", "%i").split()

    child = training.start()
    wait_until(lambda: len(tasks()) == 3, 120)
    (array,) = {task.split("_")[0] for task in tasks()}
    training.kill(child)
    wait_until(lambda: len(tasks()) < 3, 240)  # Slurm itself starts the next one
    assert tasks()
    result = training.end(training.start())
    assert cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true").strip() == str(int(array) + 3), (
        "nothing was started twice"
    )
    assert [one["failed"] for one in result["sweep"]] == [None] * 3
    assert result["sha256"] == result["sweep"][0]["sha256"]
    (tmp_path / "one").mkdir()
    best = {**training.recipe, **result["sweep"][0]["recipe"], "sweep": {}}
    here = Training(cluster, tmp_path / "one", {"kind": "process"}, training.world, best)
    assert here.run()["sha256"] == result["sha256"]


def test_a_training_that_fails_by_itself_says_what_it_says_anywhere(training: Training) -> None:
    training.recipe = {"learning_rate": 1e30}
    error = training.run(1)
    assert error["kind"] == "training"
    assert error["message"].startswith(("the train loss is nan", "the train loss is inf"))


def test_a_scheduler_that_is_not_here_is_named(tmp_path: Path) -> None:
    watched = Watched(Cluster(tmp_path), tmp_path)
    env = environment(ROOT, PATH=str(tmp_path))
    done = subprocess.run(watched.command(), env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["message"] == "there is no sbatch here"


@pytest.mark.daft
def test_the_fine_tuning_of_the_demo_runs_as_a_batch_job_and_makes_the_model_that_it_makes_here(cluster: Cluster, tmp_path: Path) -> None:
    """The embedded model on the demo dataset, for two steps."""
    env = environment(ROOT, SLURM_CONF=str(cluster.configuration), TUNELINE_THREADS="1", HF_HUB_OFFLINE="1")
    place = {"launcher": {"kind": "slurm", "looks_every": 1, "threads": 1, "slurm": {"cpus": 1}}}
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump(place))
    short = ["--set", "fine_tuning.max_steps=2", "--set", "fine_tuning.batch_size=2", "--set", "fine_tuning.validation_rows=8"]

    def told(*words: str) -> dict[str, Any]:
        command = [*COMMAND, *words, "--workdir", "wd", "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def next_job() -> int:
        return int(cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true"))

    told("curate", "demo:python-docs", "-o", "rows")
    before = next_job()
    there = told("finetune", "rows", "-o", "there", "-p", "platform.yaml", *short)
    assert next_job() == before + 2, "one job was its training"
    here = told("finetune", "rows", "-o", "here", *short)
    assert (there["steps"], there["sha256"]) == (2, here["sha256"])
