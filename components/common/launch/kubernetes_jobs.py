"""A training as a job of Kubernetes: a TrainJob of Kubeflow Trainer, or a RayJob of KubeRay.

A job is found again by its label, whoever started it. The object of an ended job is deleted, and its outcome is read from its folder.
Kueue, where a queue is named, suspends a job and lets it go on: it waits then, and its pods find the last checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from components.common import artifacts
from components.common.errors import BusyError, TunelineError
from components.common.launch import OUTCOME, Command, Seen, cluster, forget_outcomes, logs_of_nodes, objects, ray_nodes, verdicts
from components.common.launch.cluster import RAYJOB, TRAINJOB, Cluster, Kind, UnansweredError
from components.common.launch.objects import FOLDER_NOTE, JOB_LABEL, Json
from components.common.launch.settings import LauncherSettings, shared

Found = TypeVar("Found")
TRIES = "tries.json"  # in the job's folder: how many there were, and which that stay are read
KINDS = {"trainjob": TRAINJOB, "rayjob": RAYJOB}
OBJECTS = {"trainjob": objects.trainjob, "rayjob": objects.rayjob}
WORKLOADS = tuple(Kind("kueue.x-k8s.io", version, "workloads", "Workload", "Kueue") for version in ("v1beta2", "v1beta1"))
DELETED = "it was deleted"
LEAVING_PATIENCE = 60.0  # seconds for which a job that is left behind is tried to be deleted


def say(text: str) -> None:
    """A word in the step's log, where there is nobody to report to."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class KubernetesLauncher:
    """The launchers `trainjob` and `rayjob`."""

    settings: LauncherSettings
    cluster: Cluster
    looks_every: float
    resumes: int

    @property
    def kind(self) -> Kind:
        return KINDS[self.settings.kind]

    def start(self, command: Command, folder: Path) -> KubernetesJob:
        """Start the job, once all that an earlier one left has ended: two would write into the same folder.

        Raises ConfigurationError for a job that cannot be, AccessError, BusyError where an earlier one does not end, EngineMissingError
        where the cluster does not know the kind, or does not answer.
        """
        objects.check(self.settings, folder)
        self._wait_for_others(folder)
        forget_outcomes(folder)  # of those, which ended only now
        ray_nodes.forget(folder)
        while True:
            number = max([_tries(folder)["count"], *(_number(one) for one in self._all(folder))]) + 1
            name = objects.name_of(objects.key_of(self.settings, folder), number)
            body = OBJECTS[self.settings.kind](self.settings, command, folder, name)
            if self._created(body, folder):
                _keep(folder, count=number)
                return self._job(name, folder)
            _keep(folder, count=number)

    def find(self, folder: Path) -> KubernetesJob | None:
        """The job of this folder that is not being deleted and whose outcome nobody has read."""
        objects.check(self.settings, folder)
        read = _tries(folder)["read"]
        there = [one for one in self._all(folder) if not _leaves(one) and one["metadata"]["name"] not in read]
        return self._job(there[-1]["metadata"]["name"], folder) if there else None

    def _job(self, name: str, folder: Path) -> KubernetesJob:
        return KubernetesJob(name, self, folder)

    def insist(self, call: Callable[[], Found]) -> Found:
        """An answer, within the patience of the settings."""
        return cluster.insist(call, self.settings.patience_seconds, self.looks_every, say)

    def _all(self, folder: Path) -> list[Json]:
        """This folder's jobs, the newest last."""
        label = f"{JOB_LABEL}={objects.key_of(self.settings, folder)}"
        found = self.insist(lambda: self.cluster.named(self.kind, label))
        own = [one for one in found if _is_of(one, folder)]
        return sorted(own, key=_number)

    def _wait_for_others(self, folder: Path) -> None:
        """Until the pods of earlier jobs have ended. They have their time to save, and then the patience."""
        patience = objects.pods_of(self.settings).save_seconds + objects.AFTER_SAVING + self.settings.patience_seconds
        until, told = time.monotonic() + patience, False
        while leaving := [one["metadata"]["name"] for one in self._all(folder) if _leaves(one)]:
            if time.monotonic() > until:
                hint = f"`kubectl describe {self.kind.plural} {leaving[0]}` says what holds it: often a node that does not answer any more."
                raise BusyError(f"{leaving[0]} is being deleted and does not end", hint=hint)
            if not told:
                say(f"{leaving[0]} still ends; the next job starts after it")
                told = True
            time.sleep(self.looks_every)

    def _created(self, body: Json, folder: Path) -> bool:
        """Whether the job is there now: made, or by a call whose answer was lost. False: its name is taken."""
        name = body["metadata"]["name"]
        try:
            self.insist(lambda: self.cluster.create(self.kind, body))
        except cluster.ConflictError:
            there = self.insist(lambda: self.cluster.get(self.kind, name))
            return bool(there and _is_of(there, folder) and not _leaves(there))
        return True


@dataclass
class KubernetesJob:
    """A TrainJob or RayJob that was started."""

    name: str
    launcher: KubernetesLauncher
    folder: Path
    _seen: Seen = field(default_factory=lambda: Seen("waiting"))
    _silent_since: float | None = None
    _untold: set[str] = field(default_factory=set)  # what may not be read here, and is not asked for again
    _uid: str = ""

    def look(self) -> Seen:
        """Whether it waits or runs, and how it ended. While the API server does not answer it is what it was, for as long as the patience
        of the settings; then SilentError is raised."""
        launcher = self.launcher
        try:
            job = launcher.cluster.get(launcher.kind, self.name)
            self._silent_since = None
            self._seen = self._judged(job)
        except UnansweredError as error:
            return self._unanswered(error)
        return self._seen

    def stop(self) -> None:
        """Ask it to save its work and end, for good: the pods of a deleted job get SIGTERM, and the time to save."""
        if self.launcher.kind is RAYJOB:
            ray_nodes.ask(self.folder, "save")  # nodes that are lost on the way are not replaced
        self.launcher.insist(lambda: self.launcher.cluster.delete(self.launcher.kind, self.name))

    def cancel(self) -> None:
        """Delete it. What keeps it from being deleted is said and not raised: how the job ended is what counts."""
        launcher = self.launcher
        if objects.pods_of(launcher.settings).keep and self._seen.state in ("succeeded", "failed", "ended"):
            _keep(self.folder, read=self.name)
            return
        patience = min(LEAVING_PATIENCE, launcher.settings.patience_seconds)
        try:
            cluster.insist(lambda: launcher.cluster.delete(launcher.kind, self.name), patience, launcher.looks_every, say)
        except TunelineError as error:
            by_hand = f"kubectl delete {launcher.kind.plural} {self.name} -n {launcher.cluster.namespace}"
            say(f"{self.name} could not be deleted and is left behind: {error.message}. By hand: {by_hand}")

    def logs(self) -> list[Path]:
        """What each process of each node wrote to standard error."""
        return logs_of_nodes(self.folder)

    def _judged(self, job: Json | None) -> Seen:
        if job is None or (self._uid and job["metadata"].get("uid") != self._uid):
            return self._gone()
        self._uid = str(job["metadata"].get("uid", ""))
        judge = verdicts.of_trainjob if self.launcher.kind is TRAINJOB else verdicts.of_rayjob
        seen = judge(job, None, [])
        if _leaves(job):
            return (
                seen if seen.state in ("succeeded", "failed") else Seen("running", "it is being deleted, and its pods save what they have")
            )
        if seen.state == "waiting":
            return self._waiting(job, judge)
        return judge(job, None, self._pods(job)) if seen.state == "failed" else seen

    def _waiting(self, job: Json, judge: Callable[[Json, Json | None, list[Json]], Seen]) -> Seen:
        """What it waits for; where nothing that may be read says so, the last warning about it."""
        pods = self._pods(job)
        seen = judge(job, self._workload(), pods)
        if seen.state == "waiting" and not pods and not _is_suspended(job) and (warning := self._warning()):
            return Seen("waiting", warning)
        return seen

    def _gone(self) -> Seen:
        """There is no such object any more. What the training said before counts, where it said that it was done."""
        try:
            left = json.loads((self.folder / OUTCOME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Seen("cancelled", DELETED)
        return Seen("cancelled", DELETED) if "error" in left else Seen("succeeded")

    def _unanswered(self, error: UnansweredError) -> Seen:
        now, patience = time.monotonic(), self.launcher.settings.patience_seconds
        self._silent_since = self._silent_since or now
        if now - self._silent_since >= patience:
            raise cluster.silent(error, patience)
        return Seen(self._seen.state, f"{error.why}; it is asked again for {patience:.0f} seconds")

    def _workload(self) -> Json | None:
        """Kueue's object for this job."""
        if not objects.pods_of(self.launcher.settings).queue:
            return None
        for kind in WORKLOADS:
            found = self._told(kind.version, partial(self.launcher.cluster.named, kind, f"kueue.x-k8s.io/job-uid={self._uid}"))
            if found:
                return found[-1]
        return None

    def _pods(self, job: Json) -> list[Json]:
        ray = (job.get("status") or {}).get("rayClusterName")
        label = f"ray.io/cluster={ray}" if ray else f"jobset.sigs.k8s.io/jobset-name={self.name}"
        return [] if self.launcher.kind is RAYJOB and not ray else self._told("pods", partial(self.launcher.cluster.pods, label))

    def _warning(self) -> str:
        """The newest warning about the job, or about the JobSet of the same name."""
        warnings = [one for one in self._told("events", partial(self.launcher.cluster.events, self.name)) if one.get("type") == "Warning"]
        newest = max(warnings, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""), default=None)
        return f"{newest.get('reason', '')}: {newest.get('message', '')}" if newest else ""

    def _told(self, what: str, read: Callable[[], list[Json]]) -> list[Json]:
        """What may be read; nothing where it may not: it would only say more."""
        if what in self._untold:
            return []
        try:
            return read()
        except TunelineError:
            self._untold.add(what)
            return []


def launcher(settings: LauncherSettings) -> KubernetesLauncher:
    """The launcher in the cluster that is named here. Raises EngineMissingError or ConfigurationError."""
    there = cluster.connect(objects.pods_of(settings).namespace)
    return KubernetesLauncher(settings, there, settings.looks_every, settings.resumes)


def _is_of(job: Json, folder: Path) -> bool:
    return (job["metadata"].get("annotations") or {}).get(FOLDER_NOTE) == str(shared(folder))


def _number(job: Json) -> int:
    return int(str(job["metadata"]["name"]).rpartition("-")[2])


def _leaves(job: Json) -> bool:
    return bool(job["metadata"].get("deletionTimestamp"))


def _is_suspended(job: Json) -> bool:
    return bool((job.get("spec") or {}).get("suspend"))


def _tries(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / TRIES).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {"count": 0, "read": []}


def _keep(folder: Path, *, count: int = 0, read: str = "") -> None:
    known = _tries(folder)
    left = {"count": max(count, known["count"]), "read": [*known["read"], read] if read else known["read"]}
    artifacts.write_atomically(folder / TRIES, json.dumps(left))
