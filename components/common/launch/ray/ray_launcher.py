"""The launcher `ray`: a training run on an existing Ray cluster, through Ray's job submission API and `ray_entrypoint`.

The submission id is a digest of the job folder and the attempt. Ray accepts an id once: a restarted step finds its job,
and a repeated request starts no second job. The job folder has the same path on all nodes.
"""

# For token authentication, Ray's client reads RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.

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
from typing import TYPE_CHECKING, TypeVar

from components.common.artifacts import artifact_folder, hashing
from components.common.launch import (
    ACTIVE_STATES,
    NODES_FOLDER,
    Command,
    JobStatus,
    UnresponsiveError,
    list_node_logs,
    read_json_object,
)
from components.common.launch.launcher_settings import LauncherSettings, resolve_folder, to_environment
from components.common.launch.ray import ray_entrypoint
from components.common.runtime.errors import EXIT_INTERRUPTED, EngineMissingError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

SUBMISSION_FILENAME, DRIVER_LOG_FILENAME = "ray.json", "driver.log"
REQUEST_TIMEOUT_SECONDS = 30.0
CANCEL_TIMEOUT_SECONDS = 20.0
RETRY_INTERVAL_SECONDS = 2.0
SAVE_SECONDS = 180  # time to save after `ray job stop`; Ray's default is 3 seconds
# Ray's error types that another attempt would repeat.
PERMANENT_ERROR_TYPES = (
    "RUNTIME_ENV_SETUP_FAILURE",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
)
Answer = TypeVar("Answer")


class _RetryableError(Exception):
    """The dashboard does not answer, or is overloaded."""


class _UnknownJobError(Exception):
    """The cluster has no job with this id."""


class _DuplicateJobError(Exception):
    """The cluster already has a job with this id."""


@dataclass
class SubmittedRayJob:
    """A job of the cluster; `name` is its submission id."""

    settings: LauncherSettings
    folder: Path
    name: str
    has_ended: bool = False
    unresponsive_since: float | None = None

    def poll(self) -> JobStatus:
        """Return the current status; "running" while the dashboard does not answer.

        Raises:
            EngineMissingError: the cluster rejects the call.
            UnresponsiveError: the dashboard did not answer for the retry timeout of the settings.
        """
        try:
            status = read_job_status(_call(self.settings, lambda client: client.get_job_info(self.name)))
        except _RetryableError as error:
            now = time.monotonic()
            self.unresponsive_since = self.unresponsive_since or now
            if now - self.unresponsive_since > self.settings.patience_seconds:
                raise _build_unresponsive_error(self.settings, str(error)) from None
            return JobStatus("running", f"the dashboard at {self.settings.ray.address} does not answer")
        except _UnknownJobError:
            status = JobStatus("ended", "the cluster has no record of the job; the cluster may have been restarted")
        self.unresponsive_since, self.has_ended = None, status.state not in ACTIVE_STATES
        if self.has_ended:  # Ray's copy of the driver's log disappears with the cluster
            with suppress(_RetryableError, _UnknownJobError):
                text = str(_call(self.settings, lambda client: client.get_job_logs(self.name)))
                artifact_folder.write_atomically(self.folder / DRIVER_LOG_FILENAME, text)
        return status

    def request_stop(self) -> None:
        """Request through the job folder that the job saves and ends; this works without the dashboard."""
        ray_entrypoint.request_stop(self.folder, "save")

    def cancel(self) -> None:
        """Cancel the job immediately."""
        if self.has_ended:
            return
        ray_entrypoint.request_stop(self.folder, "now")
        deadline = time.monotonic() + CANCEL_TIMEOUT_SECONDS
        with suppress(_RetryableError, _UnknownJobError, UnresponsiveError, EngineMissingError):
            _call(self.settings, lambda client: client.stop_job(self.name))
            while self.poll().state in ACTIVE_STATES and time.monotonic() < deadline:
                time.sleep(0.2)

    def list_logs(self) -> list[Path]:
        """Return the paths of the logs of the entry point and of all processes."""
        return [self.folder / DRIVER_LOG_FILENAME, *list_node_logs(self.folder)]


class RayLauncher:
    """Launcher of jobs on an existing Ray cluster.

    Raises:
        EngineMissingError: the package ray is not installed.
    """

    def __init__(self, settings: LauncherSettings) -> None:
        if importlib.util.find_spec("ray") is None:
            hint = "Run: pip install 'tuneline[ray]', with the Ray version of the cluster."
            raise EngineMissingError("launcher.kind ray requires the package ray, which is not installed", hint=hint)
        self.settings = settings
        self.poll_interval_seconds, self.max_resumes = settings.looks_every, settings.resumes

    def start(self, command: Command, folder: Path) -> SubmittedRayJob:
        """Submit the job.

        Raises:
            UnresponsiveError: the dashboard did not answer for the retry timeout of the settings.
            EngineMissingError: the cluster rejects the job.
        """
        folder = resolve_folder(folder)
        ray_entrypoint.reset_folder(folder)
        shutil.rmtree(folder / NODES_FOLDER, ignore_errors=True)  # the logs of an earlier job
        attempt = int(read_json_object(folder / SUBMISSION_FILENAME).get("tries", 0)) + 1
        while True:
            name = build_submission_id(folder, attempt)
            record = json.dumps({"submission_id": name, "tries": attempt})
            artifact_folder.write_atomically(folder / SUBMISSION_FILENAME, record)
            try:
                _retry(self.settings, partial(self._submit, name, folder))
            except _DuplicateJobError:  # created by a request whose answer was lost, or by another process
                if not self._is_active(name):
                    attempt += 1
                    continue
            return SubmittedRayJob(self.settings, folder, name)

    def find(self, folder: Path) -> SubmittedRayJob | None:
        """Return the folder's last job if it is active, else None: restarting a completed job is cheap.

        Raises:
            UnresponsiveError: the dashboard did not answer for the retry timeout of the settings.
            EngineMissingError: the cluster rejects the call.
        """
        folder = resolve_folder(folder)
        name = read_json_object(folder / SUBMISSION_FILENAME).get("submission_id")
        return SubmittedRayJob(self.settings, folder, name) if name and self._is_active(name) else None

    def _submit(self, name: str, folder: Path, client: JobSubmissionClient) -> None:
        entrypoint = [self.settings.python or sys.executable, "-P", "-m", ray_entrypoint.__name__, str(folder)]
        stop_wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(SAVE_SECONDS)}
        variables = {**stop_wait, **self.settings.environment, **to_environment(self.settings)}
        client.submit_job(entrypoint=shlex.join(entrypoint), submission_id=name, runtime_env={"env_vars": variables})

    def _is_active(self, name: str) -> bool:
        try:
            details = _retry(self.settings, lambda client: client.get_job_info(name))
        except _UnknownJobError:
            return False
        return read_job_status(details).state in ACTIVE_STATES


def build_submission_id(folder: Path, attempt: int) -> str:
    """Return the submission id of a folder's job for an attempt."""
    return f"tuneline-{hashing.digest(str(folder))[:16]}-{attempt}"


def read_job_status(details: JobDetails) -> JobStatus:
    """Return the job status for Ray's details of a job.

    The state is "ended" instead of "failed" if the driver was killed, interrupted (75) or lost with its machine.
    """
    state, message = str(details.status), (details.message or "").strip()
    if state == "PENDING":
        return JobStatus("waiting", message.splitlines()[0] if message else "")
    if state in ("RUNNING", "SUCCEEDED"):
        return JobStatus("running" if state == "RUNNING" else "succeeded")
    if state == "STOPPED":
        return JobStatus("cancelled", "the Ray job was stopped by a user")
    error_type = str(getattr(details.error_type, "value", details.error_type) or "")
    code = details.driver_exit_code
    is_own_failure = (
        error_type in PERMANENT_ERROR_TYPES if code is None else 0 < code <= 128 and code != EXIT_INTERRUPTED
    )
    return JobStatus("failed" if is_own_failure else "ended", message.splitlines()[-1][:300] if message else error_type)


def _retry(settings: LauncherSettings, call: Callable[[JobSubmissionClient], Answer]) -> Answer:
    """Repeat `_call` while the dashboard does not answer. Raises UnresponsiveError after the retry timeout."""
    deadline = time.monotonic() + settings.patience_seconds
    while True:
        try:
            return _call(settings, call)
        except _RetryableError as error:
            if time.monotonic() > deadline:
                raise _build_unresponsive_error(settings, str(error)) from None
        time.sleep(RETRY_INTERVAL_SECONDS)


def _call(settings: LauncherSettings, call: Callable[[JobSubmissionClient], Answer]) -> Answer:
    """Return the dashboard's answer, or raise one of this module's errors or EngineMissingError."""
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):  # type: ignore[misc]
        """Ray's client with a request timeout; by default, it waits forever."""

        def _do_request(self, *arguments: object, **options: object) -> object:
            return super()._do_request(*arguments, **{"timeout": REQUEST_TIMEOUT_SECONDS, **options})

    try:
        return call(Client(settings.ray.address))
    except AuthenticationError:
        raise EngineMissingError(
            f"the Ray cluster at {settings.ray.address} requires a token; the token is missing or invalid",
            hint="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH); `ray get-auth-token` prints the "
            "token.",
        ) from None
    except (ConnectionError, requests.RequestException) as error:
        raise _RetryableError(str(error)) from None
    except RuntimeError as error:
        raise _translate(settings, str(error)) from None


def _translate(settings: LauncherSettings, message: str) -> Exception:
    """Return the exception for an error of Ray's client, which contains the HTTP status."""
    status = int(found[1]) if (found := re.search(r"status code (\d{3})", message)) else 0
    if "already exists" in message:
        return _DuplicateJobError(message)
    if status == 404:
        return _UnknownJobError(message)
    if status == 429 or status >= 500:
        return _RetryableError(message)
    hint = "See docs/how-to/ray.md for the requirements on the cluster."
    return EngineMissingError(f"the Ray cluster at {settings.ray.address} rejects the call: {message[:300]}", hint=hint)


def _build_unresponsive_error(settings: LauncherSettings, reason: str) -> UnresponsiveError:
    hint = (
        "Check that the dashboard runs (`ray start --include-dashboard=true`), or correct launcher.ray.address. "
        "Then run the same command again to resume."
    )
    return UnresponsiveError(f"no Ray cluster answers at {settings.ray.address}: {reason[:300]}", hint=hint)
