"""Process guards and stop signals: children do not outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from components.common.runtime import process_control
from tests.pipelines.processes import hear_interrupts


def start_leader() -> tuple[subprocess.Popen[str], int]:
    """Start a group leader that ignores all signals but SIGKILL; return it and the pid of its child."""
    command = ["sh", "-c", "trap '' TERM INT; sleep 300 & echo $!; exec sleep 300"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("reaped", [True, False])
def test_guard_ends_group_of_killed_leader(reaped: bool) -> None:
    child, grandchild_pid = start_leader()
    guard = process_control.start_group_guard(child.pid)
    try:
        time.sleep(0.3)
        assert not is_gone(grandchild_pid)
        assert guard.poll() is None
        child.kill()
        if reaped:
            child.wait()
        guard.wait(timeout=10)
        deadline = time.monotonic() + 10
        while not is_gone(grandchild_pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
        if not is_gone(grandchild_pid):
            os.kill(grandchild_pid, signal.SIGKILL)


def test_guard_of_exited_group_ends() -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    child.wait()
    assert process_control.start_group_guard(child.pid).wait(timeout=10) == 0


def test_guard_runs_in_a_separate_session() -> None:
    child, _ = start_leader()
    guard = process_control.start_group_guard(child.pid)
    assert os.getsid(guard.pid) == guard.pid
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    guard.wait(timeout=10)


STOP_MOMENTS = {
    "a finalizer runs": "class Last:\n    def __del__(self):\n        stop()\nLast()",
    "a string is executed": "exec('stop()')",
    "a callback of a weak reference runs": "import weakref\nclass A: pass\na = A()\nseen = weakref.ref(a, lambda _: stop())\ndel a",
    "a bare except catches the exception": "try:\n    stop()\nexcept: pass",
    "plain code runs": "stop()",
}
STOP_PROGRAM = """
import os, signal, sys, time
from components.common.runtime import process_control
from tests.pipelines.processes import hear_interrupts
def stop():
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.001)
process_control.install_stop_handlers(once={once})
try:
    exec(compile({code!r}, "x", "exec"), globals())
    time.sleep(60)
except KeyboardInterrupt:
    process_control.acknowledge_stop()
    sys.exit(75)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("moment", STOP_MOMENTS)
@pytest.mark.parametrize("once", [False, True])
def test_stop_signal_is_never_lost_and_keeps_exit_code(name: str, moment: str, once: bool, tmp_path: Path) -> None:
    """An exception raised in a finalizer is only printed; one raised in exec() of a string ended the process by SIGINT, even if caught."""
    (tmp_path / "stopped.py").write_text(STOP_PROGRAM.format(name=name, once=once, code=STOP_MOMENTS[moment]))
    command = [sys.executable, "-m", "stopped"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False, preexec_fn=hear_interrupts
    )
    assert (result.returncode, result.stderr) == (75, "")


SERVING_PROGRAM = """
import os, signal, sys, time
from components.common.runtime import process_control
def stop():
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.001)
signal.signal(signal.SIGINT, signal.SIG_IGN)
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
with process_control.until_signal():
    try:
        exec(compile({code!r}, "x", "exec"), globals())
        time.sleep(60)
    finally:
        stop()  # a second signal does not interrupt the clean-up
        time.sleep(0.3)
        print("cleared up")
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
time.sleep(0.3)
sys.exit(3)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("moment", STOP_MOMENTS)
def test_block_ends_once_at_signal_and_restores_handlers(name: str, moment: str, tmp_path: Path) -> None:
    """A watcher did not stop when its signal arrived while a finalizer of the database ran."""
    (tmp_path / "serving.py").write_text(SERVING_PROGRAM.format(name=name, code=STOP_MOMENTS[moment]))
    command = [sys.executable, "-m", "serving"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "cleared up\n", "")


def test_stop_signal_leaves_popen_block_at_once() -> None:
    """The main thread of a run is in such a block and must signal the step; on other exceptions, subprocess waits for the child."""
    code = """
import signal, subprocess, sys, time
from components.common.runtime import process_control
process_control.install_stop_handlers()
began = time.monotonic()
try:
    with subprocess.Popen(["sleep", "40"]) as child:
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    process_control.acknowledge_stop()
    child.kill()
sys.exit(75 if time.monotonic() - began < 20 else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 75


def test_other_errors_in_finalizers_are_still_printed() -> None:
    code = (
        "from components.common.runtime import process_control\n"
        "process_control.install_stop_handlers()\nclass Last:\n    def __del__(self):\n        1 / 0\nLast()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert "ZeroDivisionError" in result.stderr


def test_relaxed_garbage_collector_skips_the_modules_at_exit() -> None:
    script = """
import atexit, gc
from components.common.runtime import process_control
atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 5_000))
process_control.relax_garbage_collector()
process_control.relax_garbage_collector()
print(gc.get_freeze_count())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "0\n10000 True\n"


def test_first_stop_signal_is_announced_and_the_second_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    stop_requested = threading.Event()
    with process_control.handle_stop_signals(stop_requested, "stopping after this step"):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "stopping after this step; press Ctrl-C again to stop at once\n"


def test_stop_signal_counts_although_nobody_reads_the_announcement() -> None:
    stop_requested, original = threading.Event(), os.dup(2)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        with process_control.handle_stop_signals(stop_requested, "stopping after this step"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(writer)
    assert stop_requested.is_set()
