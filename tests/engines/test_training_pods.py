"""A training in pods: the step creates a TrainJob of two nodes, or a RayJob of a head and two nodes for KubeRay, and real
trainings end with the weights of a local training.

The step's pod has the service account, rights and limits of deploy/, in a namespace that enforces the restricted Pod Security
level. Its image holds folders alone: Python, its packages and this checkout are read-only volumes of the host's folders, so that
no image of a gigabyte has to be built. In the `stress` tier because a cluster starts and two trainings run for minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from components.common.launch.kubernetes.kubernetes_client import LIMITS_NAME
from components.common.runtime.errors import BusyError
from tests.datasets import small_dataset
from tests.deploy.rendering import DEPLOY
from tests.engines.cluster import REQUIRED, Cluster
from tests.engines.host_folders import (
    NAMESPACE,
    PYTHON_FOLDERS,
    USER,
    build_image_root,
    build_volume,
    make_accessible,
)
from tests.pipelines.command import ROOT, answer_in_process
from tests.tiny import tiny_model

Json = dict[str, Any]
pytestmark = [pytest.mark.stress, pytest.mark.cluster, REQUIRED]
IMAGE = "tuneline.test/folders:1"
TIMEOUT_SECONDS = 400  # of a busy machine
STEPS, CHECKPOINT_EVERY = 800, 40
HOST_FOLDERS = {**PYTHON_FOLDERS, "checkout": str(ROOT)}
CUSTOMIZATION = {
    "seed": 3,
    "fine_tuning": {
        "base_model": "/data/tiny",
        "max_steps": STEPS,
        "checkpoint_every": CHECKPOINT_EVERY,
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_length": 96,
        "processes": 2,
        "device": "cpu",
        "learning_rate": 1e-3,
        "adaptation": "full",
    },
}
PODS = {
    "trainjob": {"runtime": "tuneline", "cpu": "900m"},
    "rayjob": {"ray_version": version("ray"), "head_cpu": "1", "head_memory": ""},  # the queue has no memory
}
DEPLOYED_FILES = (
    "base/team/accounts.yaml",
    *(f"components/launcher-{kind}/launcher-rbac.yaml" for kind in PODS),
    *(f"components/launcher-policies/{kind}-policy.yaml" for kind in PODS),
    "components/runtime/training-runtime.yaml",
)
QUEUES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: any}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: all}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
    - coveredResources: [cpu]
      flavors: [{name: any, resources: [{name: cpu, nominalQuota: "2"}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: team-a, namespace: team-a}
spec: {clusterQueue: all}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: urgent}
value: 1000
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: batch}
value: 10
"""
URGENT_JOB = f"""
apiVersion: batch/v1
kind: Job
metadata:
  generateName: urgent-
  labels: {{kueue.x-k8s.io/queue-name: team-a, kueue.x-k8s.io/priority-class: urgent}}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      securityContext: {{runAsNonRoot: true, runAsUser: {USER}, seccompProfile: {{type: RuntimeDefault}}}}
      containers:
        - name: urgent
          image: tuneline.test/busybox:1
          command: [sleep, "5"]
          resources: {{requests: {{cpu: 1500m}}}}
          securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"""


@dataclass
class Trainings:
    """Trainings whose steps run as pods; the volume is mounted at /data."""

    cluster: Cluster
    volume: Path
    local: Json

    def kubectl(self, *arguments: str, text: str = "") -> str:
        return self.cluster.kubectl("-n", NAMESPACE, *arguments, text=text)

    def start(self, name: str, kind: str = "trainjob", **pods: Any) -> None:
        """Create the Job of a step; `pods` are further settings of the training's pods."""
        launcher = {
            "kind": kind,
            "nodes": 2,
            "threads": 1,
            "python": sys.executable,
            "looks_every": 0.5,
            "patience_seconds": 120.0,
            "resumes": 3,
            "environment": VARIABLES,
            kind: {
                "image": IMAGE,
                "claim": "data",
                "mount": "/data",
                "claims": [{"claim": claim, "mount": path} for claim, path in HOST_FOLDERS.items()],
                "service_account": "tuneline-tools",
                "run_as_user": USER,
                "run_as_group": USER,
                "save_seconds": 30,
                **PODS[kind],
                **pods,
            },
        }
        variables = {**VARIABLES, "TUNELINE_LAUNCHER": json.dumps(launcher), "TUNELINE_WORKDIR": f"/data/{name}/work"}
        command = [
            sys.executable,
            "-P",
            "-m",
            "pipelines.cli",
            "finetune",
            "/data/dataset",
            "-o",
            f"/data/{name}/model",
        ]
        mounts = {"data": "/data", **HOST_FOLDERS}
        container = {
            "name": "step",
            "image": IMAGE,
            "command": [*command, "-c", "/data/customization.yaml", "--json"],
            "env": [{"name": key, "value": value} for key, value in variables.items()],
            "volumeMounts": [{"name": claim, "mountPath": path} for claim, path in mounts.items()],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        pod = {
            "restartPolicy": "Never",
            "serviceAccountName": "tuneline",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in mounts],
            "containers": [container],
        }
        spec = {"backoffLimit": 2, "template": {"metadata": {"labels": {"step": name}}, "spec": pod}}
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        self.kubectl("create", "--validate=strict", "-f", "-", text=json.dumps(body))

    def find_step(self, name: str) -> int:
        """Return the step of a training's newest checkpoint."""
        while True:
            with suppress(FileNotFoundError):  # a process removed its folder during the search
                steps = [int(path.name.partition("-")[2]) for path in (self.volume / name).rglob("checkpoint-*")]
                return max(steps, default=0)

    def wait_for_step(self, name: str, step: int) -> None:
        manifest = self.volume / name / "model" / "manifest.json"
        self.wait_until(lambda: self.find_step(name) >= step or manifest.exists(), name, interval=0.1)
        assert not manifest.exists(), "the training ended before the test interrupted it"

    def wait_until(self, condition: Callable[[], Any], name: str, interval: float = 1.0) -> None:
        """Wait for a condition; in a shorter interval, calls of kubectl would slow down the training."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, (
                f"condition not met in time\n{self.read_log(name)}\n{self.read_events()}"
            )
            time.sleep(interval)

    def list_nodes(self) -> list[str]:
        """Return the names of the training's pods."""
        return self.kubectl("get", "pods", "-l", "tuneline/job", "-o", "name").split()

    def list_kept_nodes(self) -> list[str]:
        """Return the names of the training's pods, without ended pods that only Kubernetes' job controller keeps.

        The controller may leave its finalizer on the pods of a Job that is deleted just after a loss of the API server.
        """
        pods: list[Json] = json.loads(self.kubectl("get", "pods", "-l", "tuneline/job", "-o", "json"))["items"]
        return [
            pod["metadata"]["name"]
            for pod in pods
            if pod["status"]["phase"] not in ("Succeeded", "Failed")
            or "deletionTimestamp" not in pod["metadata"]
            or pod["metadata"].get("finalizers") != ["batch.kubernetes.io/job-tracking"]
        ]

    def find_node(self, attempt: int, index: int) -> str:
        """Return the name of a node's pod in an attempt, or "" if it does not exist."""
        pods = (pod.removeprefix("pod/") for pod in self.list_nodes())
        return next((pod for pod in pods if f"-{attempt}-node-0-{index}-" in pod), "")

    def find_pod(self, part: str) -> str:
        """Return the name of a pod of the head or of a node of a RayJob."""
        names = self.kubectl("get", "pods", "-l", f"tuneline/part={part}", "-o", "name").split()
        return names[0].removeprefix("pod/")

    def read_log(self, name: str) -> str:
        return self.kubectl("logs", "-l", f"step={name}", "--tail=40", "--prefix=false")

    def read_events(self) -> str:
        return self.kubectl("get", "events", "-o", "custom-columns=OBJECT:.involvedObject.name,MESSAGE:.message")

    def start_second_writer(self, name: str) -> Json:
        """Train the running job in one of its pods again, and return the outcome."""
        (job,) = (self.volume / name).rglob("job.json")
        path = f"/data/{job.relative_to(self.volume)}"
        command = (sys.executable, "-P", "-c", SECOND_WRITER, path)
        outcome: Json = json.loads(self.kubectl("exec", self.find_node(1, 1), "--", *command).splitlines()[-1])
        return outcome

    def restart_kubelet(self) -> None:
        subprocess.run([self.cluster.kit / "node", self.cluster.folder, "restart-kubelet"], check=True, timeout=60)

    def restart_api_server(self) -> None:
        """Kill the API server and start it again."""
        api_server = psutil.Process(int((self.cluster.folder / "apiserver.pid").read_text()))
        api_server.kill()
        api_server.wait(30)
        up = [self.cluster.kit / "up", self.cluster.folder]
        subprocess.run(up, env={**os.environ, "NODE": "1"}, check=True, timeout=120)

    def evict(self, pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(body))

    def replace_step(self, name: str) -> None:
        """Delete the step's pod; the Job creates another one, which must find the running training.

        A suspended process cannot stop its training on the signal of the kubelet, as if its node were lost.
        """
        for process in find_processes("finetune"):
            process.suspend()
        self.kubectl("delete", "pods", "-l", f"step={name}", "--grace-period=0", "--force")

    def finish(self, name: str) -> Json:
        """Wait for the end of a step; check its weights and that nothing is left; return its answer.

        The log has the answers of all pods of the step: an error of those that failed before.
        """

        def has_ended() -> bool:
            status = json.loads(self.kubectl("get", "job", name, "-o", "json"))["status"]
            return bool({c["type"] for c in status.get("conditions", [])} & {"Complete", "Failed"})

        self.wait_until(has_ended, name)
        log = self.read_log(name)
        answers: list[Json] = [json.loads(line) for line in log.splitlines() if line.startswith('{"model"')]
        assert [answer["sha256"] for answer in answers] == [self.local["sha256"]], log
        answer = answers[0]
        assert answer["steps"] == STEPS
        self.wait_until(lambda: not self.list_kept_nodes(), name)
        assert self.kubectl("get", "trainjobs,rayjobs", "-o", "name") == ""
        return answer


# Runs a copy of the job; without the wait, because the first training would end meanwhile.
SECOND_WRITER = """
import pathlib, shutil, sys, tempfile
from components.fine_tuning import training, worker
training.LOCK_WAIT_SECONDS = 0.0
folder = pathlib.Path(tempfile.mkdtemp())
worker.main(shutil.copy(sys.argv[1], folder))
print((folder / "outcome.json").read_text())
"""
VARIABLES = {"PYTHONPATH": str(ROOT), "TUNELINE_THREADS": "1", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}


@pytest.fixture(scope="module")
def local_training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Json]:
    """Train on this machine, and return the folder of the data and the answer of the command.

    `trainings` requests it before the cluster, for which it may have to wait.
    """
    folder = tmp_path_factory.mktemp("local-training")
    data = folder / "data"
    data.mkdir()
    small_dataset(data / "dataset")
    tiny_model(data / "tiny")
    (data / "customization.yaml").write_text(yaml.safe_dump(CUSTOMIZATION))
    local = {**CUSTOMIZATION, "fine_tuning": {**CUSTOMIZATION["fine_tuning"], "base_model": str(data / "tiny")}}
    (folder / "local.yaml").write_text(yaml.safe_dump(local))
    command = ["finetune", data / "dataset", "-o", "model", "-c", folder / "local.yaml"]
    return data, answer_in_process(*command, cwd=folder, TUNELINE_THREADS="1")


@pytest.fixture(scope="module")
def trainings(
    local_training: tuple[Path, Json], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Trainings:
    """Prepare the volume, a namespace with the objects of deploy/, and queues."""
    cluster.start_controllers("jobset", "trainer", "ray", "kueue")
    data, answer = local_training
    folder = tmp_path_factory.mktemp("training-pods")
    volume = shutil.copytree(data, folder / "volume")
    subprocess.run(["chown", "-R", f"{USER}:{USER}", volume], check=True)
    make_accessible(folder)
    root = build_image_root(folder / "root", "/data", *HOST_FOLDERS.values())
    cluster.add_image(root, IMAGE, Env=[f"PATH={sys.prefix}/bin:/usr/bin"])  # KubeRay calls `ray` by its name
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    limits = {
        "runtimes": "ClusterTrainingRuntime/tuneline",
        "images": IMAGE,
        "claims": "\n".join(["data", *HOST_FOLDERS]),
        "serviceAccounts": "tuneline-tools",
    }
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": LIMITS_NAME, "namespace": NAMESPACE},
            "data": limits,
        },
        *build_volume("data", volume, "ReadWriteMany"),
        *(part for name, path in HOST_FOLDERS.items() for part in build_volume(name, path, "ReadOnlyMany")),
    ]
    texts = [json.dumps(value) for value in objects]
    texts += [(DEPLOY / file).read_text(encoding="utf-8") for file in DEPLOYED_FILES]
    cluster.kubectl(
        "-n", NAMESPACE, "apply", "--server-side", "--validate=strict", "-f", "-", text="\n---\n".join(texts)
    )
    cluster.kubectl("apply", "--server-side", "-f", "-", text=QUEUES)
    return Trainings(cluster, volume, answer)


def find_processes(argument: str) -> list[psutil.Process]:
    """Return the processes in pods that have this argument; this machine may train elsewhere too."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if "kubepods" in Path(f"/proc/{process.pid}/cgroup").read_text() and argument in process.cmdline():
                found.append(process)
    assert found
    return found


@contextmanager
def suspended_training() -> Iterator[None]:
    """Suspend training in pods: a fast machine would train to the end while a server restarts.

    The first process waits for the others and goes on to refresh its lock.
    """
    workers = [
        process
        for process in find_processes("components.fine_tuning.worker")
        if process.environ().get("RANK", "0") != "0"
    ]
    assert workers
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


def kill_worker() -> None:
    """Kill a training process in a pod."""
    find_processes("components.fine_tuning.worker")[-1].kill()


def test_disturbed_and_preempted_trainjob_ends_with_the_weights_of_a_local_training(trainings: Trainings) -> None:
    """The two nodes meet through the names that JobSet publishes; the step uses the token and the rights of its account."""
    name = "disturbed"
    trainings.start(name, queue="team-a", priority="batch")
    trainings.wait_for_step(name, 1 * CHECKPOINT_EVERY)
    with suspended_training():
        assert trainings.start_second_writer(name)["error"]["kind"] == BusyError.kind
        trainings.restart_kubelet()
        trainings.restart_api_server()
        trainings.replace_step(name)

    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    trainings.evict(trainings.find_node(1, 1))
    trainings.wait_until(lambda: trainings.find_node(2, 1), name)

    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    trainings.kubectl("delete", "pod", trainings.find_node(2, 0), "--wait=false")
    trainings.wait_until(lambda: trainings.find_node(3, 0), name)

    # Kueue suspends the job until the urgent one has ended.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    urgent = trainings.kubectl("create", "-f", "-", "-o", "name", text=URGENT_JOB).strip()
    trainings.kubectl("wait", urgent, "--for=condition=Complete", "--timeout=120s")

    # Nobody but the launcher's own watch knows why this process ended: the step fails, and its next pod resumes.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    kill_worker()
    answer = trainings.finish(name)
    assert answer["resumed_from"]


@pytest.mark.ray
def test_disturbed_and_preempted_rayjob_ends_with_the_weights_of_a_local_training(trainings: Trainings) -> None:
    """One training, because each start of Ray takes most of a minute."""
    name = "disturbed-rayjob"
    trainings.start(name, "rayjob", queue="team-a", priority="batch")
    trainings.wait_for_step(name, 1 * CHECKPOINT_EVERY)
    kill_worker()

    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    with suspended_training():
        trainings.restart_kubelet()
        trainings.restart_api_server()
        trainings.replace_step(name)

    # KubeRay replaces the node, for which the training waits.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    node = trainings.find_pod("node")
    trainings.evict(node)
    trainings.wait_until(lambda: f"pod/{node}" not in trainings.list_nodes(), name)

    # Kueue suspends the job until the urgent one has ended; KubeRay then starts new pods.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    head = trainings.find_pod("head")
    trainings.kubectl("create", "-f", "-", text=URGENT_JOB)
    trainings.wait_until(lambda: f"pod/{head}" not in trainings.list_nodes(), name)

    # Without persistent storage, Ray has lost the job: the step submits it again.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    trainings.kubectl("delete", "pod", trainings.find_pod("head"), "--grace-period=0", "--force")
    answer = trainings.finish(name)
    assert answer["resumed_from"]
