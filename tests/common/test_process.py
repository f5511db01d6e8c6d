"""Children that never outlive what started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.common import process
from tests.pipelines.processes import hear_interrupts


def leader() -> tuple[subprocess.Popen[str], int]:
    """A process group's leader that starts a child and becomes deaf to all but SIGKILL; its child's pid."""
    command = ["sh", "-c", "trap '' TERM INT; sleep 300 & echo $!; exec sleep 300"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("reaped", [True, False])
def test_a_guard_ends_what_a_killed_leader_left_of_its_group(reaped: bool) -> None:
    child, other = leader()
    guard = process.guard_group(child.pid)
    try:
        time.sleep(0.3)
        assert not gone(other)
        assert guard.poll() is None
        child.kill()
        if reaped:
            child.wait()
        guard.wait(timeout=10)
        deadline = time.monotonic() + 10
        while not gone(other):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
        if not gone(other):
            os.kill(other, signal.SIGKILL)


def test_a_guard_of_a_group_that_is_gone_ends_too() -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    child.wait()
    assert process.guard_group(child.pid).wait(timeout=10) == 0


def test_a_guard_is_in_a_session_of_its_own_so_that_what_hits_the_run_spares_it() -> None:
    child, _ = leader()
    guard = process.guard_group(child.pid)
    assert os.getsid(guard.pid) == guard.pid
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    guard.wait(timeout=10)


STOPPED_WHILE = {
    "a finalizer runs": "class Last:\n    def __del__(self):\n        stop()\nLast()",
    "a string is executed": "exec('stop()')",
    "a callback of a weak reference runs": "import weakref\nclass A: pass\na = A()\nseen = weakref.ref(a, lambda _: stop())\ndel a",
    "something catches whatever comes": "try:\n    stop()\nexcept: pass",
    "code of its own runs": "stop()",
}
STOPPED = """
import os, signal, sys, time
from components.common import process
from tests.pipelines.processes import hear_interrupts
def stop():
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.001)
process.hear_stops(once={once})
try:
    exec(compile({code!r}, "x", "exec"), globals())
    time.sleep(60)
except KeyboardInterrupt:
    process.end_stop()
    sys.exit(75)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("moment", STOPPED_WHILE)
@pytest.mark.parametrize("once", [False, True])
def test_a_stop_is_never_lost_and_keeps_its_exit_code(name: str, moment: str, once: bool, tmp_path: Path) -> None:
    """Raised in a finalizer it was printed and forgotten; raised in exec() of a string it ended the process by SIGINT, caught or not."""
    (tmp_path / "stopped.py").write_text(STOPPED.format(name=name, once=once, code=STOPPED_WHILE[moment]))
    run = [sys.executable, "-m", "stopped"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False, preexec_fn=hear_interrupts)
    assert (done.returncode, done.stderr) == (75, "")


def test_a_stop_leaves_the_block_of_a_child_process_at_once() -> None:
    """A run's main thread is in one while a step works; it has to tell the step. subprocess waits for the child on any other exception."""
    code = """
import signal, subprocess, sys, time
from components.common import process
process.hear_stops()
began = time.monotonic()
try:
    with subprocess.Popen(["sleep", "40"]) as child:
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    process.end_stop()
    child.kill()
sys.exit(75 if time.monotonic() - began < 20 else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 75


def test_what_else_fails_in_a_finalizer_is_still_printed() -> None:
    code = "from components.common import process\nprocess.hear_stops()\nclass Last:\n    def __del__(self):\n        1 / 0\nLast()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert "ZeroDivisionError" in done.stderr
