"""TrainJobs and RayJobs on a fake cluster: outcomes, restarts, queues, API faults and cleanup; no job is leaked or started twice."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common import launch
from components.common.artifacts.code_digest import ROOT
from components.common.launch import Command, JobEndedError, LostJobError, UnresponsiveError
from components.common.launch.kubernetes import (
    job_conditions,
    job_manifests,
    kubernetes_client,
    kubernetes_launcher,
)
from components.common.launch.kubernetes.kubernetes_client import AccessError, KubernetesClient
from components.common.launch.kubernetes.kubernetes_launcher import KubernetesJob, KubernetesLauncher
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.errors import (
    EXIT_INTERRUPTED,
    BusyError,
    ConfigurationError,
    EngineMissingError,
    InterruptedRunError,
    TunelineError,
)
from tests import job_api
from tests.job_api import Fault, JobApi, Pod
from tests.kubernetes_api import kubeconfig

KINDS = ("trainjob", "rayjob")
COMMAND = Command("components.fine_tuning.worker", ["job.json"], 8, 2)
TRAINED_OUTCOME = {"trained": {"steps": 7}}
SAVED_ERROR = {"kind": "interrupted", "message": "saved after step 7", "hint": "Go on.", "stage": "fine_tuning"}


# Programs of the pods


def succeed(pod: Pod) -> int:
    pod.log_note("trained")
    pod.write_outcome(TRAINED_OUTCOME)
    return 0


def save_when_stopped(pod: Pod) -> int:
    """Train until a stop request, then save."""
    pod.log_note("trains")
    pod.stop_requested.wait(60)
    pod.write_outcome({"error": SAVED_ERROR, "exit_code": EXIT_INTERRUPTED})
    return EXIT_INTERRUPTED


def save_after_a_while(pod: Pod) -> int:
    """Train until a stop request, and need half a second to save."""
    pod.log_note("trains")
    pod.stop_requested.wait(60)
    time.sleep(0.5)
    return save_when_stopped(pod)


def save_at_once(pod: Pod) -> int:
    pod.write_outcome({"error": SAVED_ERROR, "exit_code": EXIT_INTERRUPTED})
    return EXIT_INTERRUPTED


def fail(pod: Pod) -> int:
    error = {"kind": "training", "message": "the loss is nan", "hint": "Lower the rate.", "stage": "fine_tuning"}
    pod.write_outcome({"error": error, "exit_code": 1})
    return 1


def fail_when_stopped(pod: Pod) -> int:
    pod.log_note("trains")
    pod.stop_requested.wait(60)
    return fail(pod)


def crash(pod: Pod) -> int:
    log = pod.folder / "nodes" / "0" / "torchrun.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("Traceback\nMemoryError: the last words\n")
    return 1


def end_without_outcome(pod: Pod) -> int:
    """Train until the pod is removed, then end without an outcome."""
    pod.log_note("trains")
    pod.stop_requested.wait(60)
    return 137


def succeed_after_a_while(pod: Pod) -> int:
    pod.stop_requested.wait(0.6)
    return succeed(pod)


# Cluster, launcher and reporter


@dataclass
class NoteRecorder:
    """A reporter that records notes."""

    notes: list[str] = field(default_factory=list)

    def step(self, name: str) -> None: ...

    def progress(self, done: int, total: int | None, unit: str) -> None: ...

    def metrics(self, values: Any, step: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __str__(self) -> str:
        return "\n".join(self.notes)


@dataclass
class JobCluster:
    """A fake cluster, the settings of its launcher and a job folder on the volume."""

    api: JobApi
    kind: str
    volume: Path
    reporter: NoteRecorder = field(default_factory=NoteRecorder)
    settings: dict[str, Any] = field(default_factory=dict)
    pod_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        folder = self.volume / "state" / "launch"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def plural(self) -> str:
        return f"{self.kind}s"

    def create_launcher(self) -> KubernetesLauncher:
        pod_values = {
            "image": "tuneline/training:1",
            "claim": "tuneline",
            "mount": str(self.volume),
            "save_seconds": 10,
            **self.pod_settings,
        }
        values = {
            "kind": self.kind,
            "nodes": 2,
            "looks_every": 0.1,
            "patience_seconds": 2.0,
            "resumes": 2,
            **self.settings,
        }
        launcher = kubernetes_launcher.connect_launcher(
            LauncherSettings.model_validate({**values, self.kind: pod_values})
        )
        launcher.client.timeout_seconds = 0.3
        launcher.poll_interval_seconds = self.settings.get("looks_every", 0.05)
        return launcher

    def run(self) -> dict[str, Any]:
        return launch.run(self.create_launcher(), COMMAND, self.folder, self.reporter)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "condition not met in time"
            time.sleep(0.01)

    def is_training(self) -> bool:
        return "trains" in self.reporter.notes

    def delete_job(self, propagation: str = "Background") -> None:
        """Delete the job while it trains, as `kubectl delete` does."""
        self.wait_until(self.is_training)
        with self.api.lock:
            self.api.delete(self.api.job(), propagation)


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobCluster]:
    """Provide a cluster and check that the test leaves no job and no pod."""
    volume = (tmp_path / "volume").resolve()
    monkeypatch.setattr(launch, "POLL_INTERVAL_SECONDS", 0.02)
    with job_api.serving(JobApi(works=[succeed])) as api:
        monkeypatch.setenv(
            "KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", api.url, namespace="team-a", token=api.token))
        )
        cluster = JobCluster(api, request.param, volume)
        yield cluster
        if not cluster.pod_settings.get("keep"):
            cluster.wait_until(lambda: not api.left())


@contextmanager
def in_background(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a thread and fail if it failed."""
    errors: list[BaseException] = []

    def run_action() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)
            send_signal(signal.SIGTERM)  # the block would wait forever otherwise

    thread = threading.Thread(target=run_action, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(40)
        assert not errors, errors[0]


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)


# End of a job


def test_successful_job_returns_outcome_and_relays_events(cluster: JobCluster) -> None:
    assert cluster.run() == TRAINED_OUTCOME
    assert cluster.api.created == [
        f"tuneline-{job_manifests.compute_job_key(cluster.create_launcher().settings, cluster.folder)}-1"
    ]
    assert "trained" in cluster.reporter.notes
    assert cluster.reporter.notes[0] == f"{cluster.api.created[0]} was started"


def test_failed_job_raises_its_error_without_restart(cluster: JobCluster) -> None:
    cluster.api.works = [fail]
    with pytest.raises(TunelineError, match="the loss is nan") as raised:
        cluster.run()
    assert raised.value.kind == "training"
    assert len(cluster.api.created) == 1


def test_crashed_job_is_lost_with_last_log_line(cluster: JobCluster) -> None:
    cluster.api.works = [crash]
    with pytest.raises(LostJobError, match="MemoryError: the last words"):
        cluster.run()
    assert len(cluster.api.created) == 1


def test_interrupted_job_is_restarted_as_next_attempt(cluster: JobCluster) -> None:
    cluster.api.works = [save_at_once, succeed]
    assert cluster.run() == TRAINED_OUTCOME
    assert [name[-2:] for name in cluster.api.created] == ["-1", "-2"]
    assert "restarting it" in str(cluster.reporter)


EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}
UNREADY = [
    {"type": "Ready", "status": "False"},
    {"type": "ContainersReady", "status": "True"},
]  # of a node without kubelet


def run_with_removed_pod(cluster: JobCluster, status: dict[str, Any] | None) -> None:
    """Run a job whose pod gets this status, which the launcher reads, and whose pod is then gone. None: gone at once."""

    def remove() -> None:
        cluster.wait_until(cluster.is_training)
        polls = cluster.api.calls.count(("list", "pods"))
        if status:
            cluster.api.pod(status)
        cluster.wait_until(lambda: cluster.api.calls.count(("list", "pods")) > polls + 1)
        with cluster.api.lock:
            cluster.api.pod_status.clear()
            cluster.api.removed_pods.add(cluster.api.created[0])
            cluster.api.running[cluster.api.created[0]].stop_requested.set()

    with in_background(remove):
        assert cluster.run() == TRAINED_OUTCOME


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ({"phase": "Running", "conditions": [EVICTED]}, "was disrupted: EvictionByEvictionAPI: evicting"),
        ({"phase": "Running", "conditions": UNREADY}, "is not ready"),
        (None, "was deleted"),
    ],
)
def test_job_of_a_removed_pod_is_restarted(cluster: JobCluster, status: dict[str, Any] | None, cause: str) -> None:
    """Kubernetes deletes an evicted pod with its conditions, so they are read while the job runs."""
    if cluster.kind == "rayjob" and status is None:
        pytest.skip("KubeRay deletes the pods of every ended RayJob")
    cluster.api.works = [end_without_outcome, succeed]
    run_with_removed_pod(cluster, status)
    assert len(cluster.api.created) == 2
    assert cause in str(cluster.reporter)


def test_crash_after_a_node_became_ready_again_is_final(cluster: JobCluster) -> None:
    cluster.api.works = [end_without_outcome]

    def lose_and_restore_node() -> None:
        cluster.wait_until(cluster.is_training)
        cluster.api.pod({"phase": "Running", "conditions": UNREADY})
        cluster.wait_until(lambda: "is not ready" in str(cluster.reporter))
        cluster.api.pod({"phase": "Running"})
        cluster.wait_until(lambda: cluster.reporter.notes[-1].endswith("is running"))
        cluster.api.running[cluster.api.created[0]].stop_requested.set()

    with in_background(lose_and_restore_node), pytest.raises(LostJobError):
        cluster.run()
    assert len(cluster.api.created) == 1


def test_own_error_of_a_training_is_final_despite_a_disruption(cluster: JobCluster) -> None:
    cluster.api.works = [fail_when_stopped, succeed]
    with pytest.raises(TunelineError, match="the loss is nan"):
        run_with_removed_pod(cluster, {"phase": "Running", "conditions": [EVICTED]})
    assert len(cluster.api.created) == 1


def test_memory_kill_is_reported_and_not_restarted(cluster: JobCluster) -> None:
    cluster.api.works = [end_without_outcome]
    terminated = {"name": "node", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}

    def kill() -> None:
        cluster.wait_until(cluster.is_training)
        cluster.api.pod({"phase": "Failed", "containerStatuses": [terminated]})
        cluster.api.running[cluster.api.created[0]].stop_requested.set()

    with in_background(kill), pytest.raises(LostJobError, match=r"exceeded its memory limit \(OOMKilled\)"):
        cluster.run()
    assert len(cluster.api.created) == 1


def test_failed_job_ends_although_pods_cannot_be_listed(cluster: JobCluster) -> None:
    cluster.api.works = [fail]
    cluster.api.faults = [Fault("list", "pods", 500, times=1000, after=1)]  # the first list is that of earlier jobs
    with pytest.raises(TunelineError, match="the loss is nan"):
        cluster.run()


def test_interrupted_job_is_restarted_up_to_max_resumes(cluster: JobCluster) -> None:
    cluster.api.works = [save_at_once]
    with pytest.raises(TunelineError, match="saved after step 7") as raised:
        cluster.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert len(cluster.api.created) == 3


def test_job_past_deadline_resumes_in_new_job(cluster: JobCluster) -> None:
    cluster.api.works = [end_without_outcome, succeed]
    cluster.pod_settings = {"deadline_seconds": 600}

    def exceed_deadline() -> None:
        cluster.wait_until(cluster.is_training)
        with cluster.api.lock:
            job = cluster.api.job()
            job_api.set_job_state(job, "expired")
            cluster.api.running[job["metadata"]["name"]].stop_requested.set()

    with in_background(exceed_deadline):
        assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == 2


# Kueue


def use_queue(cluster: JobCluster) -> None:
    cluster.pod_settings = {"queue": "team-a", "priority": "batch"}


def test_job_reports_wait_for_quota_and_runs_once_admitted(cluster: JobCluster) -> None:
    use_queue(cluster)
    cluster.api.admits = False

    def admit() -> None:
        cluster.wait_until(lambda: "no quota is reserved yet: couldn't assign flavors" in str(cluster.reporter))
        cluster.api.admits = True

    with in_background(admit):
        assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == 1


def test_preempted_job_saves_and_resumes_when_admitted(cluster: JobCluster) -> None:
    use_queue(cluster)
    cluster.api.works = [save_when_stopped, succeed]

    def preempt() -> None:
        cluster.wait_until(cluster.is_training)
        cluster.api.admits = False
        cluster.wait_until(lambda: "evicted by Kueue (Preempted): Preempted to accommodate" in str(cluster.reporter))
        cluster.api.admits = True

    with in_background(preempt):
        assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == 1, "the same job resumes"
    assert len(cluster.api.started) == 2


def test_kueue_with_only_older_workload_version_is_supported(cluster: JobCluster) -> None:
    use_queue(cluster)
    cluster.api.admits = False
    cluster.api.faults = [Fault("list", "workloads", 404)]
    notes: list[str] = []

    def admit() -> None:
        cluster.wait_until(lambda: "no quota is reserved yet" in str(cluster.reporter))
        notes.append(str(cluster.reporter))
        cluster.api.admits = True

    with in_background(admit):
        assert cluster.run() == TRAINED_OUTCOME
    assert notes


def test_job_stopped_in_queue_starts_no_pod(cluster: JobCluster) -> None:
    use_queue(cluster)
    cluster.api.admits = False

    def stop() -> None:
        cluster.wait_until(lambda: "no quota is reserved yet" in str(cluster.reporter))
        send_signal(signal.SIGTERM)

    with in_background(stop), pytest.raises(InterruptedRunError):
        cluster.run()
    assert cluster.api.started == []


# Ended by a user


def test_deleted_job_saves_and_is_not_restarted(cluster: JobCluster) -> None:
    cluster.api.works = [save_when_stopped]

    with in_background(cluster.delete_job), pytest.raises(TunelineError, match="saved after step 7") as raised:
        cluster.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert len(cluster.api.created) == 1


def test_job_deleted_before_first_save_is_terminated_externally(cluster: JobCluster) -> None:
    cluster.api.works = [end_without_outcome]

    with (
        in_background(cluster.delete_job),
        pytest.raises(JobEndedError, match="was terminated externally: the job was deleted"),
    ):
        cluster.run()
    assert len(cluster.api.created) == 1


@pytest.mark.parametrize(
    ("propagation", "state"), [("Background", "the job was deleted"), ("Foreground", "the job is being deleted")]
)
def test_deleted_job_is_watched_until_its_pods_have_saved(cluster: JobCluster, propagation: str, state: str) -> None:
    """In the background, `kubectl delete trainjob` removes the object at once; the pods have a grace period."""
    cluster.api.works = [save_after_a_while]
    with (
        in_background(partial(cluster.delete_job, propagation)),
        pytest.raises(TunelineError, match="saved after step 7") as raised,
    ):
        cluster.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert f"{state}; its pods are saving their work" in str(cluster.reporter)


def test_job_deleted_after_its_outcome_succeeds(cluster: JobCluster) -> None:
    cluster.api.works = [succeed_after_a_while]
    cluster.settings = {"looks_every": 0.5}

    def delete() -> None:
        cluster.wait_until(lambda: (cluster.folder / "outcome.json").exists())
        with cluster.api.lock:
            cluster.api.delete(cluster.api.job(), "Background")

    with in_background(delete):
        assert cluster.run() == TRAINED_OUTCOME


def test_sigterm_makes_training_save_and_deletes_job(cluster: JobCluster) -> None:
    cluster.api.works = [save_when_stopped]

    def stop() -> None:
        cluster.wait_until(cluster.is_training)
        send_signal(signal.SIGTERM)

    with in_background(stop), pytest.raises(TunelineError, match="saved after step 7") as raised:
        cluster.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert cluster.api.left() == [], "run waits for the deletion"


def test_second_ctrl_c_deletes_job_without_waiting(cluster: JobCluster) -> None:
    cluster.api.works = [save_when_stopped]

    def stop() -> None:
        cluster.wait_until(cluster.is_training)
        name = cluster.api.created[0]
        cluster.api.stuck_jobs.add(name)
        send_signal(signal.SIGINT)
        cluster.wait_until(lambda: ("delete", cluster.plural) in cluster.api.calls)
        send_signal(signal.SIGINT)
        time.sleep(0.3)
        cluster.api.stuck_jobs.clear()

    with in_background(stop), pytest.raises(KeyboardInterrupt):
        cluster.run()


def test_ray_job_stopped_by_user_is_cancelled(cluster: JobCluster) -> None:
    cluster.api.works = [end_without_outcome]

    def stop() -> None:
        cluster.wait_until(cluster.is_training)
        with cluster.api.lock:
            cluster.api.job()["status"] = {
                "jobDeploymentStatus": "Complete",
                "jobStatus": "STOPPED",
                "message": "stopped by a user",
            }

    if cluster.kind == "trainjob":
        pytest.skip("a TrainJob has no such state")
    with in_background(stop), pytest.raises(JobEndedError, match="stopped by a user"):
        cluster.run()
    assert len(cluster.api.created) == 1


# API faults and permissions


FAULTS = {
    "429 with Retry-After": Fault("create", "*", 429, times=2, seconds=0.2),
    "500 on create": Fault("create", "*", 500, times=2),
    "connection breaks before creation": Fault("create", "*", "drop"),
    "connection breaks after creation": Fault("create", "*", "lose"),
    "creation times out": Fault("create", "*", "silence", seconds=0.5),
    "500 during watch": Fault("get", "*", 500, times=4, after=1),
    "503 during watch": Fault("get", "*", 503, times=4),
    "429 during watch": Fault("get", "*", 429, times=2, seconds=0.1),
    "403 of a server that is starting": Fault("get", "*", 403, times=4, after=1),
    "410 Gone": Fault("*", "*", 410, times=2),
    "connections break during watch": Fault("get", "*", "drop", times=4),
    "timeouts during watch": Fault("get", "*", "silence", times=2, seconds=0.5),
    "500 on list": Fault("list", "*", 500, times=2),
    "500 on delete": Fault("delete", "*", 500, times=2),
    "lost response on delete": Fault("delete", "*", "lose"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_transient_api_error_is_retried_without_second_start(cluster: JobCluster, name: str) -> None:
    fault = FAULTS[name]
    cluster.api.works = [succeed_after_a_while]
    cluster.api.faults = [Fault(fault.verb, fault.resource, fault.effect, fault.times, fault.seconds, fault.after)]
    assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == len(cluster.api.started) == 1
    assert not cluster.api.faults[0].times, "the fault occurred"


def test_api_errors_during_watch_are_reported(cluster: JobCluster) -> None:
    cluster.api.works = [succeed_after_a_while]
    cluster.api.faults = [Fault("get", "*", 503, times=3)]
    cluster.run()
    assert "the API server returned 503: the server is currently unable to handle the request; retrying for" in str(
        cluster.reporter
    )


def test_next_call_resumes_watch_after_retry_timeout(cluster: JobCluster) -> None:
    cluster.api.works = [succeed_after_a_while]
    cluster.settings = {"patience_seconds": 0.5}
    cluster.api.faults = [Fault("get", "*", 500, times=99, after=1), Fault("delete", "*", 500, times=99)]
    with pytest.raises(UnresponsiveError, match="still failing after 0 seconds"):
        cluster.run()
    cluster.api.faults = []
    assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == len(cluster.api.started) == 1
    assert "already exists; watching it" in str(cluster.reporter)


def test_deleted_job_whose_pods_cannot_be_listed_is_given_up(cluster: JobCluster) -> None:
    """The job itself is answered with 404, so only the failing list of its pods tells that the API server fails."""
    cluster.settings = {"patience_seconds": 0.2}
    cluster.api.works = [save_when_stopped]
    job = cluster.create_launcher().start(COMMAND, cluster.folder)
    cluster.wait_until(lambda: cluster.api.started)
    job.poll()
    job.cancel()
    cluster.api.faults = [Fault("list", "pods", 500, times=1000)]

    def has_given_up() -> bool:
        try:
            job.poll()
        except UnresponsiveError:
            return True
        return False

    cluster.wait_until(has_given_up, seconds=3)


def test_workload_that_kueue_has_not_tried_waits_for_quota() -> None:
    """Kueue 0.19 writes no condition if an equal workload waits already."""
    job = {"metadata": {"name": "t-1"}, "spec": {"suspend": True}}
    status = job_conditions.read_trainjob_status(job, {"status": {"conditions": []}}, [])
    assert (status.state, status.reason) == ("waiting", "no quota is reserved yet")


def test_job_that_kueue_ignores_names_queue_and_priority(cluster: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the WorkloadPriorityClass, Kueue creates no Workload and no event."""
    monkeypatch.setattr(kubernetes_launcher, "QUEUE_TIMEOUT_SECONDS", 0.1)
    use_queue(cluster)
    cluster.api.priority_classes.remove("batch")

    def create_priority_class() -> None:
        reason = "Kueue has not queued the job; check that the LocalQueue .* and the WorkloadPriorityClass batch exist"
        cluster.wait_until(lambda: re.search(reason, str(cluster.reporter)))
        cluster.api.priority_classes.add("batch")

    with in_background(create_priority_class):
        assert cluster.run() == TRAINED_OUTCOME


def test_job_started_without_get_permission_is_found_later(cluster: JobCluster) -> None:
    cluster.api.denied = {("get", cluster.plural)}
    with pytest.raises(AccessError, match=f"no permission to get {cluster.plural}"):
        cluster.run()
    cluster.api.denied = set()
    assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == len(cluster.api.started) == 1


def test_job_that_may_no_longer_be_read_continues(cluster: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_launcher, "MAX_REFUSED_SECONDS", 0.3)
    cluster.api.works = [succeed_after_a_while]
    cluster.api.faults = [Fault("get", "*", 403, times=99, after=1)]
    with pytest.raises(AccessError, match=f"no permission to get {cluster.plural}"):
        cluster.run()
    assert "retrying for 0 seconds" in str(cluster.reporter)
    cluster.api.faults = []
    assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == len(cluster.api.started) == 1


def test_refused_list_of_pods_is_repeated(cluster: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_launcher, "REPEAT_REFUSED_SECONDS", 0.1)
    cluster.api.works = [succeed_after_a_while]
    cluster.api.faults = [Fault("list", "pods", 403, times=2, after=1)]
    assert cluster.run() == TRAINED_OUTCOME
    assert not cluster.api.faults[0].times, "the list was repeated"


def test_job_runs_without_permission_for_pods_and_events(cluster: JobCluster) -> None:
    use_queue(cluster)
    cluster.api.denied = {("list", kind) for kind in ("pods", "events", "workloads")}
    cluster.api.works, cluster.api.admits = [save_at_once, succeed], False

    def admit() -> None:
        cluster.wait_until(lambda: "is waiting: the job is suspended" in str(cluster.reporter))
        cluster.api.admits = True

    with in_background(admit):
        assert cluster.run() == TRAINED_OUTCOME
    assert cluster.api.calls.count(("list", "events")) <= 2, "denied lists are not repeated"


def test_example_role_grants_exactly_the_used_permissions(cluster: JobCluster) -> None:
    path = ROOT / "deploy" / "components" / f"launcher-{cluster.kind}" / "launcher-rbac.yaml"
    role, _ = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    granted = {(verb, kind) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    use_queue(cluster)
    cluster.api.admits = cluster.api.can_start = False

    def admit_and_start() -> None:
        cluster.wait_until(lambda: "no quota is reserved yet" in str(cluster.reporter))
        cluster.api.admits = True
        cluster.wait_until(lambda: ("list", "events") in cluster.api.calls)
        cluster.api.can_start = True

    with in_background(admit_and_start):
        assert cluster.run() == TRAINED_OUTCOME
    assert set(cluster.api.calls) == granted


def test_denied_delete_keeps_outcome_and_prints_command(cluster: JobCluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.api.denied = {("delete", cluster.plural)}
    assert cluster.run() == TRAINED_OUTCOME
    assert (
        f"Delete it with: kubectl delete {cluster.plural} {cluster.api.created[0]} -n team-a" in capfd.readouterr().err
    )
    cluster.api.objects[cluster.plural].clear()


def test_missing_kubeconfig_is_reported(cluster: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.volume / "none"))
    with pytest.raises(EngineMissingError, match="no Kubernetes cluster is configured"):
        cluster.create_launcher()


# Rediscovery of jobs


def test_job_of_killed_watcher_is_found(cluster: JobCluster) -> None:
    cluster.api.works = [succeed_after_a_while]
    cluster.create_launcher().start(COMMAND, cluster.folder)
    assert cluster.run() == TRAINED_OUTCOME
    assert len(cluster.api.created) == len(cluster.api.started) == 1


def test_concurrent_starts_return_same_job(cluster: JobCluster) -> None:
    cluster.api.works = [succeed_after_a_while]
    names = [cluster.create_launcher().start(COMMAND, cluster.folder).name]
    other = cluster.create_launcher()
    other._wait_for_others = lambda folder: None  # type: ignore[method-assign]
    other._list_jobs = lambda folder: []  # type: ignore[method-assign] # it listed jobs before the other had started
    (cluster.folder / kubernetes_launcher.ATTEMPTS_FILENAME).unlink()
    names.append(other.start(COMMAND, cluster.folder).name)
    assert len(set(names)) == len(cluster.api.created) == 1
    assert cluster.run() == TRAINED_OUTCOME


def test_job_name_taken_by_other_folder_is_skipped(cluster: JobCluster) -> None:
    launcher = cluster.create_launcher()
    name = job_manifests.build_job_name(job_manifests.compute_job_key(launcher.settings, cluster.folder), 1)
    body = getattr(job_manifests, f"build_{cluster.kind}")(launcher.settings, COMMAND, cluster.folder, name)
    body["metadata"]["annotations"]["tuneline/folder"] = str(cluster.folder.parent)
    launcher.client.create(launcher.kind, body)
    assert cluster.run() == TRAINED_OUTCOME
    assert [created_name[-2:] for created_name in cluster.api.created] == ["-1", "-2"]
    launcher.client.delete(launcher.kind, name)


def test_job_starts_after_pods_of_previous_job_ended(cluster: JobCluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.api.works = [save_when_stopped, succeed]
    previous = cluster.create_launcher().start(COMMAND, cluster.folder)
    cluster.api.stuck_jobs.add(previous.name)
    cluster.wait_until(lambda: cluster.api.started)  # else the next job would get the work of this one
    previous.cancel()

    def release_pods() -> None:
        cluster.wait_until(lambda: cluster.api.calls.count(("list", cluster.plural)) > 4)
        assert len(cluster.api.created) == 1
        cluster.api.stuck_jobs.clear()

    with in_background(release_pods):
        assert cluster.run() == TRAINED_OUTCOME
    waiting = rf"{previous.name}(-node-0-0)? is still being deleted; the next job starts afterwards"
    assert re.search(waiting, capfd.readouterr().err)


def test_stuck_deletion_blocks_next_job(cluster: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manifests, "EXIT_GRACE_SECONDS", -10)
    cluster.settings = {"patience_seconds": 0.1}
    previous = cluster.create_launcher().start(COMMAND, cluster.folder)
    cluster.api.stuck_jobs.add(previous.name)
    cluster.wait_until(lambda: cluster.api.started)
    previous.cancel()
    with pytest.raises(BusyError, match=r"is being deleted, but has not terminated within \d+ s"):
        cluster.run()
    cluster.api.stuck_jobs.clear()


def test_kept_job_stays_and_next_call_starts_new_one(cluster: JobCluster) -> None:
    cluster.pod_settings = {"keep": True}
    cluster.api.works = [fail, succeed]
    with pytest.raises(TunelineError, match="the loss is nan"):
        cluster.run()
    assert cluster.run() == TRAINED_OUTCOME
    assert cluster.api.left() == cluster.api.created
    assert [name[-2:] for name in cluster.api.created] == ["-1", "-2"]


def test_next_job_waits_for_pods_of_a_kept_job_that_still_save(cluster: JobCluster) -> None:
    """JobSet deletes the other pods of a failed job; they have their grace period although the job is kept."""
    cluster.pod_settings = {"keep": True}
    cluster.api.works = [fail, succeed]
    with pytest.raises(TunelineError, match="the loss is nan"):
        cluster.run()
    (kept,) = cluster.api.created
    cluster.api.pod_status[kept] = {"phase": "Running"}
    cluster.api.terminating.add(kept)
    polls = cluster.api.calls.count(("list", "pods"))

    def end_pods() -> None:
        cluster.wait_until(lambda: cluster.api.calls.count(("list", "pods")) > polls + 2)
        assert cluster.api.created == [kept]
        cluster.api.pod_status[kept] = {"phase": "Failed"}

    with in_background(end_pods):
        assert cluster.run() == TRAINED_OUTCOME


def test_cancelled_job_is_deleted_despite_keep(cluster: JobCluster) -> None:
    cluster.pod_settings = {"keep": True}
    cluster.api.works = [save_when_stopped]

    def stop() -> None:
        cluster.wait_until(cluster.is_training)
        send_signal(signal.SIGTERM)

    with in_background(stop), pytest.raises(TunelineError):
        cluster.run()
    assert cluster.api.left() == []


def test_cancel_is_idempotent(cluster: JobCluster) -> None:
    cluster.api.works = [save_when_stopped]
    job = cluster.create_launcher().start(COMMAND, cluster.folder)
    for _ in range(3):
        job.cancel()
    cluster.wait_until(lambda: not cluster.api.left())
    job.cancel()
    assert job.poll().state == "cancelled"


# Reasons for waiting


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/9 nodes are available",
                    }
                ]
            },
            "Unschedulable: 0/9 nodes are available",
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}}
                ]
            },
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            {
                "initContainerStatuses": [
                    {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret not found"}}}
                ]
            },
            "CreateContainerConfigError: secret not found",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "is waiting: the pods are starting",
        ),
    ],
)
def test_reason_for_pending_pod_is_reported(cluster: JobCluster, status: dict[str, Any], expected: str) -> None:
    cluster.api.can_start = False

    def unblock() -> None:
        cluster.wait_until(lambda: cluster.api.created)
        cluster.api.pod(status)
        cluster.wait_until(lambda: expected in str(cluster.reporter))
        cluster.api.can_start = True

    with in_background(unblock):
        assert cluster.run() == TRAINED_OUTCOME


def test_newest_event_is_reported_if_it_is_a_warning(cluster: JobCluster) -> None:
    cluster.api.can_start = False

    def add_event(kind: str, reason: str, message: str, second: int) -> None:
        (name,) = cluster.api.created
        event = {
            "involvedObject": {"name": f"{name}-{'raycluster' if cluster.kind == 'rayjob' else 'node-0'}"},
            "type": kind,
            "metadata": {"name": reason},
            "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
        }
        cluster.api.objects["events"][reason] = {**event, "reason": reason, "message": message}

    def unblock() -> None:
        cluster.wait_until(lambda: cluster.api.created)
        add_event("Normal", "AnotherCreate", "Created another pod", 1)
        add_event("Warning", "FailedCreate", "exceeded quota: gpus", 1)
        cluster.wait_until(lambda: "is waiting: FailedCreate: exceeded quota: gpus" in str(cluster.reporter))
        add_event("Normal", "SuccessfulCreate", "Created pod", 2)
        cluster.wait_until(lambda: cluster.reporter.notes[-1].endswith("is waiting: the pods do not exist yet"))
        cluster.api.can_start = True

    with in_background(unblock):
        assert cluster.run() == TRAINED_OUTCOME


def test_reason_for_the_replacement_of_a_removed_pod_is_reported(cluster: JobCluster) -> None:
    cluster.api.can_start = False
    pulling = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}

    def unblock() -> None:
        cluster.wait_until(lambda: cluster.api.created)
        cluster.api.pod({"phase": "Pending", "conditions": [EVICTED]})
        cluster.wait_until(lambda: "was disrupted" in str(cluster.reporter))
        cluster.api.pod({"phase": "Pending", "containerStatuses": [{"state": {"waiting": pulling}}]})
        cluster.wait_until(lambda: cluster.reporter.notes[-1].endswith("Back-off pulling image"))
        cluster.api.can_start = True

    with in_background(unblock):
        assert cluster.run() == TRAINED_OUTCOME


# Refused settings


def test_folder_outside_volume_is_refused_before_any_api_call(cluster: JobCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not on the volume tuneline"):
        launch.run(cluster.create_launcher(), COMMAND, tmp_path, cluster.reporter)
    assert cluster.api.calls == []


@pytest.mark.parametrize("key", ["image", "claim"])
def test_job_without_image_or_claim_is_refused(cluster: JobCluster, key: str) -> None:
    cluster.pod_settings = {key: ""}
    with pytest.raises(ConfigurationError, match=rf"launcher\.{cluster.kind}\.{key} is empty"):
        cluster.run()


def test_job_logs_are_those_of_its_nodes(cluster: JobCluster) -> None:
    job = KubernetesJob("tuneline-x-1", cluster.create_launcher(), cluster.folder)
    crash(Pod(cluster.folder, crash))
    assert job.list_logs() == [cluster.folder / "nodes" / "0" / "torchrun.log"]


def test_retry_without_timeout_calls_once() -> None:
    calls: list[int] = []

    def fail_always() -> None:
        calls.append(1)
        raise kubernetes_client.RetryableError("no answer")

    with pytest.raises(UnresponsiveError, match="no answer; still failing after 0 seconds"):
        kubernetes_client.retry(fail_always, 0, 0.01, lambda text: None)
    assert calls == [1]
    assert isinstance(KubernetesClient(None, "team-a").timeout_seconds, float)
