"""A training on a Ray cluster that is there: Ray's jobs interface starts, watches and stops launch.ray_nodes on it.

A job's name there is the digest of its folder and the number of the try, and Ray takes a name once: so a step that is started again finds
its job, and a request that is sent twice starts one. The cluster's nodes see the folder under the same path. A cluster with tokens is asked
with RAY_AUTH_MODE=token and the one in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, which Ray's client reads itself.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from components.common import artifacts, hashing
from components.common.errors import EXIT_INTERRUPTED, GOES_ON, EngineMissingError
from components.common.launch import GOES_ON_BY_ITSELF, NODES, Command, Seen, SilentError, logs_of_nodes, ray_nodes
from components.common.launch.settings import LauncherSettings, as_environment, shared

SUBMITTED, LOG = "ray.json", "driver.log"
ANSWER_SECONDS = 30.0  # for one request
PATIENCE = 20.0  # seconds for a cancelled job to be gone
AGAIN_SECONDS = 2.0  # between two questions to a dashboard that does not answer
SAVE_SECONDS = 180  # for a training that somebody stops with `ray job stop` to save its work; Ray itself gives 3
# What of Ray's kinds of failure would be the same with every try.
LASTING = ("RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE")
Answer = TypeVar("Answer")


class _NoAnswerError(Exception):
    """The dashboard does not answer, or not now."""


class _UnknownJobError(Exception):
    """The cluster knows no such job."""


class _TakenError(Exception):
    """The cluster has a job of this name already."""


@dataclass
class ClusterJob:
    """A job of the cluster's, by its submission id."""

    settings: LauncherSettings
    folder: Path
    name: str
    ended: bool = False
    silent_since: float | None = None

    def look(self) -> Seen:
        """Whether it waits or runs, and how it ended. Raises SilentError where the dashboard is silent for too long."""
        try:
            seen = seen_of(_ask(self.settings, lambda client: client.get_job_info(self.name)))
        except _NoAnswerError as error:
            return self._silence(str(error))
        except _UnknownJobError:
            seen = Seen("ended", "the cluster does not know it any more; it was started anew")
        self.silent_since, self.ended = None, seen.state not in GOES_ON_BY_ITSELF
        if self.ended:
            self._keep_log()
        return seen

    def _silence(self, why: str) -> Seen:
        """The job runs on, whatever the dashboard does, as far as it goes."""
        now = time.monotonic()
        self.silent_since = self.silent_since or now
        if now - self.silent_since > self.settings.patience_seconds:
            raise _missing(self.settings, why)
        return Seen("running", f"the dashboard at {self.settings.ray.address} does not answer")

    def _keep_log(self) -> None:
        """What the entry point printed, and with it every node: Ray forgets it with the cluster."""
        with suppress(_NoAnswerError, _UnknownJobError):
            said = str(_ask(self.settings, lambda client: client.get_job_logs(self.name)))
            artifacts.write_atomically(self.folder / LOG, said)

    def stop(self) -> None:
        """Ask it to save its work and end. The folder is asked, which needs no dashboard."""
        ray_nodes.ask(self.folder, "save")

    def cancel(self) -> None:
        """End it now."""
        if self.ended:
            return
        ray_nodes.ask(self.folder, "now")
        deadline = time.monotonic() + PATIENCE
        with suppress(_NoAnswerError, _UnknownJobError, SilentError, EngineMissingError):
            _ask(self.settings, lambda client: client.stop_job(self.name))
            while self.look().state in GOES_ON_BY_ITSELF and time.monotonic() < deadline:
                time.sleep(0.2)

    def logs(self) -> list[Path]:
        """What the entry point printed, and what each process of each node did."""
        return [self.folder / LOG, *logs_of_nodes(self.folder)]


class RayLauncher:
    """Starts and finds jobs on the cluster that the settings name."""

    def __init__(self, settings: LauncherSettings) -> None:
        if importlib.util.find_spec("ray") is None:
            raise EngineMissingError("Ray is not installed", hint="pip install 'tuneline[ray]', in the version that the cluster has")
        self.settings = settings
        self.looks_every, self.resumes = settings.looks_every, settings.resumes

    def start(self, command: Command, folder: Path) -> ClusterJob:
        """Submit the job. Raises EngineMissingError where the cluster does not answer for long or does not take it."""
        folder = shared(folder)
        ray_nodes.forget(folder)
        shutil.rmtree(folder / NODES, ignore_errors=True)  # the logs of an earlier job
        number = _tries(folder) + 1
        while True:
            name = submission_id(folder, number)
            artifacts.write_atomically(folder / SUBMITTED, json.dumps({"submission_id": name, "tries": number}))
            try:
                _patiently(self.settings, partial(self._submit, name, folder))
            except _TakenError:  # by a request of ours whose answer was lost, or by another job in this place
                if not self._goes_on(name):
                    number += 1
                    continue
            return ClusterJob(self.settings, folder, name)

    def find(self, folder: Path) -> ClusterJob | None:
        """The job that was submitted last for this folder, where it has not ended: one that has is cheaply started again from its end."""
        folder = shared(folder)
        name = _submitted(folder).get("submission_id")
        return ClusterJob(self.settings, folder, name) if name and self._goes_on(name) else None

    def _submit(self, name: str, folder: Path, client: Any) -> None:
        entry = [(self.settings.python or sys.executable), "-P", "-m", ray_nodes.__name__, str(folder)]
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(SAVE_SECONDS), **self.settings.environment, **as_environment(self.settings)}
        client.submit_job(entrypoint=shlex.join(entry), submission_id=name, runtime_env={"env_vars": variables})

    def _goes_on(self, name: str) -> bool:
        try:
            told = _patiently(self.settings, lambda client: client.get_job_info(name))
        except _UnknownJobError:
            return False
        return seen_of(told).state in GOES_ON_BY_ITSELF


def submission_id(folder: Path, number: int) -> str:
    """What the job of a folder is called on the cluster, with its number among the tries."""
    return f"tuneline-{hashing.digest(str(folder))[:16]}-{number}"


def _submitted(folder: Path) -> dict[str, Any]:
    try:
        left: dict[str, Any] = json.loads((folder / SUBMITTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return left


def _tries(folder: Path) -> int:
    return int(_submitted(folder).get("tries", 0))


def seen_of(told: Any) -> Seen:
    """What Ray tells of a job (its JobDetails), as every launcher says it.

    A driver that was killed, asked to save by its machine (75), or lost with its machine did not fail by itself.
    """
    state, said = str(told.status), (told.message or "").strip()
    if state == "PENDING":
        return Seen("waiting", said.splitlines()[0] if said else "")
    if state in ("RUNNING", "SUCCEEDED"):
        return Seen("running" if state == "RUNNING" else "succeeded")
    if state == "STOPPED":
        return Seen("cancelled", "somebody stopped the job of Ray")
    kind = str(getattr(told.error_type, "value", told.error_type) or "")
    code = told.driver_exit_code
    by_itself = kind in LASTING if code is None else 0 < code <= 128 and code != EXIT_INTERRUPTED
    return Seen("failed" if by_itself else "ended", said.splitlines()[-1][:300] if said else kind)


def _patiently(settings: LauncherSettings, call: Callable[[Any], Answer]) -> Answer:
    """As _ask, and again while the dashboard does not answer. Raises SilentError where that takes too long."""
    until = time.monotonic() + settings.patience_seconds
    while True:
        try:
            return _ask(settings, call)
        except _NoAnswerError as error:
            if time.monotonic() > until:
                raise _missing(settings, str(error)) from None
        time.sleep(AGAIN_SECONDS)


def _ask(settings: LauncherSettings, call: Callable[[Any], Answer]) -> Answer:
    """What the dashboard says. Raises _NoAnswerError, _UnknownJobError, _TakenError, or EngineMissingError where it refuses."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        return call(_client(settings.ray.address))
    except AuthenticationError:
        raise EngineMissingError(
            f"the Ray cluster at {settings.ray.address} wants a token, and this one is none or a wrong one",
            hint="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) where this runs: `ray get-auth-token` shows it.",
        ) from None
    except (ConnectionError, requests.RequestException) as error:
        raise _NoAnswerError(str(error)) from None
    except RuntimeError as error:
        raise _refused(settings, str(error)) from None


def _refused(settings: LauncherSettings, said: str) -> Exception:
    """The exception for what the client raises for every answer but a good one; it names the status of HTTP."""
    code = int(found[1]) if (found := re.search(r"status code (\d{3})", said)) else 0
    if "already exists" in said:
        return _TakenError(said)
    if code == 404:
        return _UnknownJobError(said)
    if code == 429 or code >= 500:
        return _NoAnswerError(said)
    return EngineMissingError(
        f"the Ray cluster at {settings.ray.address} refuses: {said[:300]}", hint="docs/ray.md says what the cluster has to be like."
    )


def _client(address: str) -> Any:
    """Ray's own client, which without this would wait for an answer for ever."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):  # type: ignore[misc]
        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **{"timeout": ANSWER_SECONDS, **options})

    return Client(address)


def _missing(settings: LauncherSettings, why: str) -> SilentError:
    return SilentError(
        f"no Ray cluster answers at {settings.ray.address}: {why[:300]}",
        hint=f"Look whether its dashboard runs (`ray start --include-dashboard=true`), or name another in launcher.ray.address. {GOES_ON}",
    )
