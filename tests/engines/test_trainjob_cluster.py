"""TrainJobs on a real cluster: a kubelet with containers, JobSet, Kubeflow Trainer and Kueue.

A shell script in the place of Python is the training, so that no image has to be built. It is in the `long` tier because the
cluster and its controllers need a minute to start. tests/common/test_kubernetes_jobs.py runs more cases on a faster fake.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common import launch
from components.common.artifacts.code_digest import ROOT
from components.common.launch import Command, LostJobError
from components.common.launch.kubernetes import kubernetes_launcher
from components.common.launch.kubernetes.kubernetes_launcher import KubernetesLauncher
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.errors import EXIT_INTERRUPTED, InterruptedRunError, TunelineError
from tests.common.test_kubernetes_jobs import NoteRecorder, in_background
from tests.engines.cluster import REQUIRED, Cluster
from tests.engines.second_node import FIRST_NODE, SECOND_NODE, kill_second_node, running_second_node

pytestmark = [pytest.mark.long, pytest.mark.cluster, REQUIRED]

NAMESPACE = "team-a"
COMMAND = Command("components.fine_tuning.worker", ["job.json"], 1, 2)
TRAINED = {"trained": {"steps": 7}}
SAVED = {
    "error": {"kind": "interrupted", "message": "saved", "hint": "Go on.", "stage": "fine_tuning"},
    "exit_code": 75,
}
# Called as `python -P -m components.common.launch.node_runner FOLDER`. Attempt 1 trains until a signal, attempt 2 succeeds.
SCRIPT = f"""#!/bin/sh
folder=$4; mode=$(cat "$folder/mode"); attempt=${{HOSTNAME%-node-*}}; attempt=${{attempt##*-}}; index=${{HOSTNAME##*-}}
end() {{ date +%s > "$folder/pods/$HOSTNAME.end"; exit $1; }}
save() {{
  [ "$mode" = crash ] && exit 1
  sleep 3
  [ $index = 0 ] && echo '{json.dumps(SAVED)}' > "$folder/outcome.json"
  end 75
}}
trap save TERM
date +%s > "$folder/pods/$HOSTNAME.start"
[ $index = 0 ] && echo '{{"stage": "fine_tuning", "event": "note", "text": "trains"}}' >> "$folder/events.jsonl"
if [ $attempt -gt 1 ] || [ "$mode" = succeed ]; then
  [ $index = 0 ] && echo '{json.dumps(TRAINED)}' > "$folder/outcome.json"
  end 0
fi
while [ "$mode" = peer ]; do [ -e "$folder/peer-lost" ] && exit 1; sleep 0.2; done
[ "$mode" = memory ] && exec tail /dev/zero
while :; do sleep 1 & wait $!; done
"""


@dataclass
class Jobs:
    """A launcher and a job folder on a volume of the cluster."""

    cluster: Cluster
    volume: Path
    settings: dict[str, Any] = field(default_factory=dict)
    reporter: NoteRecorder = field(default_factory=NoteRecorder)

    @property
    def folder(self) -> Path:
        return self.volume / "launch"

    def create_launcher(self) -> KubernetesLauncher:
        pods = {
            "namespace": NAMESPACE,
            "image": "tuneline.test/busybox:1",
            "runtime": "tuneline",
            "claim": "tuneline",
            "mount": str(self.volume),
            "run_as_user": 1000,
            "save_seconds": 10,
            "cpu": "250m",  # at 10m, the limit of the group delays the start of a container by seconds to minutes
            **self.settings,
        }
        values = {"kind": "trainjob", "nodes": 2, "looks_every": 0.5, "patience_seconds": 60.0, "resumes": 1}
        python = str(self.volume / "python")
        return kubernetes_launcher.connect_launcher(
            LauncherSettings.model_validate({**values, "python": python, "trainjob": pods})
        )

    def run(self, mode: str) -> dict[str, Any]:
        (self.folder / "mode").write_text(mode)
        return launch.run(self.create_launcher(), COMMAND, self.folder, self.reporter)

    def kubectl(self, *arguments: str, text: str = "") -> str:
        return self.cluster.kubectl("-n", NAMESPACE, *arguments, text=text)

    def wait_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline, f"condition not met in time; notes: {self.reporter}"
            time.sleep(0.5)

    def wait_for_training(self) -> None:
        self.wait_until(lambda: len(list((self.folder / "pods").glob("*.start"))) == 2)

    def list_pods(self) -> list[str]:
        return self.kubectl("get", "pods", "-o", "name").split()

    def read_times(self, kind: str, attempt: int) -> list[int]:
        return [int(path.read_text()) for path in (self.folder / "pods").glob(f"*-{attempt}-node-*.{kind}")]


@pytest.fixture(scope="module")
def trainer_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, Path]:
    """Add the controllers, tuneline's runtime and a volume to the cluster."""
    volume = tmp_path_factory.mktemp("volume")
    cluster.start_controllers("jobset", "trainer", "kueue")
    runtime = (ROOT / "deploy/components/runtime/training-runtime.yaml").read_text(encoding="utf-8")
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "-f", "-", text=runtime)
    capacity = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    host_path = {"hostPath": {"path": str(volume)}, "capacity": {"storage": "1Gi"}, **capacity}
    claim = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": "tuneline", **capacity}
    for kind, spec, namespace in (
        ("PersistentVolume", host_path, {}),
        ("PersistentVolumeClaim", claim, {"namespace": NAMESPACE}),
    ):
        body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "tuneline", **namespace}, "spec": spec}
        cluster.kubectl("apply", "-f", "-", text=yaml.safe_dump(body))
    return cluster, volume


@pytest.fixture
def jobs(
    trainer_cluster: tuple[Cluster, Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Jobs]:
    """Provide a job folder and check that the test leaves no job and no pod."""
    cluster, volume = trainer_cluster
    monkeypatch.setenv("KUBECONFIG", str(cluster.folder / "admin.kubeconfig"))
    own = volume / request.node.name.replace("[", "-").replace("]", "")
    (own / "launch" / "pods").mkdir(parents=True)
    for folder in (volume, own, own / "launch", own / "launch" / "pods"):
        folder.chmod(0o777)
    (own / "python").write_text(SCRIPT)
    (own / "python").chmod(0o755)
    jobs = Jobs(cluster, own, {"sub_path": own.name})
    yield jobs
    jobs.kubectl("delete", "trainjobs", "--all", "--wait=false")
    jobs.wait_until(lambda: not jobs.list_pods())


def test_job_deleted_in_the_background_saves_and_the_next_waits_for_its_pods(jobs: Jobs) -> None:
    def delete() -> None:
        jobs.wait_for_training()
        jobs.kubectl("delete", "trainjobs", "--all", "--cascade=background")

    with in_background(delete), pytest.raises(TunelineError, match="saved") as raised:
        jobs.run("train")
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert jobs.run("train") == TRAINED
    assert len(jobs.read_times("end", 1)) == 2
    assert min(jobs.read_times("start", 2)) >= max(jobs.read_times("end", 1)), "two trainings would write one folder"


def test_next_job_waits_for_pods_whose_job_is_gone(jobs: Jobs) -> None:
    """As after a kill of the step that watched the job."""
    (jobs.folder / "mode").write_text("train")
    launcher = jobs.create_launcher()
    launch.prepare_folder(COMMAND, jobs.folder)
    launcher.start(COMMAND, jobs.folder)
    jobs.wait_for_training()
    jobs.kubectl("delete", "trainjobs", "--all", "--cascade=background")
    assert jobs.run("train") == TRAINED
    assert len(jobs.read_times("end", 1)) == 2
    assert min(jobs.read_times("start", 2)) >= max(jobs.read_times("end", 1))


# Beside this pod, only one of the two pods of the training fits.
URGENT_POD = """
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {{name: urgent}}
value: 1000
---
apiVersion: v1
kind: Pod
metadata: {{name: urgent}}
spec:
  priorityClassName: urgent
  containers:
    - name: urgent
      image: tuneline.test/busybox:1
      command: [sleep, "600"]
      resources: {{requests: {{cpu: {cpu}}}}}
"""


@pytest.mark.parametrize("removal", ["eviction", "forced deletion", "preemption"])
def test_job_of_a_removed_pod_is_resumed(jobs: Jobs, removal: str) -> None:
    """The pods write no outcome, so that only the cluster knows why they ended."""

    def remove() -> None:
        jobs.wait_for_training()
        pod = next(name for name in jobs.list_pods() if "-node-0-1-" in name).removeprefix("pod/")
        if removal == "eviction":
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
            jobs.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(body))
        elif removal == "preemption":
            jobs.kubectl("apply", "-f", "-", text=URGENT_POD.format(cpu=f"{os.cpu_count() * 1000 - 400}m"))
            jobs.kubectl("wait", "pod/urgent", "--for=condition=PodScheduled", "--timeout=120s")
            jobs.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
        else:
            jobs.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    with in_background(remove):
        assert jobs.run("crash") == TRAINED
    causes = {"eviction": "EvictionByEvictionAPI", "preemption": "PreemptionByScheduler"}
    cause = causes.get(removal, "was deleted")
    # JobSet's reason, if the launcher finds the job failed before it lists the pods
    assert cause in str(jobs.reporter) or "FailJobSetFailurePolicyAction" in str(jobs.reporter)


def test_failed_job_ends_although_its_pods_can_no_longer_be_listed(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job is watched with the rights of the step's account, which loses its rights on pods."""
    jobs.kubectl("create", "serviceaccount", "tuneline")
    rights = (ROOT / "deploy/components/launcher-trainjob/launcher-rbac.yaml").read_text(encoding="utf-8")
    jobs.kubectl("apply", "-f", "-", text=rights)
    kubeconfig = json.loads((jobs.cluster.folder / "admin.kubeconfig").read_text())
    kubeconfig["users"][0]["user"] = {"token": jobs.kubectl("create", "token", "tuneline").strip()}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    def fail() -> None:
        jobs.wait_for_training()
        remaining = [rule for rule in next(yaml.safe_load_all(rights))["rules"] if "pods" not in rule["resources"]]
        patch = json.dumps({"rules": remaining})
        jobs.kubectl("patch", "role", "tuneline-launcher-trainjob", "--type=merge", "-p", patch)
        error = {"kind": "training", "message": "the loss is nan", "hint": "", "stage": "fine_tuning"}
        (jobs.folder / "outcome.json").write_text(json.dumps({"error": error, "exit_code": 1}))
        (jobs.folder / "peer-lost").touch()

    with in_background(fail), pytest.raises(TunelineError, match="the loss is nan"):
        jobs.run("peer")


def test_memory_kill_is_reported(jobs: Jobs) -> None:
    jobs.settings["memory"] = "32Mi"
    with pytest.raises(LostJobError, match="OOMKilled"):
        jobs.run("memory")


def test_cause_of_missing_pods_is_reported_and_the_waiting_job_can_be_stopped(jobs: Jobs) -> None:
    jobs.settings |= {"image": "tuneline.test/missing:1", "node_selector": {"pool": "large"}}
    jobs.kubectl("create", "quota", "pods", "--hard=pods=0")

    def remove_causes() -> None:
        jobs.wait_until(lambda: re.search("is waiting: FailedCreate: .* exceeded quota: pods", str(jobs.reporter)))
        jobs.kubectl("delete", "quota", "pods")
        jobs.wait_until(lambda: "Unschedulable: 0/1 nodes are available" in str(jobs.reporter))
        jobs.cluster.kubectl("label", "node", FIRST_NODE, "pool=large")
        jobs.wait_until(
            lambda: re.search(r'(ErrImagePull|ImagePullBackOff): .*"tuneline\.test/missing:1"', str(jobs.reporter))
        )
        os.kill(os.getpid(), signal.SIGTERM)

    with (
        in_background(remove_causes),
        pytest.raises(InterruptedRunError, match="before the job had work to save") as raised,
    ):
        jobs.run("train")
    assert raised.value.exit_code == EXIT_INTERRUPTED


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
  resourceGroups:
    - coveredResources: [cpu, memory]
      flavors: [{name: any, resources: [{name: cpu, nominalQuota: "4"}, {name: memory, nominalQuota: 4Gi}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: team-a, namespace: team-a}
spec: {clusterQueue: all}
"""
PRIORITY = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: batch}
value: 10
"""


def test_missing_priority_class_is_named_and_the_job_starts_once_it_exists(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kueue creates no Workload and no event without the class, and tries again after growing pauses."""
    monkeypatch.setattr(kubernetes_launcher, "QUEUE_TIMEOUT_SECONDS", 2.0)
    jobs.kubectl("apply", "-f", "-", text=QUEUES)
    jobs.settings |= {"queue": "team-a", "priority": "batch"}

    def create_class() -> None:
        jobs.wait_until(lambda: "Kueue has not queued the job" in str(jobs.reporter))
        jobs.kubectl("apply", "-f", "-", text=PRIORITY)

    with in_background(create_class):
        assert jobs.run("succeed") == TRAINED
    assert "the LocalQueue team-a and the WorkloadPriorityClass batch exist" in str(jobs.reporter)


@pytest.fixture(scope="module")
def two_nodes(trainer_cluster: tuple[Cluster, Path]) -> Iterator[Cluster]:
    """Add a second node. Its stop breaks the network of the first node, so only the last test may use it."""
    with running_second_node(trainer_cluster[0]) as running:
        yield running


def test_job_of_a_lost_node_is_resumed_although_the_other_pod_fails_first(two_nodes: Cluster, jobs: Jobs) -> None:
    """After 50 s, the node is not ready. Its pods stay until an administrator deletes them or the node."""

    def lose_node() -> None:
        jobs.wait_for_training()
        jobs.wait_until(lambda: "is running" in str(jobs.reporter))  # the kubelet has reported both pods
        kill_second_node(two_nodes)
        (jobs.folder / "peer-lost").touch()  # the other process sees a broken connection
        lost = rf"is running: the node {SECOND_NODE} of the pod (\S+) is not ready"
        jobs.wait_until(lambda: re.search(lost, str(jobs.reporter)))
        (pod,) = re.findall(lost, str(jobs.reporter))
        jobs.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    with in_background(lose_node):
        assert jobs.run("peer") == TRAINED
    assert len(jobs.read_times("start", 2)) == 2
