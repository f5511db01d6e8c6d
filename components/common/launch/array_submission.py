"""Submission of several threads' commands as one Slurm job array. Each thread then watches its own job."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from components.common.launch import (
    POLL_INTERVAL_SECONDS,
    ArrayLauncher,
    Command,
    Job,
    NotStartedError,
    StopRequest,
    prepare_folder,
)
from components.common.runtime.errors import RESUME_HINT


@dataclass
class ArraySubmission:
    """A submission that starts all commands when every participant has contributed a command or withdrawn.

    Attributes:
        pending: names of the participants to wait for.
        array_folder: folder of the shared files.
        max_parallel: maximum number of jobs that run at once.
        stop: stop requests from the main thread.
    """

    pending: set[str]
    array_folder: Path
    max_parallel: int
    stop: StopRequest
    _commands: dict[Path, Command] = field(default_factory=dict)
    _started: Mapping[Path, Job] = field(default_factory=dict)
    _error: Exception | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, name: str, launcher: ArrayLauncher, command: Command, folder: Path) -> Job | None:
        """Return the command's job once the array is started, or None if the folder already has a job.

        Args:
            name: name of the participant.
            launcher: submits the array.
            command: the participant's command.
            folder: the job folder.

        Raises:
            NotStartedError: a stop was requested while participants were pending.
            Exception: the error of the submission, in every thread.
        """
        if launcher.find(folder):
            self.withdraw(name)
            return None
        prepare_folder(command, folder)
        with self._changed:
            self._commands[folder] = command
            self.withdraw(name)
            while self.pending:
                if self.stop.is_start_blocked:
                    del self._commands[folder]
                    raise NotStartedError("the job was not started: a stop was requested", hint=RESUME_HINT)
                self._changed.wait(POLL_INTERVAL_SECONDS)
            if not self._started and self._error is None:
                try:
                    self._started = launcher.start_all(self._commands, self.array_folder, self.max_parallel)
                except Exception as error:
                    self._error = error
            if self._error:
                raise self._error
            return self._started[folder]

    def withdraw(self, name: str) -> None:
        """Stop waiting for a participant, which has contributed its command or has no command."""
        with self._changed:
            self.pending.discard(name)
            self._changed.notify_all()
