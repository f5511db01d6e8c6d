"""What squeue, sacct and slurmrestd say of a job, in the shapes of Slurm 22 and of Slurm 23.11 and later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.common.launch import Seen, State

# Job states as Slurm names them (slurm.schedmd.com/job_state_codes.html). COMPLETING: the processes end, the code is not final.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING", "POWER_UP_NODE", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "EXPEDITING", "UPDATE_DB")
BY_THE_CLUSTER = ("TIMEOUT", "DEADLINE", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED")
BY_SOMEBODY = ("CANCELLED",)
NO_REASON = ("", "None")
TASKS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Batch:
    """A batch job as a look shows it. A task of an array is one too, with an id such as 12_3."""

    id: str
    name: str
    states: tuple[str, ...]
    reason: str
    exit_code: int | None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more."""
        return self.seen.state not in ("waiting", "running")

    @property
    def seen(self) -> Seen:
        """As launchers say it. A job may have several states at once: REQUEUED with PENDING, COMPLETING with FAILED."""
        state = _state(self.states)
        said = " ".join(self.states) + (f" ({self.reason})" if self.reason not in NO_REASON else "")
        return Seen(state, said + (f", exit code {self.exit_code}" if state == "failed" and self.exit_code else ""))


def _state(states: tuple[str, ...]) -> State:
    found: list[tuple[tuple[str, ...], State]] = [
        (WAITING, "waiting"),
        (RUNNING, "running"),
        (BY_SOMEBODY, "cancelled"),
        (BY_THE_CLUSTER, "ended"),
        (("COMPLETED",), "succeeded"),
    ]
    for names, state in found:
        if any(name in names for name in states):
            return state
    return "failed"  # FAILED, OUT_OF_MEMORY, and what a later Slurm may invent


def batches(answer: Mapping[str, Any]) -> list[Batch]:
    """The jobs in an answer of `squeue --json`, `sacct --json` or slurmrestd."""
    return [_batch(known_as, job) for job in answer.get("jobs") or [] for known_as in _ids(job)]


def _ids(job: Mapping[str, Any]) -> list[str]:
    """The job's id; those of the tasks where it is of an array, of which all that wait are one entry."""
    found = job.get("array") or {}  # sacct
    array = number(found.get("job_id", job.get("array_job_id")))
    if not array:
        return [str(number(job.get("job_id")))]
    task = number(found.get("task_id", job.get("array_task_id")))
    waiting = str(found.get("task") or job.get("array_task_string") or "")
    return [f"{array}_{one}" for one in (_numbers(waiting) if waiting else [task])]


def _numbers(tasks: str) -> list[int]:
    """The numbers in a list of tasks, such as 0-2,5%2, where at most two run at once."""
    numbers: list[int] = []
    for first, last in TASKS.findall(tasks.split("%")[0]):
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def words(errors: list[dict[str, Any]]) -> str:
    """What an answer's errors, or warnings, say."""
    return "; ".join(", ".join(str(one[name]) for name in ("description", "error", "source") if one.get(name)) for one in errors)


def _batch(known_as: str, job: Mapping[str, Any]) -> Batch:
    state: Any = job.get("job_state", job.get("state"))
    reason = job.get("state_reason", "")
    if isinstance(state, Mapping):  # sacct: {"current": …, "reason": …}
        state, reason = state.get("current"), state.get("reason", "")
    names = tuple(str(name).upper() for name in (state if isinstance(state, list) else [state]) if name)
    return Batch(
        id=known_as,
        name=str(job.get("name", "")),
        states=names or ("UNKNOWN",),
        reason=str(reason or ""),
        exit_code=_exit_code(job.get("exit_code")),
    )


def number(value: Any) -> int | None:
    """A plain number, or {"set": …, "infinite": …, "number": …}; None where none is set."""
    if isinstance(value, Mapping):
        return int(value["number"]) if value.get("set") else None
    return int(value) if isinstance(value, (int, str)) and str(value).isdigit() else None


def _exit_code(value: Any) -> int | None:
    """As the job's script gave it. Slurm 22 gives what wait(2) does: the code in the second byte."""
    if isinstance(value, Mapping):
        return number(value.get("return_code"))
    waited = number(value)
    return None if waited is None else waited >> 8
