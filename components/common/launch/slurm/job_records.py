"""Job records of squeue, sacct and slurmrestd, in the JSON of Slurm 22 and of Slurm 23.11 and later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from components.common.launch import JobState, JobStatus, JsonObject

# Slurm's job states (slurm.schedmd.com/job_state_codes.html). COMPLETING: processes end, the exit code is not final.
# A job may have several states at once, such as REQUEUED with PENDING, or COMPLETING with FAILED; the first match
# in this order is its status.
SLURM_STATES: dict[JobState, str] = {
    "waiting": "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT CONFIGURING POWER_UP_NODE RESV_DEL_HOLD",
    "running": "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING EXPEDITING UPDATE_DB",
    "cancelled": "CANCELLED",
    "ended": "TIMEOUT DEADLINE PREEMPTED NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL REVOKED",
    "succeeded": "COMPLETED",
}
TASK_RANGE_PATTERN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class JobRecord:
    """A batch job, or a task of an array with an id such as 12_3."""

    id: str
    name: str
    states: tuple[str, ...]
    reason: str
    exit_code: int | None

    @property
    def has_ended(self) -> bool:
        """Whether the job neither waits nor runs."""
        return self.status.state not in ("waiting", "running")

    @property
    def status(self) -> JobStatus:
        """The job status; "failed" for FAILED, OUT_OF_MEMORY, and states of later versions of Slurm."""
        matches = (state for state, names in SLURM_STATES.items() if not set(self.states).isdisjoint(names.split()))
        state: JobState = next(matches, "failed")
        reason = " ".join(self.states) + (f" ({self.reason})" if self.reason not in ("", "None") else "")
        if state == "failed" and self.exit_code:
            reason += f", exit code {self.exit_code}"
        return JobStatus(state, reason)


def parse_jobs(answer: Mapping[str, object]) -> list[JobRecord]:
    """Return the jobs in an answer of `squeue --json`, `sacct --json` or slurmrestd."""
    records: list[JobRecord] = []
    jobs = answer.get("jobs")
    for job in jobs if isinstance(jobs, list) else []:
        state, reason = job.get("job_state", job.get("state")), job.get("state_reason", "")
        if isinstance(state, Mapping):  # sacct: {"current": …, "reason": …}
            reason, state = state.get("reason", ""), state.get("current")
        states = tuple(str(name).upper() for name in (state if isinstance(state, list) else [state]) if name)
        exit_code = job.get("exit_code")
        if isinstance(exit_code, Mapping):
            exit_code = parse_number(exit_code.get("return_code"))
        elif (wait_status := parse_number(exit_code)) is not None:
            exit_code = wait_status >> 8  # Slurm 22: the status of wait(2), with the code in the second byte
        else:
            exit_code = None
        name, states, reason = str(job.get("name", "")), states or ("UNKNOWN",), str(reason or "")
        records += [JobRecord(job_id, name, states, reason, exit_code) for job_id in _list_ids(job)]
    return records


def _list_ids(job: JsonObject) -> list[str]:
    """Return the job's id, or the ids of its tasks: one record contains all waiting tasks of an array."""
    accounted = job.get("array") or {}  # only in sacct
    array = parse_number(accounted.get("job_id", job.get("array_job_id")))
    if not array:
        return [str(parse_number(job.get("job_id")))]
    waiting = str(accounted.get("task") or job.get("array_task_string") or "")
    if not waiting:
        return [f"{array}_{parse_number(accounted.get('task_id', job.get('array_task_id')))}"]
    tasks: list[int] = []  # of a text such as 0-2,5%2, where at most two tasks run at once
    for first, last in TASK_RANGE_PATTERN.findall(waiting.split("%")[0]):
        tasks += range(int(first), int(last or first) + 1)
    return [f"{array}_{task}" for task in tasks]


def format_errors(errors: list[JsonObject]) -> str:
    """Return the errors or warnings of an answer as text."""
    keys = ("description", "error", "source")
    return "; ".join(", ".join(str(error[key]) for key in keys if error.get(key)) for error in errors)


def parse_number(value: object) -> int | None:
    """Return a number from an integer, a text or {"set": …, "infinite": …, "number": …}; None if it is not set."""
    if isinstance(value, Mapping):
        return int(value["number"]) if value.get("set") else None
    return int(value) if isinstance(value, (int, str)) and str(value).isdigit() else None
