"""TrainJobs and RayJobs against a stand-in for the cluster: whatever happens, a call ends as it should, no job is left behind and none is
started twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common import launch
from components.common.errors import EXIT_INTERRUPTED, BusyError, ConfigurationError, EngineMissingError, InterruptedRunError, TunelineError
from components.common.hashing import ROOT
from components.common.launch import Command, JobEndedError, LostJobError, SilentError, cluster, kubernetes_jobs, objects
from components.common.launch.cluster import AccessError, Cluster
from components.common.launch.kubernetes_jobs import KubernetesJob, KubernetesLauncher
from components.common.launch.settings import LauncherSettings
from tests import job_api
from tests.job_api import Fault, JobApi, Pod
from tests.kubernetes_api import kubeconfig

KINDS = ("trainjob", "rayjob")
COMMAND = Command("components.fine_tuning.worker", ["job.json"], 8, 2)
DONE = {"trained": {"steps": 7}}
SAVED = {"kind": "interrupted", "message": "saved after step 7", "hint": "Go on.", "stage": "fine_tuning"}


# What a training does


def works(pod: Pod) -> int:
    pod.tell("trained")
    pod.leave(DONE)
    return 0


def saves(pod: Pod) -> int:
    """Until it is asked to save, or for long."""
    pod.tell("trains")
    pod.asked.wait(60)
    pod.leave({"error": SAVED, "exit_code": EXIT_INTERRUPTED})
    return EXIT_INTERRUPTED


def saves_at_once(pod: Pod) -> int:
    pod.leave({"error": SAVED, "exit_code": EXIT_INTERRUPTED})
    return EXIT_INTERRUPTED


def fails(pod: Pod) -> int:
    error = {"kind": "training", "message": "the loss is nan", "hint": "Lower the rate.", "stage": "fine_tuning"}
    pod.leave({"error": error, "exit_code": 1})
    return 1


def crashes(pod: Pod) -> int:
    log = pod.folder / "nodes" / "0" / "torchrun.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("Traceback\nMemoryError: the last words\n")
    return 1


def is_killed(pod: Pod) -> int:
    """Ends without a word when its pod is taken away."""
    pod.tell("trains")
    pod.asked.wait(60)
    return 137


def works_a_while(pod: Pod) -> int:
    pod.asked.wait(0.6)
    return works(pod)


# The place


@dataclass
class Told:
    """A reporter that keeps the notes."""

    notes: list[str] = field(default_factory=list)

    def step(self, name: str) -> None: ...

    def progress(self, done: int, total: int | None, unit: str) -> None: ...

    def metrics(self, values: Any, step: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __str__(self) -> str:
        return "\n".join(self.notes)


@dataclass
class Place:
    """A cluster, a launcher that asks it, and a job's folder on the volume."""

    api: JobApi
    kind: str
    volume: Path
    told: Told = field(default_factory=Told)
    settings: dict[str, Any] = field(default_factory=dict)
    asks: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        folder = self.volume / "state" / "launch"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def plural(self) -> str:
        return f"{self.kind}s"

    def launcher(self) -> KubernetesLauncher:
        pods = {"image": "tuneline/training:1", "claim": "tuneline", "mount": str(self.volume), "save_seconds": 10, **self.asks}
        said = {"kind": self.kind, "nodes": 2, "looks_every": 0.1, "patience_seconds": 2.0, "resumes": 2, **self.settings}
        made = kubernetes_jobs.launcher(LauncherSettings.model_validate({**said, self.kind: pods}))
        made.cluster.timeout = 0.3
        made.looks_every = self.settings.get("looks_every", 0.05)
        return made

    def run(self) -> dict[str, Any]:
        return launch.run(self.launcher(), COMMAND, self.folder, self.told)

    def wait(self, reached: Callable[[], Any], seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, "it did not come to that in time"
            time.sleep(0.01)

    def trains(self) -> bool:
        return "trains" in self.told.notes


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Whatever a test does, no job and no pod is left in the end."""
    volume = (tmp_path / "volume").resolve()
    monkeypatch.setattr(launch, "LOOKS_EVERY", 0.02)
    with job_api.serving(JobApi(works=[works])) as api:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", api.url, namespace="team-a", token=api.token)))
        here = Place(api, request.param, volume)
        yield here
        if not here.asks.get("keep"):
            here.wait(lambda: not api.left())


@contextmanager
def meanwhile(happens: Callable[[], None]) -> Iterator[None]:
    """Have something happen in a thread; what fails in it is raised here."""
    failed: list[BaseException] = []

    def act() -> None:
        try:
            happens()
        except BaseException as error:
            failed.append(error)
            interrupt(signal.SIGTERM)  # whoever waits for it would wait for ever

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(40)
        assert not failed, failed[0]


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)


# How a training ends


def test_a_job_that_works_gives_its_outcome_and_what_it_tells_is_told(place: Place) -> None:
    assert place.run() == DONE
    assert place.api.created == [f"tuneline-{objects.key_of(place.launcher().settings, place.folder)}-1"]
    assert "trained" in place.told.notes
    assert place.told.notes[0] == f"{place.api.created[0]} was started"


def test_a_job_that_fails_raises_its_own_error_and_is_not_started_again(place: Place) -> None:
    place.api.works = [fails]
    with pytest.raises(TunelineError, match="the loss is nan") as raised:
        place.run()
    assert raised.value.kind == "training"
    assert len(place.api.created) == 1


def test_a_job_that_ends_without_an_outcome_is_lost_and_its_last_words_are_told(place: Place) -> None:
    place.api.works = [crashes]
    with pytest.raises(LostJobError, match="MemoryError: the last words"):
        place.run()
    assert len(place.api.created) == 1


def test_a_job_that_saved_and_ended_with_75_is_started_again_with_the_next_number(place: Place) -> None:
    place.api.works = [saves_at_once, works]
    assert place.run() == DONE
    assert [name[-2:] for name in place.api.created] == ["-1", "-2"]
    assert "it is started again" in str(place.told)


def test_a_job_whose_pod_is_evicted_is_started_again(place: Place) -> None:
    place.api.works = [is_killed, works]
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}

    def evict() -> None:
        place.wait(place.trains)
        place.api.pod({"conditions": [condition]})
        place.api.running[place.api.created[0]].asked.set()

    with meanwhile(evict):
        assert place.run() == DONE
    assert len(place.api.created) == 2
    assert "EvictionByEvictionAPI" in str(place.told)


def test_a_job_that_is_ended_again_and_again_is_given_up_after_its_resumes(place: Place) -> None:
    place.api.works = [saves_at_once]
    with pytest.raises(TunelineError, match="saved after step 7") as raised:
        place.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert len(place.api.created) == 3


def test_a_job_out_of_time_goes_on_as_a_new_one(place: Place) -> None:
    place.api.works = [is_killed, works]
    place.asks = {"deadline_seconds": 600}

    def end() -> None:
        place.wait(place.trains)
        with place.api.lock:
            job = place.api.job()
            job_api._state(job, "failed")
            for one in (job["status"], *job["status"].get("conditions", [])):
                one["reason"] = "DeadlineExceeded"
            place.api.running[job["metadata"]["name"]].asked.set()

    with meanwhile(end):
        assert place.run() == DONE
    assert len(place.api.created) == 2


# Kueue


def queued(place: Place) -> None:
    place.asks = {"queue": "team-a", "priority": "batch"}


def test_a_job_that_waits_for_quota_says_so_and_runs_once_it_is_admitted(place: Place) -> None:
    queued(place)
    place.api.admits = False

    def admit() -> None:
        place.wait(lambda: "waits for quota: couldn't assign flavors" in str(place.told))
        place.api.admits = True

    with meanwhile(admit):
        assert place.run() == DONE
    assert len(place.api.created) == 1


def test_a_preempted_job_saves_waits_and_goes_on_when_it_is_admitted_again(place: Place) -> None:
    queued(place)
    place.api.works = [saves, works]

    def preempt() -> None:
        place.wait(place.trains)
        place.api.admits = False
        place.wait(lambda: "evicted by Kueue (Preempted): Preempted to accommodate" in str(place.told))
        place.api.admits = True

    with meanwhile(preempt):
        assert place.run() == DONE
    assert len(place.api.created) == 1, "it is the same job that goes on"
    assert len(place.api.started) == 2


def test_an_older_kueue_that_knows_one_version_of_its_workloads_is_understood(place: Place) -> None:
    queued(place)
    place.api.admits = False
    place.api.faults = [Fault("list", "workloads", 404)]
    seen: list[str] = []

    def admit() -> None:
        place.wait(lambda: "waits for quota" in str(place.told))
        seen.append(str(place.told))
        place.api.admits = True

    with meanwhile(admit):
        assert place.run() == DONE
    assert seen


def test_a_job_that_is_stopped_while_it_waits_leaves_nothing_behind(place: Place) -> None:
    queued(place)
    place.api.admits = False

    def stop() -> None:
        place.wait(lambda: "waits for quota" in str(place.told))
        interrupt(signal.SIGTERM)

    with meanwhile(stop), pytest.raises(InterruptedRunError):
        place.run()
    assert place.api.started == []


# Ended by somebody


def test_a_job_that_somebody_deletes_saves_and_is_not_started_again(place: Place) -> None:
    place.api.works = [saves]

    def delete() -> None:
        place.wait(place.trains)
        with place.api.lock:
            place.api._delete(place.api.job(), {"propagationPolicy": "Foreground"})

    with meanwhile(delete), pytest.raises(TunelineError, match="saved after step 7") as raised:
        place.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert len(place.api.created) == 1


def test_a_job_that_is_deleted_before_it_has_saved_anything_was_ended_from_outside(place: Place) -> None:
    place.api.works = [is_killed]

    def delete() -> None:
        place.wait(place.trains)
        with place.api.lock:
            place.api._delete(place.api.job(), {"propagationPolicy": "Foreground"})

    with meanwhile(delete), pytest.raises(JobEndedError, match="was ended from outside: it was deleted"):
        place.run()
    assert len(place.api.created) == 1


def test_a_job_that_was_done_before_it_was_deleted_is_done(place: Place) -> None:
    place.api.works = [works_a_while]
    place.settings = {"looks_every": 0.5}

    def delete() -> None:
        place.wait(lambda: (place.folder / "outcome.json").exists())
        with place.api.lock:
            place.api._delete(place.api.job(), {"propagationPolicy": "Foreground"})

    with meanwhile(delete):
        assert place.run() == DONE


def test_sigterm_to_who_watches_has_the_training_save_and_deletes_the_job(place: Place) -> None:
    place.api.works = [saves]

    def stop() -> None:
        place.wait(place.trains)
        interrupt(signal.SIGTERM)

    with meanwhile(stop), pytest.raises(TunelineError, match="saved after step 7") as raised:
        place.run()
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert place.api.left() == [], "it was waited for"


def test_a_second_ctrl_c_deletes_the_job_and_waits_no_longer(place: Place) -> None:
    place.api.works = [saves]

    def stop() -> None:
        place.wait(place.trains)
        name = place.api.created[0]
        place.api.holds.add(name)
        interrupt(signal.SIGINT)
        place.wait(lambda: ("delete", place.plural) in place.api.calls)
        interrupt(signal.SIGINT)
        time.sleep(0.3)
        place.api.holds.clear()

    with meanwhile(stop), pytest.raises(KeyboardInterrupt):
        place.run()


def test_a_ray_job_that_is_stopped_by_hand_was_cancelled(place: Place) -> None:
    place.api.works = [is_killed]

    def stop() -> None:
        place.wait(place.trains)
        with place.api.lock:
            place.api.job()["status"] = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED", "message": "stopped by a user"}

    if place.kind == "trainjob":
        pytest.skip("a TrainJob has no such state")
    with meanwhile(stop), pytest.raises(JobEndedError, match="stopped by a user"):
        place.run()
    assert len(place.api.created) == 1


# The API server


BROKEN = {
    "429 with Retry-After": Fault("create", "*", 429, times=2, seconds=0.2),
    "500 on create": Fault("create", "*", 500, times=2),
    "the connection breaks before the job is made": Fault("create", "*", "drop"),
    "the connection breaks after the job is made": Fault("create", "*", "lose"),
    "the answer to the creation is lost in silence": Fault("create", "*", "silence", seconds=0.5),
    "500 while it is watched": Fault("get", "*", 500, times=4, after=1),
    "503 while it is watched": Fault("get", "*", 503, times=4),
    "429 while it is watched": Fault("get", "*", 429, times=2, seconds=0.1),
    "410 Gone": Fault("*", "*", 410, times=2),
    "connections that break while it is watched": Fault("get", "*", "drop", times=4),
    "silence while it is watched": Fault("get", "*", "silence", times=2, seconds=0.5),
    "500 when it is looked for": Fault("list", "*", 500, times=2),
    "500 when it is deleted": Fault("delete", "*", 500, times=2),
    "a lost answer when it is deleted": Fault("delete", "*", "lose"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_server_that_fails_for_a_while_is_asked_again_and_nothing_is_started_twice(place: Place, what: str) -> None:
    fault = BROKEN[what]
    place.api.works = [works_a_while]
    place.api.faults = [Fault(fault.verb, fault.resource, fault.what, fault.times, fault.seconds, fault.after)]
    assert place.run() == DONE
    assert len(place.api.created) == len(place.api.started) == 1
    assert not place.api.faults[0].times, "it did happen"


def test_a_server_that_fails_while_a_job_is_watched_is_told_of(place: Place) -> None:
    place.api.works = [works_a_while]
    place.api.faults = [Fault("get", "*", 503, times=3)]
    place.run()
    assert "the API server answers 503: the server is currently unable to handle the request; it is asked again" in str(place.told)


def test_a_server_that_is_silent_for_too_long_ends_the_watching_and_the_next_call_goes_on(place: Place) -> None:
    place.api.works = [works_a_while]
    place.settings = {"patience_seconds": 0.5}
    place.api.faults = [Fault("get", "*", 500, times=99, after=1), Fault("delete", "*", 500, times=99)]
    with pytest.raises(SilentError, match="also after 0 seconds of asking"):
        place.run()
    place.api.faults = []
    assert place.run() == DONE
    assert len(place.api.created) == len(place.api.started) == 1
    assert "is there already and is watched further" in str(place.told)


def test_who_may_not_create_is_told_which_right_is_needed(place: Place) -> None:
    place.api.denied = {("create", place.plural)}
    with pytest.raises(AccessError, match=f"may not create {place.plural}: .*is forbidden: User") as raised:
        place.run()
    assert "launcher-rbac.yaml" in raised.value.hint
    assert place.api.created == []


def test_who_may_not_get_is_told_and_the_job_is_found_again_by_who_may(place: Place) -> None:
    place.api.denied = {("get", place.plural)}
    with pytest.raises(AccessError, match=f"may not get {place.plural}"):
        place.run()
    place.api.denied = set()
    assert place.run() == DONE
    assert len(place.api.created) == len(place.api.started) == 1


def test_who_is_not_accepted_is_told(place: Place) -> None:
    place.api.token = "another"
    with pytest.raises(AccessError, match="does not accept who is asking"):
        place.run()


def test_a_job_runs_where_neither_pods_nor_events_nor_workloads_may_be_read(place: Place) -> None:
    queued(place)
    place.api.denied = {("list", kind) for kind in ("pods", "events", "workloads")}
    place.api.works, place.api.admits = [saves_at_once, works], False

    def admit() -> None:
        place.wait(lambda: "waits: it is suspended" in str(place.told))
        place.api.admits = True

    with meanwhile(admit):
        assert place.run() == DONE
    assert place.api.calls.count(("list", "events")) <= 2, "what is refused is not asked for again and again"


def test_the_rights_of_the_example_are_those_that_are_used_and_no_more(place: Place) -> None:
    text = (ROOT / "deploy" / "components" / "launcher" / "launcher-rbac.yaml").read_text(encoding="utf-8")
    role, _ = yaml.safe_load_all(text)
    granted = {(verb, kind) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    queued(place)
    place.api.admits = place.api.starts = False

    def go_on() -> None:
        place.wait(lambda: "waits for quota" in str(place.told))
        place.api.admits = True
        place.wait(lambda: ("list", "events") in place.api.calls)
        place.api.starts = True

    with meanwhile(go_on):
        assert place.run() == DONE
    other = {"trainjobs", "rayjobs"} - {place.plural}
    assert set(place.api.calls) == {(verb, kind) for verb, kind in granted if kind not in other}


def test_a_job_that_may_not_be_deleted_still_gives_its_outcome(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.api.denied = {("delete", place.plural)}
    assert place.run() == DONE
    assert f"By hand: kubectl delete {place.plural} {place.api.created[0]} -n team-a" in capfd.readouterr().err
    place.api.objects[place.plural].clear()


def test_a_cluster_without_the_operator_says_what_to_install(place: Place) -> None:
    place.api.unknown = {place.plural}
    with pytest.raises(EngineMissingError, match="the cluster knows no") as raised:
        place.run()
    assert "Install Kube" in raised.value.hint


def test_a_cluster_whose_version_lacks_a_field_refuses_the_job_instead_of_ignoring_the_field(place: Place) -> None:
    place.api.old_fields = {"runtimePatches", "submissionMode"}
    with pytest.raises(ConfigurationError, match="strict decoding error: unknown field"):
        place.run()


def test_where_no_cluster_is_named_that_is_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(place.volume / "none"))
    with pytest.raises(EngineMissingError, match="no cluster is named here"):
        place.launcher()


# Found again


def test_a_job_whose_watcher_was_killed_is_found_and_watched_further(place: Place) -> None:
    place.api.works = [works_a_while]
    place.launcher().start(COMMAND, place.folder)
    assert place.run() == DONE
    assert len(place.api.created) == len(place.api.started) == 1


def test_of_two_that_start_at_once_both_get_the_same_job(place: Place) -> None:
    place.api.works = [works_a_while]
    names = [place.launcher().start(COMMAND, place.folder).name]
    first = place.launcher()
    first._wait_for_others = lambda folder: None  # type: ignore[method-assign]
    first._all = lambda folder: []  # type: ignore[method-assign] # it looked before the other had begun
    (place.folder / kubernetes_jobs.TRIES).unlink()
    names.append(first.start(COMMAND, place.folder).name)
    assert len(set(names)) == len(place.api.created) == 1
    assert place.run() == DONE


def test_a_name_that_another_folders_job_has_is_left_to_it(place: Place) -> None:
    launcher = place.launcher()
    name = objects.name_of(objects.key_of(launcher.settings, place.folder), 1)
    body = kubernetes_jobs.OBJECTS[place.kind](launcher.settings, COMMAND, place.folder, name)
    body["metadata"]["annotations"]["tuneline/folder"] = str(place.folder.parent)
    launcher.cluster.create(launcher.kind, body)
    assert place.run() == DONE
    assert [one[-2:] for one in place.api.created] == ["-1", "-2"]
    launcher.cluster.delete(launcher.kind, name)


def test_a_job_starts_only_after_the_pods_of_the_one_before_have_ended(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.api.works = [saves, works]
    before = place.launcher().start(COMMAND, place.folder)
    place.api.holds.add(before.name)
    before.cancel()

    def end() -> None:
        place.wait(lambda: place.api.calls.count(("list", place.plural)) > 4)
        assert len(place.api.created) == 1
        place.api.holds.clear()

    with meanwhile(end):
        assert place.run() == DONE
    assert f"{before.name} still ends; the next job starts after it" in capfd.readouterr().err


def test_a_job_that_never_ends_keeps_the_next_from_starting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "AFTER_SAVING", -10)
    place.settings = {"patience_seconds": 0.1}
    before = place.launcher().start(COMMAND, place.folder)
    place.api.holds.add(before.name)
    before.cancel()
    with pytest.raises(BusyError, match="is being deleted and does not end"):
        place.run()
    place.api.holds.clear()


def test_a_job_that_is_kept_stays_and_the_next_call_starts_a_new_one(place: Place) -> None:
    place.asks = {"keep": True}
    place.api.works = [fails, works]
    with pytest.raises(TunelineError, match="the loss is nan"):
        place.run()
    assert place.run() == DONE
    assert place.api.left() == place.api.created
    assert [name[-2:] for name in place.api.created] == ["-1", "-2"]


def test_a_kept_job_that_is_cancelled_does_not_stay(place: Place) -> None:
    place.asks = {"keep": True}
    place.api.works = [saves]

    def stop() -> None:
        place.wait(place.trains)
        interrupt(signal.SIGTERM)

    with meanwhile(stop), pytest.raises(TunelineError):
        place.run()
    assert place.api.left() == []


def test_cancel_once_more_does_no_harm(place: Place) -> None:
    place.api.works = [saves]
    job = place.launcher().start(COMMAND, place.folder)
    for _ in range(3):
        job.cancel()
    place.wait(lambda: not place.api.left())
    job.cancel()
    assert job.look().state == "cancelled"


# What a job waits for


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9 nodes are available"}]},
            "Unschedulable: 0/9 nodes are available",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}}]},
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            {"initContainerStatuses": [{"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret not found"}}}]},
            "CreateContainerConfigError: secret not found",
        ),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, "waits: its pods start"),
    ],
)
def test_what_keeps_a_pod_from_starting_is_told(place: Place, status: dict[str, Any], told: str) -> None:
    place.api.starts = False

    def mend() -> None:
        place.wait(lambda: place.api.created)
        place.api.pod(status)
        place.wait(lambda: told in str(place.told))
        place.api.starts = True

    with meanwhile(mend):
        assert place.run() == DONE


def test_a_warning_is_told_where_there_is_no_pod_to_look_at(place: Place) -> None:
    place.api.starts = False

    def mend() -> None:
        place.wait(lambda: place.api.created)
        about = {"involvedObject": {"name": place.api.created[0]}, "type": "Warning", "metadata": {"name": "e"}, "reason": "FailedCreate"}
        place.api.objects["events"]["e"] = {**about, "message": "exceeded quota: gpus"}
        place.wait(lambda: "waits: FailedCreate: exceeded quota: gpus" in str(place.told))
        place.api.starts = True

    with meanwhile(mend):
        assert place.run() == DONE


# What cannot be


def test_a_folder_that_is_not_on_the_volume_is_refused_before_anything_is_asked(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not on the volume tuneline"):
        launch.run(place.launcher(), COMMAND, tmp_path, place.told)
    assert place.api.calls == []


@pytest.mark.parametrize("key", ["image", "claim"])
def test_a_job_without_an_image_or_a_claim_is_refused(place: Place, key: str) -> None:
    place.asks = {key: ""}
    with pytest.raises(ConfigurationError, match=rf"launcher\.{place.kind}\.{key} is empty"):
        place.run()


def test_the_logs_of_a_job_are_those_of_its_nodes(place: Place) -> None:
    job = KubernetesJob("tuneline-x-1", place.launcher(), place.folder)
    crashes(Pod(place.folder, crashes))
    assert job.logs() == [place.folder / "nodes" / "0" / "torchrun.log"]


def test_what_cannot_be_repeated_is_not_repeated() -> None:
    calls: list[int] = []

    def never() -> None:
        calls.append(1)
        raise cluster.UnansweredError("no answer")

    with pytest.raises(SilentError, match="no answer, also after 0 seconds"):
        cluster.insist(never, 0, 0.01, lambda text: None)
    assert calls == [1]
    assert isinstance(Cluster(None, "team-a").timeout, float)
