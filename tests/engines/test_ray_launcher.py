"""Trainings on a real Ray cluster of two nodes: shared, killed, lost, stopped, found again; each ends as it would here."""

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
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.common import artifacts, process
from components.common.artifacts import Artifact
from components.common.errors import EXIT_INTERRUPTED, TrainingError, TunelineError
from components.common.launch.settings import LauncherSettings
from components.common.progress import Reporter, Silent
from components.data_curation.config import DataCurationConfig
from components.data_curation.stage import curate, list_sources
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.engines.ray_cluster import ROOT, Cluster, two_nodes
from tests.tiny import tiny_model

pytestmark = [pytest.mark.ray]
STRESS = partial(pytest.param, marks=pytest.mark.stress)
STEPS = 48


class Recorder(Silent):
    """Keeps what it is told, and does something at a step, once."""

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
    with two_nodes(tmp_path_factory.mktemp("ray"), dashboard=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def recipe(tiny: Path, **changes: Any) -> dict[str, Any]:
    values = {"base_model": str(tiny), "max_steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "checkpoint_every": 8, "device": "cpu"}
    steady = {"max_length": 96, "schedule": "constant_with_warmup", "learning_rate": 1e-3, "warmup_steps": 1}
    return {**values, **steady, "processes": 2, **changes}


def where(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    told = {"kind": "ray", "nodes": 2, "threads": 1, "looks_every": 0.5, "ray": {"address": cluster.dashboard, "wait_seconds": 120}}
    return {**told, **changes}


def tune(
    dataset: Artifact, output: Path, config: dict[str, Any], launcher: dict[str, Any] | None = None, reporter: Reporter | None = None
) -> Artifact:
    settings = LauncherSettings.model_validate(launcher or {})
    tuned = FineTuningConfig.model_validate(config)
    return finetune(dataset, output, tuned, seed=3, state=output.parent / "state", reporter=reporter or Silent(), where=settings)


@pytest.fixture(scope="module")
def here(dataset: Artifact, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """What two processes on this machine make of it, undisturbed."""
    return tune(dataset, tmp_path_factory.mktemp("here") / "model", recipe(tiny))


def those_of(place: Path) -> list[psutil.Process]:
    """All processes that work for a training in this place."""
    found = []
    for one in psutil.process_iter():
        try:
            if any(str(place / "state") in part for part in one.cmdline()) and one.pid != os.getpid():
                found.append(one)
        except psutil.Error:
            continue
    return found


def worker_of(place: Path, rank: int) -> psutil.Process:
    """The process that trains as this rank."""
    ours = [
        one for one in those_of(place) if "components.fine_tuning.worker" in one.cmdline() and "torch.distributed.run" not in one.cmdline()
    ]
    return next(one for one in ours if one.environ().get("RANK") == str(rank))


def actor_of(place: Path, node: int) -> psutil.Process:
    """The worker of Ray that runs this node's part."""
    parts = [one for one in those_of(place) if "components.common.launch.node" in one.cmdline()]
    found = next(one for one in parts if one.environ().get("PET_NODE_RANK") == str(node)).parent()
    assert found
    return found


def client(cluster: Cluster) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(cluster.dashboard)


def submitted(cluster: Cluster, place: Path) -> list[Any]:
    """The jobs that were submitted for a training in this place."""
    return [job for job in client(cluster).list_jobs() if job.type == "SUBMISSION" and str(place / "state") in job.entrypoint]


def submissions(cluster: Cluster, place: Path) -> list[str]:
    """Their states."""
    return [str(job.status) for job in submitted(cluster, place)]


def wait_until(reached: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.1)


def test_two_nodes_make_the_weights_that_two_processes_here_make(
    cluster: Cluster, dataset: Artifact, tiny: Path, here: Artifact, tmp_path: Path
) -> None:
    heard = Recorder()
    made = tune(dataset, tmp_path / "model", recipe(tiny), where(cluster), heard)
    assert made.sha256 == here.sha256
    assert heard.steps == list(range(1, STEPS + 1)), "each step is told here, once"
    assert submissions(cluster, tmp_path) == ["SUCCEEDED"]
    assert not those_of(tmp_path)


@pytest.mark.parametrize("what", [STRESS("a process"), "a worker of Ray", STRESS("a node")])
def test_a_training_that_loses_something_goes_on_from_its_last_checkpoint_to_the_same_weights(
    what: str, cluster: Cluster, dataset: Artifact, tiny: Path, here: Artifact, tmp_path: Path
) -> None:
    def lose() -> None:
        if what == "a process":
            worker_of(tmp_path, 1).kill()
        elif what == "a worker of Ray":
            actor_of(tmp_path, 1).kill()
        else:
            cluster.lose(1)
            cluster.bring_back(1)

    heard = Recorder(at=20, do=lose)
    made = tune(dataset, tmp_path / "model", recipe(tiny), where(cluster), heard)
    assert made.sha256 == here.sha256
    assert made.manifest.summary["resumed_from"] >= 16
    assert any("it is started again from its last checkpoint, 1 of at most 10 times" in note for note in heard.notes), heard.notes
    assert submissions(cluster, tmp_path) == ["SUCCEEDED"], "the job itself went on"
    assert not those_of(tmp_path)


WATCHING = """
import json, sys
from pathlib import Path
from components.common import artifacts
from components.common.launch.settings import LauncherSettings
from components.common.progress import Plain
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
told = json.loads(sys.argv[1])
finetune(artifacts.read(Path(told["dataset"])), Path(told["output"]), FineTuningConfig.model_validate(told["config"]), seed=3,
    state=Path(told["output"]).parent / "state", reporter=Plain(sys.stdout, seconds_between=0),
    where=LauncherSettings.model_validate(told["launcher"]))
"""


@pytest.mark.stress
def test_a_job_whose_watcher_was_killed_goes_on_and_is_found_by_the_next(
    cluster: Cluster, dataset: Artifact, tiny: Path, here: Artifact, tmp_path: Path
) -> None:
    told = {"dataset": str(dataset.path), "output": str(tmp_path / "model"), "config": recipe(tiny), "launcher": where(cluster)}
    environment = process.python_environment(PYTHONPATH=str(ROOT))
    watching = subprocess.Popen([sys.executable, "-c", WATCHING, json.dumps(told)], env=environment, stdout=subprocess.PIPE, text=True)
    assert watching.stdout
    said = next(line for line in watching.stdout if line.startswith("step 5:"))
    assert said
    watching.kill()
    watching.wait()
    heard = Recorder()
    made = tune(dataset, tmp_path / "model", recipe(tiny), where(cluster), heard)
    assert made.sha256 == here.sha256
    assert any(note.endswith("is there already and is watched further") for note in heard.notes)
    assert made.manifest.summary["resumed_from"] is None, "it never stopped"
    assert submissions(cluster, tmp_path) == ["SUCCEEDED"], "none was started twice"
    assert min(heard.steps, default=STEPS) > 1, "what was told already is not told again"


@pytest.mark.parametrize("how", ["SIGTERM", STRESS("ray job stop")])
def test_a_stop_saves_the_work_and_the_same_command_goes_on(
    how: str, cluster: Cluster, dataset: Artifact, tiny: Path, here: Artifact, tmp_path: Path
) -> None:
    def stop() -> None:
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            client(cluster).stop_job(submitted(cluster, tmp_path)[0].submission_id)

    with pytest.raises(TunelineError, match=r"interrupted after step \d+ and is saved") as stopped:
        tune(dataset, tmp_path / "model", recipe(tiny), where(cluster), Recorder(at=5, do=stop))
    assert (stopped.value.kind, stopped.value.exit_code) == ("interrupted", EXIT_INTERRUPTED)
    assert submissions(cluster, tmp_path) == ["FAILED" if how == "SIGTERM" else "STOPPED"], "it is not started again"
    assert not those_of(tmp_path)
    made = tune(dataset, tmp_path / "model", recipe(tiny), where(cluster))
    assert made.sha256 == here.sha256
    assert made.manifest.summary["resumed_from"]


def test_what_goes_wrong_in_a_training_is_told_and_it_is_not_tried_again(
    cluster: Cluster, dataset: Artifact, tiny: Path, tmp_path: Path
) -> None:
    wild = {"adaptation": "full", "learning_rate": 1e18, "max_steps": 8, "max_grad_norm": 1e30}
    with pytest.raises(TunelineError, match=r"is (nan|inf) at step \d+, learning rate") as error:
        tune(dataset, tmp_path / "model", recipe(tiny, **wild), where(cluster))
    assert (error.value.kind, error.value.exit_code) == (TrainingError.kind, TrainingError.exit_code)
    assert submissions(cluster, tmp_path) == ["FAILED"]
    job = next(tmp_path.glob("state/fine_tuning/*/launch"))
    assert "Running entrypoint" in (job / "driver.log").read_text(), "the log of the entry point is kept"
    assert len([log for log in (job / "nodes").rglob("stderr.log") if "TrainingError" in log.read_text()]) == 2, "and that of every process"
    assert not those_of(tmp_path)


@pytest.mark.stress
def test_a_job_that_is_cancelled_leaves_no_process(cluster: Cluster, dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    def break_off() -> None:
        raise KeyboardInterrupt  # as a second Ctrl-C

    with pytest.raises(KeyboardInterrupt):
        tune(dataset, tmp_path / "model", recipe(tiny, max_steps=5000), where(cluster), Recorder(at=3, do=break_off))
    wait_until(lambda: not those_of(tmp_path), 20)
    assert submissions(cluster, tmp_path) in (["STOPPED"], ["FAILED"])


@pytest.mark.stress
def test_a_cluster_without_as_many_nodes_is_told(cluster: Cluster, dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    three = where(cluster, nodes=3, ray={"address": cluster.dashboard, "wait_seconds": 6})
    heard = Recorder()
    with pytest.raises(TunelineError, match="did not have 3 free nodes with 1 CPU each within 6 s; 2 of its 2 nodes have as much") as error:
        tune(dataset, tmp_path / "model", recipe(tiny, processes=3, batch_size=6), three, heard)
    assert error.value.kind == "engine_missing"
    assert any("it waits for 3 free nodes with 1 CPU each" in note for note in heard.notes)


def test_curation_as_a_job_of_the_cluster_makes_the_dataset_that_this_machine_makes(cluster: Cluster, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    words = [f"w{number}" for number in range(500)]
    choose = random.Random(7)
    answers = [" ".join(choose.choices(words, k=choose.randrange(12, 60))) for _ in range(300)]
    rows = [{"prompt": f"What follows {answer.split()[0]}?", "completion": answer} for answer in [*answers, *answers[:20]]]
    (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (ROOT / "docs" / "ray.md").read_text()
    command = next(block for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if " curate " in block)
    command = command.replace("http://head:8265", cluster.dashboard).replace("/shared", str(tmp_path))
    shell = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-e", "-c", command], env=shell, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    there = artifacts.read(tmp_path / "dataset")
    assert there.manifest.config["engine"] == "ray"
    config = DataCurationConfig.model_validate({"sources": [str(raw / "rows.jsonl")]})
    here = curate(list_sources(config.sources, tmp_path), tmp_path / "here", config, seed=there.manifest.seed, reporter=Silent())
    assert there.sha256 == here.sha256
    assert there.manifest.summary["rows"]["rejected"]["exact_duplicate"] == 20
