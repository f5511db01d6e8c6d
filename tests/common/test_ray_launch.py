"""The Ray launcher: bundles, exit codes, restarts and job states; tests/engines/test_ray_launcher.py runs it on a real cluster."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.launch import Command, JobEndedError, UnresponsiveError
from components.common.launch.launcher_settings import LauncherSettings
from components.common.launch.ray import ray_entrypoint, ray_launcher
from components.common.launch.ray.ray_launcher import SubmittedRayJob, build_submission_id, read_job_status
from components.common.runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EngineMissingError

SAVED_OUTCOME = {"error": {"kind": "interrupted"}, "exit_code": EXIT_INTERRUPTED}
FAILED_OUTCOME = {"error": {"kind": "training"}, "exit_code": 1}


def build_settings(**changes: Any) -> LauncherSettings:
    return LauncherSettings.model_validate(
        {"kind": "ray", "nodes": 2, "ray": {"address": "http://head:8265"}, **changes}
    )


def build_bundle(accelerator: str) -> dict[str, float]:
    return ray_entrypoint.build_bundle(
        build_settings(ray={"address": "http://head:8265", "accelerator": accelerator, "cpus": 16}), 8
    )


def test_bundle_uses_ray_names_of_accelerators() -> None:
    assert (
        build_bundle("nvidia.com/gpu")
        == build_bundle("nvidia.com/mig-3g.40gb")
        == build_bundle("amd.com/gpu")
        == build_bundle("GPU")
        == {"CPU": 16, "GPU": 8}
    )
    assert build_bundle("habana.ai/gaudi") == build_bundle("HPU") == {"CPU": 16, "HPU": 8}
    assert build_bundle("") == {"CPU": 16}
    assert ray_entrypoint.build_bundle(build_settings(), 4) == {"CPU": 4}, "the default is one core per process"


def test_thread_variables_follow_settings_or_cpus() -> None:
    assert ray_entrypoint.build_thread_variables(build_settings()) == {}
    assert ray_entrypoint.build_thread_variables(build_settings(threads=3)) == {"TUNELINE_JOB_THREADS": "3"}
    assert ray_entrypoint.build_thread_variables(build_settings(ray={"address": "http://head:8265", "cpus": 16})) == {
        "TUNELINE_THREADS": "16"
    }


def test_ray_address_is_required_and_must_be_dashboard_url() -> None:
    assert build_settings(ray={"address": "https://ray.example/"}).ray.address == "https://ray.example"
    with pytest.raises(ValidationError, match=r"is not the dashboard's address; expected http://HOST:8265"):
        build_settings(ray={"address": "ray://head:10001"})
    with pytest.raises(ValidationError, match=r"kind ray requires ray\.address"):
        LauncherSettings.model_validate({"kind": "ray"})


def test_hardware_key_covers_nodes_and_cpus_but_not_address() -> None:
    first, second = (
        build_settings(ray={"address": address, "cpus": 4}).describe_hardware()
        for address in ("http://a:1", "http://b:1")
    )
    assert first == second, "the address is not part of the key"
    assert first != build_settings(ray={"address": "http://a:1", "cpus": 8}).describe_hardware()
    assert first != build_settings(nodes=4, ray={"address": "http://a:1", "cpus": 4}).describe_hardware()


@pytest.mark.parametrize(
    ("codes", "errors", "is_stopping", "expected"),
    [
        ([0, 0], [], False, 0),
        ([0, 0], [], True, 0),
        ([1, None], [FAILED_OUTCOME], False, EXIT_FAILED),
        ([1, 75], [FAILED_OUTCOME, SAVED_OUTCOME], True, EXIT_FAILED),
        ([75, 75], [SAVED_OUTCOME, SAVED_OUTCOME], True, EXIT_INTERRUPTED),
        ([None, None], [], True, EXIT_FAILED),
    ],
)
def test_exit_code_follows_from_node_exit_codes(
    codes: list[int | None], errors: list[dict[str, Any]], is_stopping: bool, expected: int
) -> None:
    assert ray_entrypoint.decide_exit_code(codes, errors, is_stopping=is_stopping, has_begun=True) == expected


def test_lost_node_is_retried_once_training_has_begun() -> None:
    for codes, errors in (([1, 1], []), ([75, 1], [SAVED_OUTCOME]), ([1, None], [])):
        with pytest.raises(ray_entrypoint._LostError):
            ray_entrypoint.decide_exit_code(codes, errors, is_stopping=False, has_begun=True)
    assert ray_entrypoint.decide_exit_code([1, 1], [], is_stopping=False, has_begun=False) == EXIT_FAILED, (
        "a training that never began would fail again"
    )


def test_stop_mode_is_read_from_file_or_signal(tmp_path: Path) -> None:
    signalled = threading.Event()
    assert ray_entrypoint.read_stop_mode(tmp_path, signalled) == ""
    ray_entrypoint.request_stop(tmp_path, "save")
    assert ray_entrypoint.read_stop_mode(tmp_path, signalled) == "save"
    ray_entrypoint.reset_folder(tmp_path)
    assert ray_entrypoint.read_stop_mode(tmp_path, signalled) == ""
    signalled.set()
    assert ray_entrypoint.read_stop_mode(tmp_path, signalled) == "save"
    ray_entrypoint.request_stop(tmp_path, "now")
    assert ray_entrypoint.read_stop_mode(tmp_path, signalled) == "now"


def test_restart_limit_persists_across_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def raise_lost_error(job: Any) -> int:
        attempts.append(1)
        raise ray_entrypoint._LostError("a training process was lost")

    monkeypatch.setattr(ray_entrypoint, "_run_attempt", raise_lost_error)
    job = ray_entrypoint._Job(tmp_path, Command("m", [], 1, 2), build_settings(resumes=3), lambda: "")
    with pytest.raises(JobEndedError, match="a training process was lost, after 3 restarts"):
        ray_entrypoint._run_attempts(job)
    assert len(attempts) == 4
    with pytest.raises(JobEndedError):
        ray_entrypoint._run_attempts(job)
    assert len(attempts) == 5
    notes = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [note[-14:] for note in notes] == [f"restart {n} of 3" for n in (1, 2, 3)]


def test_stopped_training_is_not_restarted_after_node_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_lost_error(job: Any) -> int:
        raise ray_entrypoint._LostError("a node was lost")

    monkeypatch.setattr(ray_entrypoint, "_run_attempt", raise_lost_error)
    with pytest.raises(ray_entrypoint._StoppedError):
        ray_entrypoint._run_attempts(ray_entrypoint._Job(tmp_path, Command("m", []), build_settings(), lambda: "save"))
    assert not (tmp_path / ray_entrypoint.RESTARTS_FILENAME).exists()


def job_details(status: str, message: str = "", kind: str | None = None, code: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(status=status, message=message, error_type=kind, driver_exit_code=code)


@pytest.mark.parametrize(
    ("ray_job", "state"),
    [
        (job_details("PENDING", "Job has not started yet."), "waiting"),
        (job_details("RUNNING", "Job is currently running."), "running"),
        (job_details("SUCCEEDED", code=0), "succeeded"),
        (job_details("STOPPED"), "cancelled"),
        (job_details("FAILED", "exit code 1\nthe last line", "JOB_ENTRYPOINT_COMMAND_ERROR", 1), "failed"),
        (job_details("FAILED", "exit code 75", "JOB_ENTRYPOINT_COMMAND_ERROR", EXIT_INTERRUPTED), "ended"),
        (job_details("FAILED", "exit code -9", "JOB_ENTRYPOINT_COMMAND_ERROR", -9), "ended"),
        (job_details("FAILED", "exit code 137", "JOB_ENTRYPOINT_COMMAND_ERROR", 137), "ended"),
        (job_details("FAILED", "its node has died", "JOB_SUPERVISOR_ACTOR_DIED"), "ended"),
        (job_details("FAILED", "Unexpected error occurred", None), "ended"),
        (job_details("FAILED", "no such image", "RUNTIME_ENV_SETUP_FAILURE"), "failed"),
    ],
)
def test_ray_status_is_mapped_to_job_state(ray_job: SimpleNamespace, state: str) -> None:
    assert read_job_status(ray_job).state == state


def test_failure_reason_is_last_line_of_ray_message() -> None:
    assert read_job_status(job_details("FAILED", "exit code 1\nthe last line\n", None, 1)).reason == "the last line"


def test_submission_id_depends_on_folder_and_attempt() -> None:
    assert build_submission_id(Path("/w/a"), 1) == build_submission_id(Path("/w/a"), 1)
    assert len({build_submission_id(Path(folder), number) for folder in ("/w/a", "/w/b") for number in (1, 2)}) == 4


class FakeDashboard:
    """Replace the client's requests by these answers, in order; the last one repeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers = list(answers)
        monkeypatch.setattr(ray_launcher, "_call", self)

    def __call__(self, settings: LauncherSettings, call: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_short_dashboard_outage_keeps_job_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection_error = ray_launcher._RetryableError("Connection refused")
    FakeDashboard(monkeypatch, job_details("RUNNING"), connection_error, connection_error, job_details("RUNNING"))
    job = SubmittedRayJob(build_settings(), tmp_path, "tuneline-1")
    statuses = [job.poll() for _ in range(4)]
    assert [status.state for status in statuses] == ["running"] * 4
    assert statuses[1].reason == statuses[2].reason == "the dashboard at http://head:8265 does not answer"
    assert statuses[3].reason == ""


def test_dashboard_outage_beyond_timeout_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDashboard(monkeypatch, ray_launcher._RetryableError("Connection refused"))
    job = SubmittedRayJob(build_settings(patience_seconds=0), tmp_path, "tuneline-1")
    job.poll()
    with pytest.raises(UnresponsiveError, match="no Ray cluster answers at http://head:8265: Connection refused"):
        job.poll()


def test_unknown_job_counts_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDashboard(monkeypatch, ray_launcher._UnknownJobError("404"))
    job = SubmittedRayJob(build_settings(), tmp_path, "tuneline-1")
    assert job.poll().state == "ended"
    job.cancel()
    assert not (tmp_path / ray_entrypoint.STOP_FILENAME).exists(), "an ended job gets no stop request"


@pytest.mark.parametrize(
    ("message", "error_class"),
    [
        ("Request failed with status code 404: Job x does not exist.", ray_launcher._UnknownJobError),
        ("Request failed with status code 503: busy.", ray_launcher._RetryableError),
        ("Request failed with status code 429: slower.", ray_launcher._RetryableError),
        (
            "Request failed with status code 500: Job with submission_id x already exists.",
            ray_launcher._DuplicateJobError,
        ),
        ("Request failed with status code 403: no.", EngineMissingError),
        ("Ray version 1.8 is running on the cluster.", EngineMissingError),
    ],
)
def test_dashboard_errors_are_classified(message: str, error_class: type[Exception]) -> None:
    assert isinstance(ray_launcher._translate(build_settings(), message), error_class)
