"""Children that never outlive what started them."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import psutil
import pytest

from components.common import process


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
