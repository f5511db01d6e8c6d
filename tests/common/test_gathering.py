"""Commands of several threads that are started together."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.common.launch import Command, NotBegunError, Seen, SilentError, Stop
from components.common.launch.gathering import Gathering


class Job:
    """One that was started."""

    def __init__(self, name: str) -> None:
        self.name = name

    def look(self) -> Seen:
        return Seen("running")

    def stop(self) -> None: ...

    def cancel(self) -> None: ...

    def logs(self) -> list[Path]:
        return []


class Together:
    """Writes down what was started; nothing runs."""

    looks_every = 0.1
    resumes = 0

    def __init__(self, there: tuple[str, ...] = (), error: Exception | None = None) -> None:
        self.started: list[list[str]] = []
        self._there, self._error = there, error

    def start(self, command: Command, folder: Path) -> Job:
        raise AssertionError("alone")

    def find(self, folder: Path) -> Job | None:
        return Job(folder.name) if folder.name in self._there else None

    def start_all(self, commands: Mapping[Path, Command], place: Path, at_once: int) -> dict[Path, Job]:
        self.started.append(sorted(folder.name for folder in commands))
        if self._error:
            raise self._error
        return {folder: Job(folder.name) for folder in commands}


def gathered(
    tmp_path: Path, launcher: Together, names: str, stop: Stop | None = None, expected: str = ""
) -> tuple[Gathering, list[object]]:
    gathering = Gathering({*(expected or names)}, tmp_path, 2, stop or Stop())

    def start(name: str) -> object:
        (tmp_path / name).mkdir()
        try:
            begun = gathering.start(name, launcher, Command("module", []), tmp_path / name)
        except Exception as error:
            return error
        return begun and begun.name

    with ThreadPoolExecutor(8) as pool:
        return gathering, list(pool.map(start, names))


def test_what_has_come_is_started_once_and_everybody_gets_a_job_of_its_own(tmp_path: Path) -> None:
    launcher = Together()
    assert gathered(tmp_path, launcher, "abcd")[1] == ["a", "b", "c", "d"]
    assert launcher.started == [["a", "b", "c", "d"]]


def test_one_that_runs_already_is_not_started_again(tmp_path: Path) -> None:
    launcher = Together(there=("b",))
    assert gathered(tmp_path, launcher, "abc")[1] == ["a", None, "c"]
    assert launcher.started == [["a", "c"]]


def test_one_that_has_nothing_to_start_is_not_waited_for(tmp_path: Path) -> None:
    launcher = Together()
    gathering = Gathering({"a", "b"}, tmp_path, 2, Stop())
    (tmp_path / "a").mkdir()
    threading.Timer(0.3, gathering.leave, ["b"]).start()
    begun = gathering.start("a", launcher, Command("module", []), tmp_path / "a")
    assert begun is not None
    assert launcher.started == [["a"]]


def test_a_start_that_fails_is_tried_once_and_told_to_everybody(tmp_path: Path) -> None:
    launcher = Together(error=SilentError("nobody answers"))
    assert {str(told) for told in gathered(tmp_path, launcher, "abc")[1]} == {"nobody answers"}
    assert len(launcher.started) == 1


@pytest.mark.parametrize("event", ["asked", "leave"])
def test_a_stop_ends_the_waiting_and_nothing_is_started(event: str, tmp_path: Path) -> None:
    launcher, stop = Together(), Stop()
    threading.Timer(0.3, getattr(stop, event).set).start()
    told = gathered(tmp_path, launcher, "ab", stop, expected="abc")[1]
    assert [type(one) for one in told] == [NotBegunError] * 2
    assert launcher.started == []
