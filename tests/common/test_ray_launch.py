"""What the Ray launcher makes of what Ray says; tests/engines/test_ray_launcher.py has it on a real cluster."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.errors import EXIT_FAILED, EXIT_INTERRUPTED, EngineMissingError
from components.common.launch import Command, JobEndedError, SilentError, ray_cluster, ray_nodes
from components.common.launch.ray_cluster import ClusterJob, seen_of, submission_id
from components.common.launch.settings import LauncherSettings

SAVED = {"error": {"kind": "interrupted"}, "exit_code": EXIT_INTERRUPTED}
BROKEN = {"error": {"kind": "training"}, "exit_code": 1}


def settings(**changes: Any) -> LauncherSettings:
    return LauncherSettings.model_validate({"kind": "ray", "nodes": 2, "ray": {"address": "http://head:8265"}, **changes})


def on(accelerator: str) -> dict[str, float]:
    return ray_nodes.bundle(settings(ray={"address": "http://head:8265", "accelerator": accelerator, "cpus": 16}), 8)


def test_a_node_is_asked_for_by_the_names_that_ray_has_for_its_accelerators() -> None:
    assert on("nvidia.com/gpu") == on("nvidia.com/mig-3g.40gb") == on("amd.com/gpu") == on("GPU") == {"CPU": 16, "GPU": 8}
    assert on("habana.ai/gaudi") == on("HPU") == {"CPU": 16, "HPU": 8}
    assert on("") == {"CPU": 16}
    assert ray_nodes.bundle(settings(), 4) == {"CPU": 4}, "a core a process, where nothing is said"


def test_threads_are_those_of_the_settings_or_share_the_cores_asked_for() -> None:
    assert ray_nodes.threads(settings()) == {}
    assert ray_nodes.threads(settings(threads=3)) == {"TUNELINE_JOB_THREADS": "3"}
    assert ray_nodes.threads(settings(ray={"address": "http://head:8265", "cpus": 16})) == {"TUNELINE_THREADS": "16"}


def test_the_address_is_the_dashboards_and_is_needed() -> None:
    assert settings(ray={"address": "https://ray.example/"}).ray.address == "https://ray.example"
    with pytest.raises(ValidationError, match=r"wants the dashboard's address, http://HOST:8265"):
        settings(ray={"address": "ray://head:10001"})
    with pytest.raises(ValidationError, match=r"kind ray wants ray\.address"):
        LauncherSettings.model_validate({"kind": "ray"})


def test_what_a_training_on_ray_depends_on_is_part_of_its_key() -> None:
    one, other = (settings(ray={"address": address, "cpus": 4}).arithmetic() for address in ("http://a:1", "http://b:1"))
    assert one == other, "where the dashboard is has no part in it"
    assert one != settings(ray={"address": "http://a:1", "cpus": 8}).arithmetic()
    assert one != settings(nodes=4, ray={"address": "http://a:1", "cpus": 4}).arithmetic()


@pytest.mark.parametrize(
    ("codes", "errors", "wished", "code"),
    [
        ([0, 0], [], False, 0),
        ([0, 0], [], True, 0),
        ([1, None], [BROKEN], False, EXIT_FAILED),
        ([1, 75], [BROKEN, SAVED], True, EXIT_FAILED),
        ([75, 75], [SAVED, SAVED], True, EXIT_INTERRUPTED),
        ([None, None], [], True, EXIT_FAILED),
    ],
)
def test_a_jobs_end_follows_from_its_nodes(codes: list[int | None], errors: list[dict[str, Any]], wished: bool, code: int) -> None:
    assert ray_nodes.judged(codes, errors, wished=wished, began=True) == code


def test_what_ended_by_no_fault_of_its_own_is_tried_again() -> None:
    for codes, errors in (([1, 1], []), ([75, 1], [SAVED]), ([1, None], [])):
        with pytest.raises(ray_nodes._LostError):
            ray_nodes.judged(codes, errors, wished=False, began=True)
    assert ray_nodes.judged([1, 1], [], wished=False, began=False) == EXIT_FAILED, "what never began would never begin"


def test_a_stop_is_asked_for_by_a_file_or_by_a_signal_and_now_is_the_last_word(tmp_path: Path) -> None:
    asked = threading.Event()
    assert ray_nodes.wish(tmp_path, asked) == ""
    ray_nodes.ask(tmp_path, "save")
    assert ray_nodes.wish(tmp_path, asked) == "save"
    ray_nodes.forget(tmp_path)
    assert ray_nodes.wish(tmp_path, asked) == ""
    asked.set()
    assert ray_nodes.wish(tmp_path, asked) == "save"
    ray_nodes.ask(tmp_path, "now")
    assert ray_nodes.wish(tmp_path, asked) == "now"


def test_a_training_that_is_lost_again_and_again_is_given_up_also_by_the_next_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def lost(job: Any) -> int:
        tries.append(1)
        raise ray_nodes._LostError("a process of the training was lost")

    monkeypatch.setattr(ray_nodes, "_try", lost)
    job = ray_nodes._Job(tmp_path, Command("m", [], 1, 2), settings(resumes=3), lambda: "")
    with pytest.raises(JobEndedError, match="a process of the training was lost, and it was started again 3 times already"):
        ray_nodes._to_the_end(job)
    assert len(tries) == 4
    with pytest.raises(JobEndedError):
        ray_nodes._to_the_end(job)
    assert len(tries) == 5
    notes = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [note[-20:] for note in notes] == [f"{n} of at most 3 times" for n in (1, 2, 3)]


def test_who_is_stopped_while_a_node_is_lost_does_not_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(job: Any) -> int:
        raise ray_nodes._LostError("a node was lost")

    monkeypatch.setattr(ray_nodes, "_try", lost)
    with pytest.raises(ray_nodes._StoppedError):
        ray_nodes._to_the_end(ray_nodes._Job(tmp_path, Command("m", []), settings(), lambda: "save"))
    assert not (tmp_path / ray_nodes.RESTARTS).exists()


def details(status: str, message: str = "", kind: str | None = None, code: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(status=status, message=message, error_type=kind, driver_exit_code=code)


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (details("PENDING", "Job has not started yet."), "waiting"),
        (details("RUNNING", "Job is currently running."), "running"),
        (details("SUCCEEDED", code=0), "succeeded"),
        (details("STOPPED"), "cancelled"),
        (details("FAILED", "exit code 1\nthe last line", "JOB_ENTRYPOINT_COMMAND_ERROR", 1), "failed"),
        (details("FAILED", "exit code 75", "JOB_ENTRYPOINT_COMMAND_ERROR", EXIT_INTERRUPTED), "ended"),
        (details("FAILED", "exit code -9", "JOB_ENTRYPOINT_COMMAND_ERROR", -9), "ended"),
        (details("FAILED", "exit code 137", "JOB_ENTRYPOINT_COMMAND_ERROR", 137), "ended"),
        (details("FAILED", "its node has died", "JOB_SUPERVISOR_ACTOR_DIED"), "ended"),
        (details("FAILED", "Unexpected error occurred", None), "ended"),
        (details("FAILED", "no such image", "RUNTIME_ENV_SETUP_FAILURE"), "failed"),
    ],
)
def test_what_ray_says_of_a_job_is_told_as_every_launcher_does(told: SimpleNamespace, state: str) -> None:
    assert seen_of(told).state == state


def test_the_last_line_of_what_ray_says_of_a_failure_is_its_reason() -> None:
    assert seen_of(details("FAILED", "exit code 1\nthe last line\n", None, 1)).reason == "the last line"


def test_a_job_is_named_by_its_folder_and_try() -> None:
    assert submission_id(Path("/w/a"), 1) == submission_id(Path("/w/a"), 1)
    assert len({submission_id(Path(folder), number) for folder in ("/w/a", "/w/b") for number in (1, 2)}) == 4


class Dashboard:
    """Stands in for the client's requests: answers what it is told to, in order, the last for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers = list(answers)
        monkeypatch.setattr(ray_cluster, "_ask", self)

    def __call__(self, settings: LauncherSettings, call: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_dashboard_that_is_silent_for_a_while_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = ray_cluster._NoAnswerError("Connection refused")
    Dashboard(monkeypatch, details("RUNNING"), silent, silent, details("RUNNING"))
    job = ClusterJob(settings(), tmp_path, "tuneline-1")
    seen = [job.look() for _ in range(4)]
    assert [one.state for one in seen] == ["running"] * 4
    assert seen[1].reason == seen[2].reason == "the dashboard at http://head:8265 does not answer"
    assert seen[3].reason == ""


def test_a_dashboard_that_is_silent_for_longer_than_the_patience_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dashboard(monkeypatch, ray_cluster._NoAnswerError("Connection refused"))
    job = ClusterJob(settings(patience_seconds=0), tmp_path, "tuneline-1")
    job.look()
    with pytest.raises(SilentError, match="no Ray cluster answers at http://head:8265: Connection refused"):
        job.look()


def test_a_cluster_that_forgot_a_job_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dashboard(monkeypatch, ray_cluster._UnknownJobError("404"))
    job = ClusterJob(settings(), tmp_path, "tuneline-1")
    assert job.look().state == "ended"
    job.cancel()
    assert not (tmp_path / ray_nodes.STOP).exists(), "what has ended is asked nothing"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Request failed with status code 404: Job x does not exist.", ray_cluster._UnknownJobError),
        ("Request failed with status code 503: busy.", ray_cluster._NoAnswerError),
        ("Request failed with status code 429: slower.", ray_cluster._NoAnswerError),
        ("Request failed with status code 500: Job with submission_id x already exists.", ray_cluster._TakenError),
        ("Request failed with status code 403: no.", EngineMissingError),
        ("Ray version 1.8 is running on the cluster.", EngineMissingError),
    ],
)
def test_what_the_dashboard_refuses_is_told_apart(said: str, kind: type[Exception]) -> None:
    assert isinstance(ray_cluster._refused(settings(), said), kind)
