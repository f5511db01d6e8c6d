"""A way to Slurm: what the launcher asks of it, whether by Slurm's own programs or by its REST API."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from components.common.errors import TunelineError
from components.common.launch.slurm.states import Batch

# What Slurm says where the controller does not answer, is in its start, or has too much to do.
SILENT = (
    "unable to contact slurm controller", "connection refused", "socket timed out", "communication", "zero bytes were transmitted",
    "connection timed out", "resource temporarily unavailable", "unexpected message received", "connection reset", "no route to host",
    "slurmctld is in standby",
)  # fmt: skip


class RefusedError(TunelineError):
    """Slurm refused what was asked."""

    kind = "launcher"


class Way(Protocol):
    """Each call is made once, and raises SilentError where nobody answers: the same call may succeed in a moment."""

    def submit(self, script: Path) -> str:
        """Hand in a script, in which its directives stand. Returns the job's id."""

    def jobs(self, name: str) -> list[Batch]:
        """The jobs of this name that the controller knows: those that wait or run, and for some minutes those that have ended."""

    def accounted(self, job: str) -> list[Batch]:
        """A job as the accounting has it; nothing where there is no accounting."""

    def cancel(self, job: str, signal: str = "") -> None:
        """End a job, or ask its steps to save with a signal, as far as this way can. One that has ended already is no error."""


def is_over(refused: RefusedError) -> bool:
    """Whether a job was not cancelled because it has ended."""
    return any(words in refused.message.lower() for words in ("invalid job id", "already completing", "already completed"))
