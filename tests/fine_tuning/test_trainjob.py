"""A training as a TrainJob: the command that the object carries, run for real as two processes with what Kubeflow Trainer's runtime
injects, ends with the weights that two processes of one machine come to. The cluster is the stand-in of tests/job_api.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import launch
from components.common.artifacts import Artifact
from components.common.hashing import ROOT
from components.common.launch.settings import LauncherSettings
from components.common.progress import Silent
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests import job_api
from tests.datasets import small_dataset
from tests.job_api import JobApi, Pod
from tests.kubernetes_api import kubeconfig
from tests.tiny import tiny_model


class Told(Silent):
    """Keeps notes and steps, and does something at one."""

    def __init__(self, api: JobApi, at: int = -1) -> None:
        self.api, self.at = api, at
        self.steps: list[int] = []
        self.notes: list[str] = []

    def metrics(self, values: Any, step: int) -> None:
        if "train_loss" in values:
            self.steps.append(step)
            if step == self.at:
                self.api.admits, self.at = False, -1

    def note(self, text: str) -> None:
        self.notes.append(text)
        if "evicted by Kueue" in text:
            self.api.admits = True


def two_nodes(pod: Pod) -> int:
    """The TrainJob's command as the pods of two nodes, with the variables that the runtime's torch plugin injects
    (kubeflow/trainer, pkg/runtime/framework/plugins/torch): who asks the pods to end asks both."""
    trainer = pod.job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {one["name"]: one["value"] for one in trainer["env"]}
    injected = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), "PYTHONPATH": str(ROOT), **own, **injected}
    nodes = [subprocess.Popen(trainer["command"], env={**environment, "PET_NODE_RANK": str(rank)}) for rank in range(2)]
    try:
        while any(node.poll() is None for node in nodes) and not pod.asked.wait(0.05):
            pass
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        return max(node.wait(60) for node in nodes)
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny-llama")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobApi]:
    with job_api.serving(JobApi(works=[two_nodes])) as api:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", api.url, namespace="team-a", token=api.token)))
        yield api


def tune(dataset: Artifact, tiny: Path, output: Path, reporter: Silent, where: LauncherSettings | None = None) -> Artifact:
    values = {"base_model": str(tiny), "max_steps": 40, "batch_size": 4, "micro_batch_size": 2, "checkpoint_every": 10, "max_length": 96}
    config = FineTuningConfig.model_validate({**values, "processes": 2, "device": "cpu", "learning_rate": 1e-3, "adaptation": "full"})
    return finetune(dataset, output, config, seed=3, state=output.parent / "state", reporter=reporter, where=where)


@pytest.mark.parametrize("preempted", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_trainjob_of_two_nodes_ends_with_the_weights_of_two_processes_here(
    api: JobApi, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preempted: bool
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    dataset = small_dataset(tmp_path / "dataset")
    here = tune(dataset, tiny, tmp_path / "here" / "model", Silent())
    pods = {"image": "tuneline/training:1", "claim": "tuneline", "mount": str(tmp_path.resolve()), "queue": "team-a"}
    said = {"kind": "trainjob", "nodes": 2, "threads": 1, "python": sys.executable, "looks_every": 0.1, "trainjob": pods}
    told = Told(api, at=12 if preempted else -1)
    there = tune(dataset, tiny, tmp_path / "there" / "model", told, LauncherSettings.model_validate(said))
    assert there.sha256 == here.sha256
    assert (len(api.created), len(api.started)) == (1, 2 if preempted else 1)
    assert ("evicted by Kueue (Preempted)" in "\n".join(told.notes)) == preempted
    assert bool(there.manifest.summary["resumed_from"]) == preempted
    assert set(told.steps) == set(range(1, 41)), "each step was told, by the one or the other"
    assert there.manifest.summary["arithmetic"]["launcher"] == "trainjob"
    until = time.monotonic() + 10
    while api.left() and time.monotonic() < until:
        time.sleep(0.05)
    assert api.left() == []
    assert not list((tmp_path / "there" / "state").rglob(launch.JOB)), "the state of a finished training is gone"
