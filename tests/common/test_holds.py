"""A folder in which one job at a time may work: who holds it is told, who is dead loses it, and never do two hold it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from components.common import jobs, liveness, process
from components.common.errors import BusyError
from components.common.hashing import ROOT

OFTEN = Path(__file__).with_name("hold_often.py")
DEAD = "4194303-1"  # above the largest pid that Linux gives
ELSEWHERE = "other.machine-0a1b2c3d"
HOLDING = """
import sys, time
from pathlib import Path
from components.common import jobs
with jobs.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    environment = process.python_environment(PYTHONPATH=str(ROOT))
    child = subprocess.Popen([sys.executable, "-c", HOLDING, str(folder)], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.wait()


def left(folder: Path) -> list[str]:
    """What lies in a folder; while it is held, that is the hold, and what the job that holds it keeps beside."""
    return sorted(path.name for path in folder.iterdir())


def seen(folder: Path) -> list[str]:
    return [name for name in left(folder) if not name.startswith(".")]


def hold_of(folder: Path, where: str, named: str, seconds_ago: float = 0.0) -> Path:
    """A hold as another job made it, with its last sign of life so long ago."""
    hold = folder / jobs.HOLDER
    hold.write_text(f"{where}.{named}.0a1b2c3d", encoding="utf-8")
    os.utime(hold, (time.time() - seconds_ago,) * 2)
    return hold


def test_a_second_job_is_refused_with_the_process_and_the_machine_that_hold_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        before = left(tmp_path)
        with pytest.raises(BusyError) as refused, jobs.held(tmp_path):
            pytest.fail("two held it")
        machine = liveness.where().rpartition("-")[0]
        assert refused.value.message == f"process {child.pid} on {machine} works in {tmp_path} right now"
        assert "run the same command again" in refused.value.hint
        with pytest.raises(BusyError), jobs.held(tmp_path):
            pytest.fail("two held it")
        assert left(tmp_path) == before, "whoever is refused leaves nothing, and takes nothing away"


def test_a_second_job_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with jobs.held(tmp_path), pytest.raises(BusyError, match=f"process {os.getpid()} "), jobs.held(tmp_path):
        pytest.fail("two held it")
    assert left(tmp_path) == []


def test_the_hold_of_a_killed_job_is_taken_over_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        child.kill()
        child.wait()
        assert seen(tmp_path) == [jobs.HOLDER]
        began = time.monotonic()
        with jobs.held(tmp_path):
            assert time.monotonic() - began < 5
            assert liveness.name() in (tmp_path / jobs.HOLDER).read_text()
    assert seen(tmp_path) == []


def test_what_a_killed_job_kept_beside_its_hold_goes_with_it(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        child.kill()
        child.wait()
        with jobs.held(tmp_path):
            pass
    assert left(tmp_path) == []


def test_the_hold_of_a_process_whose_number_is_used_again_is_taken_over(tmp_path: Path) -> None:
    hold_of(tmp_path, liveness.where(), f"{os.getppid()}-1")
    with jobs.held(tmp_path):
        pass
    assert left(tmp_path) == []


def test_a_hold_of_another_machine_that_gives_signs_of_life_is_not_taken(tmp_path: Path) -> None:
    hold = hold_of(tmp_path, ELSEWHERE, "17-4711")
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.2):
            os.utime(hold)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(BusyError, match=r"^process 17 on other\.machine works in"), jobs.held(tmp_path):
            pytest.fail("two held it")
    finally:
        done.set()
        beating.join()
    assert left(tmp_path) == [jobs.HOLDER]
    assert hold.read_text() == f"{ELSEWHERE}.17-4711.0a1b2c3d"


def test_a_hold_of_another_machine_that_was_silent_for_long_is_taken_over(tmp_path: Path) -> None:
    hold_of(tmp_path, ELSEWHERE, DEAD, seconds_ago=jobs.QUIET + 5)
    with jobs.held(tmp_path):
        assert ELSEWHERE not in (tmp_path / jobs.HOLDER).read_text()
    assert left(tmp_path) == []


def test_a_hold_of_another_machine_is_watched_until_it_was_silent_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUIET", 3.0)
    hold_of(tmp_path, ELSEWHERE, DEAD)
    began = time.monotonic()
    with jobs.held(tmp_path):
        assert 2.5 < time.monotonic() - began < 10
    assert left(tmp_path) == []


def test_a_hold_of_another_container_of_this_machine_is_not_judged_by_the_processes_here(tmp_path: Path) -> None:
    elsewhere = f"{liveness.where().rpartition('-')[0]}-0a1b2c3d"
    hold = hold_of(tmp_path, elsewhere, DEAD)
    beat = threading.Timer(0.5, os.utime, [hold])
    beat.start()
    with pytest.raises(BusyError), jobs.held(tmp_path):
        pytest.fail("two held it")
    beat.join()


def test_a_job_that_lets_go_while_it_is_watched_is_followed(tmp_path: Path) -> None:
    hold = hold_of(tmp_path, ELSEWHERE, DEAD)
    goes = threading.Timer(0.5, hold.unlink)
    goes.start()
    with jobs.held(tmp_path):
        assert ELSEWHERE not in hold.read_text()
    goes.join()
    assert left(tmp_path) == []


def test_a_hold_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT", 0.02)
    with jobs.held(tmp_path):
        hold = tmp_path / jobs.HOLDER
        os.utime(hold, (1, 1))
        deadline = time.monotonic() + 30
        while hold.stat().st_mtime < 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_hold_goes_at_the_end_and_with_an_error(tmp_path: Path) -> None:
    with jobs.held(tmp_path):
        assert seen(tmp_path) == [jobs.HOLDER]
    assert left(tmp_path) == []
    with pytest.raises(ZeroDivisionError), jobs.held(tmp_path):
        raise ZeroDivisionError
    assert left(tmp_path) == []


def test_a_job_that_lost_its_hold_does_not_take_away_the_one_of_its_successor(tmp_path: Path) -> None:
    with jobs.held(tmp_path):
        hold = hold_of(tmp_path, ELSEWHERE, "17-4711")  # it was silent for long, and another machine took over
    assert hold.exists()


def test_many_jobs_that_want_a_folder_at_once_never_hold_it_together_whoever_is_killed(tmp_path: Path) -> None:
    folder, go = tmp_path / "held", tmp_path / "go"
    folder.mkdir()
    environment = process.python_environment(PYTHONPATH=str(ROOT))
    command = [sys.executable, str(OFTEN), str(folder), str(go), "60"]
    started = [subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE, text=True) for seed in range(8)]
    time.sleep(1)
    go.touch()
    told = "".join(job.communicate(timeout=120)[0].strip() for job in started)
    assert [job.returncode for job in started] == [0] * 8
    assert len(told) == 8 * 60
    assert {"h", "k", "b"} <= set(told), "some held it, some were killed holding it, and some were refused"
    assert "X" not in told
    with jobs.held(folder):
        pass
    assert seen(folder) == []


def test_a_hold_that_is_taken_from_a_dead_job_is_not_lost_when_a_third_job_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three jobs, one moment: two judge a hold as dead, the one takes it over, the other takes that away, and a third one comes."""
    hold = hold_of(tmp_path, liveness.where(), DEAD)
    really_gone, really_rename, held = liveness.is_gone, Path.rename, ExitStack()

    def gone(named: str) -> bool:
        monkeypatch.setattr(liveness, "is_gone", really_gone)
        judged = really_gone(named)
        hold.unlink()
        held.enter_context(jobs.held(tmp_path))  # the other one was faster
        return judged

    def rename(path: Path, target: Path) -> Path:
        moved = really_rename(path, target)
        if path == hold:
            with pytest.raises(BusyError):
                held.enter_context(jobs.held(tmp_path))  # the third
        return moved

    monkeypatch.setattr(liveness, "is_gone", gone)
    monkeypatch.setattr(Path, "rename", rename)
    with held, pytest.raises(BusyError), jobs.held(tmp_path):
        pytest.fail("two held it")
