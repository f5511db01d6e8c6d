"""One run at a time in a workdir, a killed one is recognised, and a stopped one leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import liveness, process
from components.common.errors import UsageError
from components.common.places import Workdir
from pipelines import runs
from tests.pipelines.processes import hear_interrupts, left_of, mark


def test_a_second_run_in_a_workdir_is_refused_with_the_process_that_holds_it(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from components.common.places import Workdir; from pipelines import runs\n"
        "with runs.exclusive(Workdir(Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    environment = process.python_environment(PYTHONPATH=str(root))
    child = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"another run \\(process {child.pid}\\)") as error, runs.exclusive(Workdir(tmp_path)):
            pass
        assert "--workdir" in error.value.hint
        child.kill()
        while Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
        with runs.exclusive(Workdir(tmp_path)):  # killed, and not yet waited for: a zombie holds nothing
            assert (tmp_path / "lock.json").exists()
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "lock.json").exists()


HERE = f'"where": "{liveness.where()}"'


@pytest.mark.parametrize(
    "left",
    [f'{{"pid": 1, "process_started": 0.0, {HERE}}}', "", "{", f'{{"pid": 4194303, "process_started": 1.0, {HERE}}}'],
    ids=["of-another-process", "empty", "torn", "of-a-dead-process"],
)
def test_a_lock_that_a_dead_process_left_is_taken_over(tmp_path: Path, left: str) -> None:
    (tmp_path / "lock.json").write_text(left)
    with runs.exclusive(Workdir(tmp_path)):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] > 0


def test_a_run_on_another_machine_holds_the_workdir_while_it_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, lock = Workdir(tmp_path), tmp_path / "lock.json"
    with monkeypatch.context() as there:
        there.setattr(liveness, "where", lambda: "node7-0a1b2c3d")
        there.setattr(runs, "_alive", lambda pid, started: None)
        there.setattr(liveness, "BEAT", 0.02)
        with runs.exclusive(work):
            run = runs.new_run(work)
            os.utime(lock, (0, 0))
            while time.time() - lock.stat().st_mtime > 100:
                time.sleep(0.01)
            kept = lock.read_text()
    lock.write_text(kept)
    with pytest.raises(UsageError, match=rf"another run \(process {os.getpid()} on node7-0a1b2c3d, \d+ seconds after") as error:
        runs._take(lock)
    assert "this works 120 seconds after its last sign of life" in error.value.hint
    assert run.state == "running"
    with pytest.raises(UsageError, match="runs on node7-0a1b2c3d, and is cancelled there"):
        runs.cancel(run, on_wait=print)
    os.utime(lock, (time.time() - 130,) * 2)
    assert run.state == "killed"
    with runs.exclusive(work):
        assert json.loads(lock.read_text())["where"] == liveness.where()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


# A run without kfp: its step traps SIGTERM for as many seconds as it is told, and so does the step's own child.
STAND_IN = """
import os, signal, subprocess, sys, time
from pathlib import Path
from components.common import process
from components.common.places import Workdir
from pipelines import runs

signal.signal(signal.SIGTERM, signal.default_int_handler)
process.adopt_orphans()
workdir, seconds = Workdir(Path(sys.argv[1])), sys.argv[2]
step = '''import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
def stop(*_):
    time.sleep(float(sys.argv[2]))
    print("saved", flush=True)
    child.kill()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("working", flush=True)
time.sleep(300)
'''
with runs.exclusive(workdir):
    run = runs.new_run(workdir)
    shell = ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", step, "kfp.dsl.executor_main", seconds]
    try:
        child = subprocess.Popen(shell)
        child.wait()
    except KeyboardInterrupt:
        error = runs.stop_steps(run)
        run.write(status="interrupted", error=runs.told(error))
        print(error.message, flush=True)
        sys.exit(75)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """Starts a run whose step takes so many seconds to stop; returns when the step is at work."""
    started: list[subprocess.Popen[str]] = []

    def begin(seconds: float) -> subprocess.Popen[str]:
        environment = process.python_environment(PYTHONPATH=str(Path(__file__).parents[2]), **{mark(tmp_path): "1"})
        command = [sys.executable, "-c", STAND_IN, str(tmp_path), str(seconds)]
        options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **options, start_new_session=True, preexec_fn=hear_interrupts))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "working\n"
        return started[-1]

    yield begin
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_cancelling_waits_until_the_step_has_saved_and_everything_is_gone(
    tmp_path: Path, stand_in: Callable[[float], subprocess.Popen[str]]
) -> None:
    child = stand_in(1.0)
    run = runs.find(Workdir(tmp_path), "latest")
    assert run.state == "running"
    waited: list[float] = []
    runs.cancel(run, on_wait=waited.append)
    assert waited
    assert left_of(tmp_path) == []
    assert (run.state, child.communicate()[0], child.returncode) == ("interrupted", "saved\nthe run was interrupted\n", 75)
    with pytest.raises(UsageError, match="is not running: it is interrupted"):
        runs.cancel(run, on_wait=waited.append)
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_everything_at_once(
    tmp_path: Path, stand_in: Callable[[float], subprocess.Popen[str]], number: signal.Signals
) -> None:
    child = stand_in(300.0)
    run = runs.find(Workdir(tmp_path), "latest")
    os.killpg(child.pid, signal.SIGINT)  # the shell between run and step ends too, and the step is the run's to end
    while "stopping" not in run.read():
        time.sleep(0.02)
    time.sleep(0.5)
    child.send_signal(number)
    assert child.communicate(timeout=120)[0] == "the run was ended at once, before it had saved its last steps\n"
    assert left_of(tmp_path) == []
    assert (run.state, child.returncode) == ("interrupted", 75)
    assert run.read()["error"]["hint"] == "Run the same command again: it goes on from where it stopped."


def test_drafts_of_locks_that_killed_processes_left_are_swept(tmp_path: Path) -> None:
    (tmp_path / f".lock.{liveness.where()}.4194303-1.0a1b2c3d").write_text("{")
    (tmp_path / f".dead-lock.{liveness.where()}.4194303-1.0a1b2c3d").write_text("{")
    kept = [".lock.notes", f".lock.{liveness.where()}.{liveness.name(os.getppid())}.0a1b2c3d", ".lock.node7-0a1b2c3d.1-1.0a1b2c3d"]
    for name in kept:
        (tmp_path / name).write_text("{}")
    with runs.exclusive(Workdir(tmp_path)):
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "lock.json"])


def test_a_run_that_was_stopped_for_so_long_that_another_took_its_lock_leaves_that_in_place(tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    with runs.exclusive(Workdir(tmp_path)):
        anothers = json.dumps({"pid": 7, "process_started": 1.0, "where": "node7-0a1b2c3d", "token": "0a1b2c3d"})
        lock.write_text(anothers)
    assert lock.read_text() == anothers
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]
