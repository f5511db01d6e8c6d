"""The interface to Slurm, implemented by its commands (command_client) and by its REST API (rest_client)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from components.common.launch.slurm.job_records import JobRecord
from components.common.runtime.errors import TunelineError

# Slurm's messages while the controller is unreachable, starting or overloaded.
UNRESPONSIVE_MESSAGES = (
    "unable to contact slurm controller",
    "connection refused",
    "socket timed out",
    "communication",
    "zero bytes were transmitted",
    "connection timed out",
    "resource temporarily unavailable",
    "unexpected message received",
    "connection reset",
    "no route to host",
    "slurmctld is in standby",
)


class RefusedError(TunelineError):
    """Slurm rejected a call."""

    kind = "launcher"


class SlurmClient(Protocol):
    """Interface of the Slurm clients. Methods call Slurm once; after UnresponsiveError, a repeated call may succeed."""

    def submit(self, script: Path) -> str:
        """Submit a batch script with its directives and return the job's id.

        Raises:
            RefusedError: Slurm rejects the job.
            UnresponsiveError: Slurm does not answer.
        """

    def list_jobs(self, name: str) -> list[JobRecord]:
        """Return the controller's jobs of this name, including jobs that ended a few minutes ago.

        Raises:
            RefusedError: Slurm rejects the call.
            UnresponsiveError: Slurm does not answer.
        """

    def list_accounted(self, job: str) -> list[JobRecord]:
        """Return the accounting records of a job by its id; empty if accounting is disabled.

        Raises:
            UnresponsiveError: Slurm does not answer.
        """

    def cancel(self, job: str, signal: str = "") -> None:
        """Cancel a job, or send its steps a signal if the client supports signals. Do nothing if the job has ended.

        Args:
            job: the job's id.
            signal: name of the signal, such as TERM. Empty: cancel the job.

        Raises:
            RefusedError: Slurm rejects the call.
            UnresponsiveError: Slurm does not answer.
        """


def contains_any(text: str, messages: Iterable[str]) -> bool:
    """Return whether the text contains one of the messages, ignoring case."""
    lower = text.lower()
    return any(message in lower for message in messages)


def is_already_ended(error: RefusedError) -> bool:
    """Return whether a job could not be cancelled because it had ended."""
    return contains_any(error.message, ("invalid job id", "already completing", "already completed"))
