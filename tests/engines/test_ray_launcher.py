"""Trainings on a real Ray cluster of two nodes: failures, stops and resumes; the weights must equal those of a local training.

In the stress tier: two busy nodes take minutes to start. tests/engines/test_ray_curation.py uses Ray in the long tier.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime import process_control
from components.common.runtime.errors import EXIT_INTERRUPTED, TrainingError, TunelineError
from components.common.runtime.reporters import Reporter, SilentReporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import curate, list_sources
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.engines.ray_cluster import ROOT, Cluster, run_cluster
from tests.tiny import tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.stress]
STEPS = 48


class Recorder(SilentReporter):
    """Record steps and notes, and call `do` once at step `at`."""

    def __init__(self, at: int = -1, do: Callable[[], None] = lambda: None) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []
        self._at, self._do = at, do

    def metrics(self, values: Any, step: int) -> None:
        if "train_loss" in values:
            self.steps.append(step)
            if step == self._at:
                self._at = -1
                self._do()

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("ray"), dashboard=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def disable_auth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def build_recipe(tiny: Path, **changes: Any) -> dict[str, Any]:
    values = {
        "base_model": str(tiny),
        "max_steps": STEPS,
        "batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint_every": 8,
        "device": "cpu",
    }
    fixed = {"max_length": 96, "schedule": "constant_with_warmup", "learning_rate": 1e-3, "warmup_steps": 1}
    return {**values, **fixed, "processes": 2, **changes}


def build_launcher(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    launcher = {
        "kind": "ray",
        "nodes": 2,
        "threads": 1,
        "looks_every": 0.5,
        "ray": {"address": cluster.dashboard, "wait_seconds": 120},
    }
    return {**launcher, **changes}


def train(
    dataset: Artifact,
    output: Path,
    config: dict[str, Any],
    launcher: dict[str, Any] | None = None,
    reporter: Reporter | None = None,
) -> Artifact:
    settings = LauncherSettings.model_validate(launcher or {})
    fine_tuning_config = FineTuningConfig.model_validate(config)
    return finetune(
        dataset,
        output,
        fine_tuning_config,
        seed=3,
        state=output.parent / "state",
        reporter=reporter or SilentReporter(),
        launcher_settings=settings,
    )


@pytest.fixture(scope="module")
def local_model(dataset: Artifact, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The model of an uninterrupted training with two local processes."""
    return train(dataset, tmp_path_factory.mktemp("here") / "model", build_recipe(tiny))


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return all processes of a training in this folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if any(str(folder / "state") in part for part in process.cmdline()) and process.pid != os.getpid():
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def find_worker(folder: Path, rank: int) -> psutil.Process:
    """Return the training process of this rank."""
    workers = [
        process
        for process in find_processes(folder)
        if "components.fine_tuning.worker" in process.cmdline() and "torch.distributed.run" not in process.cmdline()
    ]
    return next(process for process in workers if process.environ().get("RANK") == str(rank))


def find_actor(folder: Path, node: int) -> psutil.Process:
    """Return the Ray worker that runs the training of this node."""
    runners = [
        process for process in find_processes(folder) if "components.common.launch.node_runner" in process.cmdline()
    ]
    actor = next(process for process in runners if process.environ().get("PET_NODE_RANK") == str(node)).parent()
    assert actor
    return actor


def create_client(cluster: Cluster) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(cluster.dashboard)


def list_submitted_jobs(cluster: Cluster, folder: Path) -> list[Any]:
    """Return the jobs submitted for a training in this folder."""
    return [
        job
        for job in create_client(cluster).list_jobs()
        if job.type == "SUBMISSION" and str(folder / "state") in job.entrypoint
    ]


def list_job_states(cluster: Cluster, folder: Path) -> list[str]:
    """Return the states of the jobs submitted for a training in this folder."""
    return [str(job.status) for job in list_submitted_jobs(cluster, folder)]


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.1)


def test_two_nodes_produce_the_weights_of_two_local_processes(
    cluster: Cluster, dataset: Artifact, tiny: Path, local_model: Artifact, tmp_path: Path
) -> None:
    recorder = Recorder()
    model = train(dataset, tmp_path / "model", build_recipe(tiny), build_launcher(cluster), recorder)
    assert model.sha256 == local_model.sha256
    assert recorder.steps == list(range(1, STEPS + 1)), "each step is reported once"
    assert list_job_states(cluster, tmp_path) == ["SUCCEEDED"]
    assert not find_processes(tmp_path)


@pytest.mark.parametrize("target", ["a process", "a worker of Ray", "a node"])
def test_training_resumes_to_the_same_weights_after_a_loss(
    target: str, cluster: Cluster, dataset: Artifact, tiny: Path, local_model: Artifact, tmp_path: Path
) -> None:
    def kill_target() -> None:
        if target == "a process":
            find_worker(tmp_path, 1).kill()
        elif target == "a worker of Ray":
            find_actor(tmp_path, 1).kill()
        else:
            cluster.kill_node(1)
            cluster.restart_node(1)

    recorder = Recorder(at=20, do=kill_target)
    model = train(dataset, tmp_path / "model", build_recipe(tiny), build_launcher(cluster), recorder)
    assert model.sha256 == local_model.sha256
    assert model.manifest.summary["resumed_from"] >= 16
    assert any("restarting from the last checkpoint, restart 1 of 10" in note for note in recorder.notes), (
        recorder.notes
    )
    assert list_job_states(cluster, tmp_path) == ["SUCCEEDED"], "the job itself continued"
    assert not find_processes(tmp_path)


TRAINING_SCRIPT = """
import json, sys
from pathlib import Path
from components.common.artifacts import artifact_folder
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.reporters import PlainTextReporter
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
job = json.loads(sys.argv[1])
finetune(artifact_folder.read(Path(job["dataset"])), Path(job["output"]), FineTuningConfig.model_validate(job["config"]), seed=3,
    state=Path(job["output"]).parent / "state", reporter=PlainTextReporter(sys.stdout, seconds_between=0),
    launcher_settings=LauncherSettings.model_validate(job["launcher"]))
"""


def test_next_command_attaches_to_job_of_a_killed_watcher(
    cluster: Cluster, dataset: Artifact, tiny: Path, local_model: Artifact, tmp_path: Path
) -> None:
    job = {
        "dataset": str(dataset.path),
        "output": str(tmp_path / "model"),
        "config": build_recipe(tiny),
        "launcher": build_launcher(cluster),
    }
    environment = process_control.build_python_environment(PYTHONPATH=str(ROOT))
    watcher = subprocess.Popen(
        [sys.executable, "-c", TRAINING_SCRIPT, json.dumps(job)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout
    progress = next(line for line in watcher.stdout if line.startswith("step 5:"))
    assert progress
    watcher.kill()
    watcher.wait()
    recorder = Recorder()
    model = train(dataset, tmp_path / "model", build_recipe(tiny), build_launcher(cluster), recorder)
    assert model.sha256 == local_model.sha256
    assert any(note.endswith("already exists; watching it") for note in recorder.notes)
    assert model.manifest.summary["resumed_from"] is None, "it never stopped"
    assert list_job_states(cluster, tmp_path) == ["SUCCEEDED"], "no second job was submitted"
    assert min(recorder.steps, default=STEPS) > 1, "steps reported before the kill are not reported again"


@pytest.mark.parametrize("method", ["SIGTERM", "ray job stop"])
def test_stopped_training_is_saved_and_resumed_by_same_command(
    method: str, cluster: Cluster, dataset: Artifact, tiny: Path, local_model: Artifact, tmp_path: Path
) -> None:
    def stop() -> None:
        if method == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            create_client(cluster).stop_job(list_submitted_jobs(cluster, tmp_path)[0].submission_id)

    with pytest.raises(TunelineError, match=r"interrupted after step \d+ and was saved") as error:
        train(dataset, tmp_path / "model", build_recipe(tiny), build_launcher(cluster), Recorder(at=5, do=stop))
    assert (error.value.kind, error.value.exit_code) == ("interrupted", EXIT_INTERRUPTED)
    assert list_job_states(cluster, tmp_path) == ["FAILED" if method == "SIGTERM" else "STOPPED"], (
        "it is not started again"
    )
    assert not find_processes(tmp_path)
    model = train(dataset, tmp_path / "model", build_recipe(tiny), build_launcher(cluster))
    assert model.sha256 == local_model.sha256
    assert model.manifest.summary["resumed_from"]


def test_training_error_is_reported_without_retry(
    cluster: Cluster, dataset: Artifact, tiny: Path, tmp_path: Path
) -> None:
    diverging = {"adaptation": "full", "learning_rate": 1e18, "max_steps": 8, "max_grad_norm": 1e30}
    with pytest.raises(TunelineError, match=r"is (nan|inf) at step \d+, learning rate") as error:
        train(dataset, tmp_path / "model", build_recipe(tiny, **diverging), build_launcher(cluster))
    assert (error.value.kind, error.value.exit_code) == (TrainingError.kind, TrainingError.exit_code)
    assert list_job_states(cluster, tmp_path) == ["FAILED"]
    job_folder = next(tmp_path.glob("state/fine_tuning/*/launch"))
    assert "Running entrypoint" in (job_folder / "driver.log").read_text(), "the log of the entry point is kept"
    assert (
        len([log for log in (job_folder / "nodes").rglob("stderr.log") if "TrainingError" in log.read_text()]) == 2
    ), "and that of every process"
    assert not find_processes(tmp_path)


def test_cancelled_job_leaves_no_process(cluster: Cluster, dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt  # as a second Ctrl-C

    with pytest.raises(KeyboardInterrupt):
        train(
            dataset,
            tmp_path / "model",
            build_recipe(tiny, max_steps=5000),
            build_launcher(cluster),
            Recorder(at=3, do=interrupt),
        )
    wait_until(lambda: not find_processes(tmp_path), 20)
    assert list_job_states(cluster, tmp_path) in (["STOPPED"], ["FAILED"])


def test_too_few_nodes_are_reported(cluster: Cluster, dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    launcher = build_launcher(cluster, nodes=3, ray={"address": cluster.dashboard, "wait_seconds": 6})
    recorder = Recorder()
    with pytest.raises(
        TunelineError,
        match="timeout after 6 s: the Ray job requires 3 free nodes with 1 CPU each; nodes of at least this size: 2 of 2",
    ) as error:
        train(dataset, tmp_path / "model", build_recipe(tiny, processes=3, batch_size=6), launcher, recorder)
    assert error.value.kind == "engine_missing"
    assert any("waiting for 3 free nodes with 1 CPU each" in note for note in recorder.notes)


def test_curation_as_a_cluster_job_matches_the_local_dataset(cluster: Cluster, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    words = [f"w{number}" for number in range(500)]
    rng = random.Random(7)
    answers = [" ".join(rng.choices(words, k=rng.randrange(12, 60))) for _ in range(300)]
    rows = [
        {"prompt": f"What follows {answer.split()[0]}?", "completion": answer} for answer in [*answers, *answers[:20]]
    ]
    (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (ROOT / "docs" / "how-to" / "ray.md").read_text()
    command = next(
        block for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if " curate " in block
    )
    command = command.replace("http://head:8265", cluster.dashboard).replace("/shared", str(tmp_path))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.run(
        ["sh", "-e", "-c", command], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    cluster_dataset = artifact_folder.read(tmp_path / "dataset")
    assert cluster_dataset.manifest.config["engine"] == "ray"
    config = DataCurationConfig.model_validate({"sources": [str(raw / "rows.jsonl")]})
    local_dataset = curate(
        list_sources(config.sources, tmp_path),
        tmp_path / "here",
        config,
        seed=cluster_dataset.manifest.seed,
        reporter=SilentReporter(),
    )
    assert cluster_dataset.sha256 == local_dataset.sha256
    assert cluster_dataset.manifest.summary["rows"]["rejected"]["exact_duplicate"] == 20
