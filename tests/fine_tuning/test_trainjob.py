"""Training as a TrainJob: its command, run as two processes with the environment of Kubeflow Trainer, gives the weights of a local job.

The cluster is simulated by tests/job_api.py. In the `stress` tier because the test runs two multi-process trainings.
"""

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
from components.common.artifacts.artifact_folder import Artifact
from components.common.artifacts.code_digest import ROOT
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests import job_api
from tests.datasets import small_dataset
from tests.job_api import JobApi, Pod
from tests.kubernetes_api import kubeconfig
from tests.tiny import tiny_model

pytestmark = pytest.mark.stress


class PreemptingReporter(SilentReporter):
    """Records notes and steps. At one step it makes Kueue evict the job, and it readmits the job after the eviction note."""

    def __init__(self, api: JobApi, preempt_at_step: int = -1) -> None:
        self.api, self.preempt_at_step = api, preempt_at_step
        self.steps: list[int] = []
        self.notes: list[str] = []

    def metrics(self, values: Any, step: int) -> None:
        if "train_loss" in values:
            self.steps.append(step)
            if step == self.preempt_at_step:
                self.api.admits, self.preempt_at_step = False, -1

    def note(self, text: str) -> None:
        self.notes.append(text)
        if "evicted by Kueue" in text:
            self.api.admits = True


def run_two_nodes(pod: Pod) -> int:
    """Run the TrainJob's command as the pods of two nodes and return the highest exit code.

    The environment is that of the runtime's torch plugin (kubeflow/trainer, pkg/runtime/framework/plugins/torch). A stop request
    reaches both pods.
    """
    trainer = pod.job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job_environment = {variable["name"]: variable["value"] for variable in trainer["env"]}
    injected_environment = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/tmp"),
        "PYTHONPATH": str(ROOT),
        **job_environment,
        **injected_environment,
    }
    nodes = [subprocess.Popen(trainer["command"], env={**environment, "PET_NODE_RANK": str(rank)}) for rank in range(2)]
    try:
        while any(node.poll() is None for node in nodes) and not pod.stop_requested.wait(0.05):
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
    with job_api.serving(JobApi(works=[run_two_nodes])) as api:
        monkeypatch.setenv(
            "KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", api.url, namespace="team-a", token=api.token))
        )
        yield api


def tune(
    dataset: Artifact,
    tiny: Path,
    output: Path,
    reporter: SilentReporter,
    launcher_settings: LauncherSettings | None = None,
) -> Artifact:
    values = {
        "base_model": str(tiny),
        "max_steps": 40,
        "batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint_every": 10,
        "max_length": 96,
    }
    config = FineTuningConfig.model_validate(
        {**values, "processes": 2, "device": "cpu", "learning_rate": 1e-3, "adaptation": "full"}
    )
    return finetune(
        dataset,
        output,
        config,
        seed=3,
        state=output.parent / "state",
        reporter=reporter,
        launcher_settings=launcher_settings,
    )


@pytest.mark.parametrize("preempted", [False, True])
def test_trainjob_on_two_nodes_matches_two_local_processes(
    api: JobApi, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preempted: bool
) -> None:
    monkeypatch.setenv("TUNELINE_THREADS", "1")
    dataset = small_dataset(tmp_path / "dataset")
    local_model = tune(dataset, tiny, tmp_path / "here" / "model", SilentReporter())
    trainjob = {
        "image": "tuneline/training:1",
        "claim": "tuneline",
        "mount": str(tmp_path.resolve()),
        "queue": "team-a",
    }
    settings = {
        "kind": "trainjob",
        "nodes": 2,
        "threads": 1,
        "python": sys.executable,
        "looks_every": 0.1,
        "trainjob": trainjob,
    }
    reporter = PreemptingReporter(api, preempt_at_step=12 if preempted else -1)
    remote_model = tune(
        dataset, tiny, tmp_path / "there" / "model", reporter, LauncherSettings.model_validate(settings)
    )
    assert remote_model.sha256 == local_model.sha256
    assert (len(api.created), len(api.started)) == (1, 2 if preempted else 1)
    assert ("evicted by Kueue (Preempted)" in "\n".join(reporter.notes)) == preempted
    assert bool(remote_model.manifest.summary["resumed_from"]) == preempted
    assert set(reporter.steps) == set(range(1, 41)), "each step was told, by the one or the other"
    assert remote_model.manifest.summary["arithmetic"]["launcher"] == "trainjob"
    deadline = time.monotonic() + 10
    while api.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert api.left() == []
    assert not list((tmp_path / "there" / "state").rglob(launch.JOB_FILENAME)), (
        "the state of a finished training is gone"
    )
