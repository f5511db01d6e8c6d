"""Commands of several threads that become one request: Slurm's array. Each thread goes on with a job of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from components.common.errors import GOES_ON
from components.common.launch import LOOKS_EVERY, Command, NotBegunError, Running, StartsTogether, Stop, make_ready


@dataclass
class Gathering:
    """Waits until everybody has come with a command or has said that there is none, and starts what has come.

    `missing`: the names of those it waits for. `place`: a folder for what belongs to all. `at_once`: jobs that run at once.
    """

    missing: set[str]
    place: Path
    at_once: int
    stop: Stop
    _commands: dict[Path, Command] = field(default_factory=dict)
    _begun: Mapping[Path, Running] = field(default_factory=dict)
    _failed: Exception | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, name: str, launcher: StartsTogether, command: Command, folder: Path) -> Running | None:
        """The command's job, once all are started; None where it has one already. Raises what its start raised, for everybody."""
        if launcher.find(folder):
            self.leave(name)
            return None
        make_ready(command, folder)
        with self._changed:
            self._commands[folder] = command
            self.leave(name)
            self._wait(folder)
            if not self._begun:
                self._start(launcher)
            return self._begun[folder]

    def leave(self, name: str) -> None:
        """This one is not to be waited for: it has come, or has nothing to start."""
        with self._changed:
            self.missing.discard(name)
            self._changed.notify_all()

    def _wait(self, folder: Path) -> None:
        while self.missing:
            if self.stop.begins_nothing:
                del self._commands[folder]
                raise NotBegunError("it had not begun", hint=GOES_ON)
            self._changed.wait(LOOKS_EVERY)

    def _start(self, launcher: StartsTogether) -> None:
        if self._failed is None:
            try:
                self._begun = launcher.start_all(self._commands, self.place, self.at_once)
                return
            except Exception as error:
                self._failed = error
        raise self._failed
