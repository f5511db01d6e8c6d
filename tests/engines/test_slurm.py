"""Batch jobs on a real Slurm cluster of two nodes.

Whatever fails, no job is lost or started twice, and a training ends with the weights of an uninterrupted one.
"""

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

from components.common.launch import EVENTS_FILENAME
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
# Runs a job that counts to 50 in ten seconds, watches it and prints its outcome.
WATCH_SCRIPT = """
import json, sys
from pathlib import Path
from components.common import launch
from components.common.runtime import process_control, reporters
from components.common.runtime.errors import TunelineError
from components.common.launch.launcher_registry import create_launcher
from components.common.launch.launcher_settings import LauncherSettings
action, folder, settings = sys.argv[1], Path(sys.argv[2]), LauncherSettings.model_validate_json(sys.argv[3])
process_control.install_stop_handlers()
try:
    command = launch.Command("tests.common.job_program", [action, str(folder)])
    print(json.dumps(launch.run(create_launcher(settings), command, folder, reporters.EventLog(folder / "watch.jsonl", "fine_tuning"))))
except TunelineError as error:
    print(json.dumps(error.as_dict()))
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.run_cluster() as cluster:
        yield cluster


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.1)


@dataclass
class JobCommand:
    """A command that runs and watches a job, with a separate folder for its files and standard error."""

    cluster: Cluster
    folder: Path
    launcher: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The launcher settings."""
        return {"kind": "slurm", "looks_every": 0.3, "threads": 1, **self.launcher}

    @property
    def variables(self) -> dict[str, str]:
        """The command's environment variables."""
        return {"SLURM_CONF": str(self.cluster.configuration_file)}

    @property
    def job_folder(self) -> Path:
        """The job's folder."""
        return self.folder

    def command(self) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-P", "-c", WATCH_SCRIPT, "count", str(self.folder), json.dumps(self.settings)]

    def start(self) -> subprocess.Popen[str]:
        """Start the command in a separate session."""
        env = environment(ROOT, **self.variables)
        with (self.folder / "stderr").open("ab") as err:
            return subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                start_new_session=True,
                env=env,
            )

    def finish(self, child: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
        """Wait for the command and its jobs to end; return its result or error."""
        output = child.communicate(timeout=300)[0]
        assert child.returncode == code, output + (self.folder / "stderr").read_text()
        wait_until(lambda: not self.cluster.list_jobs(), 300)
        result: dict[str, Any] = json.loads(output)
        return result.get("error", result)

    def run(self, code: int = 0) -> dict[str, Any]:
        """Run the command and return its result or error."""
        return self.finish(self.start(), code)

    def wait_for_job(self) -> str:
        """Wait until exactly one job is pending or running; return its id."""
        wait_until(lambda: len(self.cluster.list_jobs()) == 1, 300)
        return self.cluster.list_jobs()[0]

    def wait_for_step(self, step: int) -> str:
        """Wait until the job has reported the step; return the job's id."""
        job = self.wait_for_job()
        wait_until(lambda: max(self.list_steps(), default=0) >= step, 600)
        return job

    def list_steps(self) -> list[int]:
        """Return the steps that the job has reported so far."""
        events_file = self.job_folder / EVENTS_FILENAME
        events = [json.loads(line) for line in events_file.read_text().splitlines()] if events_file.exists() else []
        return [event["done"] for event in events if event["event"] == "progress" and event["unit"] == "steps"]

    def read_notes(self) -> str:
        """Return the notes about the job, one per line."""
        events = [json.loads(line) for line in (self.folder / "watch.jsonl").read_text().splitlines()]
        return "\n".join(event["text"] for event in events if event["event"] == "note")

    def skip_requeue_delay(self, job: str) -> None:
        """Start a requeued job before Slurm's delay of two minutes, but after the 6 s in which a node would refuse it."""
        deadline = time.monotonic() + 300
        while (state := self.cluster.run("squeue", "-h", "-j", job, "-o", "%T %r").split()) != ["PENDING", "BeginTime"]:
            if time.monotonic() > deadline:
                pytest.fail(f"job {job} is {state}; its log: {(self.job_folder / f'slurm-{job}.log').read_text()}")
            time.sleep(0.1)
        time.sleep(6)
        self.cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def kill(self, child: subprocess.Popen[str]) -> None:
        """Kill the command and its child processes on this machine."""
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def job_command(cluster: Cluster, tmp_path: Path) -> JobCommand:
    cluster.wait_until_idle()
    return JobCommand(cluster, tmp_path)


def test_job_without_outcome_is_reported_from_its_log(job_command: JobCommand) -> None:
    job_command.launcher = {"slurm": {"setup": ["echo the file system scratch is not mounted >&2", "exit 9"]}}
    error = job_command.run(1)
    assert error["kind"] == "job_lost"
    assert error["message"].endswith("ended without an outcome: the file system scratch is not mounted")


def test_job_rejected_by_slurm_quotes_its_error(job_command: JobCommand) -> None:
    job_command.launcher = {"slurm": {"partition": "nowhere"}}
    error = job_command.run(1)
    assert error["kind"] == "launcher"
    assert "invalid partition specified: nowhere" in error["message"]


def test_job_runs_or_ends_according_to_its_dependency(job_command: JobCommand) -> None:
    first = job_command.cluster.run("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "exit 1").strip()
    job_command.launcher = {"slurm": {"dependency": f"afterok:{first}"}}
    child = job_command.start()
    wait_until((job_command.folder / "watch.jsonl").exists, 300)
    wait_until(lambda: "is waiting: PENDING (Dependency)" in job_command.read_notes(), 300)
    job_command.cluster.run("scontrol", "release", first)
    error = job_command.finish(child, 1)
    assert error["kind"] == "job_ended"
    assert "was terminated externally: CANCELLED (DependencyNeverSatisfied)" in error["message"]
    job_command.launcher = {"slurm": {"dependency": f"afternotok:{first}"}}
    assert job_command.run() == {"counted": 50, "starts": 1}


def test_job_waits_for_drained_nodes_and_resumes_after_scancel(
    job_command: JobCommand,
) -> None:
    for node in ("n1", "n2"):
        job_command.cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=maintenance")
    child = job_command.start()
    job = job_command.wait_for_job()
    wait_until(lambda: f"Slurm job {job} is waiting: PENDING (" in job_command.read_notes(), 300)
    for node in ("n1", "n2"):
        job_command.cluster.resume_node(node)
    job_command.wait_for_step(10)
    job_command.cluster.run("scancel", job)
    error = job_command.finish(child, 75)
    assert error["message"].startswith(f"Slurm job {job} was terminated externally: CANCELLED")
    saved = int(error["message"].split("; saved at ")[1])
    assert job_command.run() == {"counted": 50, "starts": 2}
    assert job_command.list_steps()[0] == saved + 1


def test_job_at_time_limit_saves_and_requeues_up_to_the_limit(job_command: JobCommand) -> None:
    """Slurm checks time limits every 30 s; on a busy machine, saving and requeueing can take longer than that."""
    (job_command.folder / "goal").write_text("5000")
    job_command.launcher = {"resumes": 1, "slurm": {"time_limit": "2", "save_seconds": 90}}
    child = job_command.start()
    job = job_command.wait_for_step(1)
    job_command.skip_requeue_delay(job)
    saved = job_command.list_steps()[-1]
    job_command.wait_for_step(saved + 1)
    assert saved < 5000
    job_command.cluster.run("scancel", "--signal=TERM", job)  # `resumes` is used up
    error = job_command.finish(child, 75)
    assert error["message"] == f"saved at {job_command.list_steps()[-1]}"
    assert (job_command.folder / f"slurm-{job}.log").read_text().count("requeued") == 1


def test_job_restarts_after_node_loss_and_preemption(job_command: JobCommand) -> None:
    child = job_command.start()
    job = job_command.wait_for_step(10)
    node = job_command.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    job_command.cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    job_command.skip_requeue_delay(job)
    job_command.cluster.resume_node(node)
    first = job_command.list_steps()[-1]
    job_command.wait_for_step(first + 1)
    urgent = ["sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    other = job_command.cluster.run(*urgent).strip()
    wait_until(lambda: job_command.cluster.get_state(other) in ("COMPLETED", ""), 300)
    job_command.skip_requeue_delay(job)
    result = job_command.finish(child)
    assert (result["counted"], result["starts"]) == (50, 3)


def test_job_survives_slurmctld_outages(job_command: JobCommand) -> None:
    job_command.cluster.stop("slurmctld")
    child = job_command.start()
    time.sleep(12)
    assert child.poll() is None
    job_command.cluster.start_controller()
    job = job_command.wait_for_step(5)
    job_command.cluster.kill_controller(job)
    wait_until(lambda: "Slurm does not answer" in job_command.read_notes(), 300)
    job_command.cluster.start_controller()
    assert job_command.finish(child) == {"counted": 50, "starts": 1}
    assert job_command.read_notes().count("was started") == 1
    assert [path.name for path in job_command.folder.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_silent_slurm_is_reported_and_job_is_found_again(job_command: JobCommand) -> None:
    job_command.launcher = {"patience_seconds": 1}
    child = job_command.start()
    job = job_command.wait_for_step(2)
    job_command.cluster.kill_controller(job)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 1
    assert json.loads(output)["kind"] == "engine_missing"
    job_command.cluster.start_controller()
    wait_until(lambda: job_command.cluster.get_state(job) in ("RUNNING", "COMPLETED"), 300)
    assert job_command.run() == {"counted": 50, "starts": 1}
    assert "already exists; watching it" in job_command.read_notes()


@pytest.mark.parametrize("ended", [False, True], ids=["while the job runs", "when the job has ended"])
def test_killed_watcher_finds_its_job_again(job_command: JobCommand, ended: bool) -> None:
    child = job_command.start()
    job = job_command.wait_for_step(3)
    job_command.kill(child)
    assert job_command.cluster.list_jobs() == [job]
    if ended:
        job_command.cluster.wait_for_state(job, "COMPLETED")
    assert job_command.run() == {"counted": 50, "starts": 1}
    events = [json.loads(line) for line in (job_command.folder / "watch.jsonl").read_text().splitlines()]
    steps = [event["done"] for event in events if event["event"] == "progress"]
    assert steps == sorted(set(steps)), "no step is reported twice"


def test_job_is_found_after_a_kill_before_its_id_was_stored(job_command: JobCommand) -> None:
    child = job_command.start()
    job = job_command.wait_for_step(3)
    job_command.kill(child)
    (job_command.folder / "slurm.json").unlink()
    assert job_command.run() == {"counted": 50, "starts": 1}
    assert [path.name for path in job_command.folder.glob("slurm-*.log")] == [f"slurm-{job}.log"]


def test_cancelled_step_saves_and_ends_its_job(job_command: JobCommand) -> None:
    child = job_command.start()
    job_command.wait_for_step(10)
    child.terminate()
    error = job_command.finish(child, 75)
    assert error["message"] == f"saved at {job_command.list_steps()[-1]}"
    time.sleep(2)
    assert job_command.cluster.list_jobs() == []


@dataclass
class Training(JobCommand):
    """`tuneline finetune`, started on a login node."""

    model_and_dataset: Path = Path()
    recipe: dict[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        recipe = {**RECIPE, "base_model": str(self.model_and_dataset / "tiny"), **self.recipe}
        (self.folder / "c.yaml").write_text(yaml.safe_dump({"seed": 3, "fine_tuning": recipe}))
        (self.folder / "platform.yaml").write_text(yaml.safe_dump({"launcher": self.settings}))
        words = [
            "finetune",
            str(self.model_and_dataset / "dataset"),
            "-o",
            "model",
            "-c",
            "c.yaml",
            "-p",
            "platform.yaml",
            "--workdir",
            "wd",
            "--json",
        ]
        return [*COMMAND, *words]

    @property
    def job_folder(self) -> Path:
        return next(iter(self.folder.glob("wd/state/fine_tuning/*/launch")), self.folder)


@pytest.fixture(scope="module")
def model_and_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a dataset."""
    folder = tmp_path_factory.mktemp("world")
    tiny_model(folder / "tiny")
    small_dataset(folder / "dataset")
    return folder


@pytest.fixture
def training(cluster: Cluster, model_and_dataset: Path, tmp_path: Path) -> Training:
    cluster.wait_until_idle()
    return Training(cluster, tmp_path, model_and_dataset=model_and_dataset)


def test_two_node_training_stopped_and_requeued_matches_local_weights(
    training: Training, cluster: Cluster, tmp_path: Path
) -> None:
    training.recipe, training.launcher = {"processes": 2}, {"nodes": 2}
    child = training.start()
    job = training.wait_for_step(8)
    assert "NumNodes=2" in cluster.run("scontrol", "show", "job", job)
    cluster.run("scancel", "--signal=TERM", job)  # as Slurm itself, `save_seconds` before the limit
    training.skip_requeue_delay(job)
    result = training.finish(child)
    assert result["steps"] == STEPS
    assert 8 <= result["resumed_from"] < STEPS
    (tmp_path / "one").mkdir()
    local = Training(cluster, tmp_path / "one", {"kind": "process"}, training.model_and_dataset, training.recipe)
    assert local.run()["sha256"] == result["sha256"]


@pytest.mark.stress
def test_sweep_array_continues_without_watcher_and_is_found_again(
    training: Training, cluster: Cluster, tmp_path: Path
) -> None:
    training.recipe = {
        "sweep": {"vary": {"learning_rate": [0.001, 0.0001, 0.00001]}, "parallel": 1},
        "max_steps": 6,
        "checkpoint_every": 3,
    }

    def list_tasks() -> list[str]:
        return cluster.run("squeue", "-r", "-h", "-o", "%i").split()

    child = training.start()
    wait_until(lambda: len(list_tasks()) == 3, 600)
    (array,) = {task.split("_")[0] for task in list_tasks()}
    training.kill(child)
    wait_until(lambda: len(list_tasks()) < 3, 600)  # Slurm itself starts the next one
    assert list_tasks()
    result = training.finish(training.start())
    assert cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true").strip() == str(int(array) + 3), (
        "no job was submitted twice"
    )
    assert [entry["failed"] for entry in result["sweep"]] == [None] * 3
    assert result["sha256"] == result["sweep"][0]["sha256"]
    (tmp_path / "one").mkdir()
    best_recipe = {**training.recipe, **result["sweep"][0]["recipe"], "sweep": {}}
    local = Training(cluster, tmp_path / "one", {"kind": "process"}, training.model_and_dataset, best_recipe)
    assert local.run()["sha256"] == result["sha256"]


def test_training_error_is_the_same_as_without_slurm(training: Training) -> None:
    training.recipe = {"learning_rate": 1e30}
    error = training.run(1)
    assert error["kind"] == "training"
    assert error["message"].startswith(("the train loss is nan", "the train loss is inf"))


def test_missing_sbatch_is_reported(tmp_path: Path) -> None:
    job_command = JobCommand(Cluster(tmp_path), tmp_path)
    env = environment(ROOT, PATH=str(tmp_path))
    process = subprocess.run(job_command.command(), env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert process.returncode == 1
    assert json.loads(process.stdout)["message"] == "sbatch is not installed on this machine"


@pytest.mark.daft
@pytest.mark.stress
def test_demo_fine_tuning_as_batch_job_matches_local_model(cluster: Cluster, tmp_path: Path) -> None:
    """The embedded model on the demo dataset, for two steps."""
    env = environment(ROOT, SLURM_CONF=str(cluster.configuration_file), TUNELINE_THREADS="1", HF_HUB_OFFLINE="1")
    platform = {"launcher": {"kind": "slurm", "looks_every": 1, "threads": 1, "slurm": {"cpus": 1}}}
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump(platform))
    overrides = [
        "--set",
        "fine_tuning.max_steps=2",
        "--set",
        "fine_tuning.batch_size=2",
        "--set",
        "fine_tuning.validation_rows=8",
    ]

    def run_command(*words: str) -> dict[str, Any]:
        command = [*COMMAND, *words, "--workdir", "wd", "--json"]
        process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr[-4000:]
        result: dict[str, Any] = json.loads(process.stdout)
        return result

    def submit_probe_job() -> int:
        return int(cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true"))

    run_command("curate", "demo:python-docs", "-o", "rows")
    job_id = submit_probe_job()
    batch_model = run_command("finetune", "rows", "-o", "there", "-p", "platform.yaml", *overrides)
    assert submit_probe_job() == job_id + 2, "the training was exactly one job"
    local_model = run_command("finetune", "rows", "-o", "here", *overrides)
    assert (batch_model["steps"], batch_model["sha256"]) == (2, local_model["sha256"])
