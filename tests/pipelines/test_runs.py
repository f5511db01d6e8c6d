"""Run folders: the workdir's lock, detection of killed runs, and cancellation."""

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

from components.common.runtime import process_control
from components.common.runtime.errors import UsageError
from components.common.workspace import liveness
from components.common.workspace.artifact_store import Workdir
from pipelines.runs import run_folder
from tests.pipelines.processes import hear_interrupts, left_of, marker_variable


def test_folder_of_a_new_run_survives_a_lost_answer_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted NFS server executes a repeated `mkdir` again, which then reports that the folder exists."""
    mkdir = os.mkdir

    def make_twice(path: Path, mode: int = 0o777) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(os, "mkdir", make_twice)
    run = run_folder.create_run(Workdir(tmp_path))
    assert run.read()["status"] == "running"


def test_second_run_in_a_workdir_is_refused(tmp_path: Path) -> None:
    lock_script = (
        "import sys, time; from pathlib import Path; from components.common.workspace.artifact_store import Workdir; from pipelines.runs import run_folder\n"
        "with run_folder.lock_workdir(Workdir(Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    environment = process_control.build_python_environment(PYTHONPATH=str(root))
    child = subprocess.Popen(
        [sys.executable, "-c", lock_script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=f"another run \\(process {child.pid}\\)") as error,
            run_folder.lock_workdir(Workdir(tmp_path)),
        ):
            pass
        assert "--workdir" in error.value.hint
        child.kill()
        while Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
        with run_folder.lock_workdir(Workdir(tmp_path)):  # a zombie holds no lock
            assert (tmp_path / "lock.json").exists()
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "lock.json").exists()


HOST_FIELD = f'"where": "{liveness.identify_host()}"'


@pytest.mark.parametrize(
    "content",
    [
        f'{{"pid": 1, "process_started": 0.0, {HOST_FIELD}}}',
        "",
        "{",
        f'{{"pid": 4194303, "process_started": 1.0, {HOST_FIELD}}}',
    ],
    ids=["of-another-process", "empty", "torn", "of-a-dead-process"],
)
def test_lock_of_a_dead_process_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock.json").write_text(content)
    with run_folder.lock_workdir(Workdir(tmp_path)):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] > 0


def test_heartbeat_keeps_the_lock_of_a_run_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, lock = Workdir(tmp_path), tmp_path / "lock.json"
    with monkeypatch.context() as patch:
        patch.setattr(liveness, "identify_host", lambda: "node7-0a1b2c3d")
        patch.setattr(run_folder, "_find_process", lambda pid, started: None)
        patch.setattr(liveness, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
        with run_folder.lock_workdir(work):
            run = run_folder.create_run(work)
            os.utime(lock, (0, 0))
            while time.time() - lock.stat().st_mtime > 100:
                time.sleep(0.01)
            content = lock.read_text()
    lock.write_text(content)
    with (
        pytest.raises(
            UsageError, match=rf"another run \(process {os.getpid()} on node7-0a1b2c3d, last heartbeat \d+ seconds ago"
        ) as error,
        run_folder.lock_workdir(work),
    ):
        pass
    assert "expires 120 seconds after its last heartbeat" in error.value.hint
    assert run.state == "running"
    with pytest.raises(UsageError, match="runs on node7-0a1b2c3d, not on this machine"):
        run_folder.cancel_run(run, on_wait=print)
    os.utime(lock, (time.time() - 130,) * 2)
    assert run.state == "killed"
    with run_folder.lock_workdir(work):
        assert json.loads(lock.read_text())["where"] == liveness.identify_host()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


# A run without kfp: its step takes the given number of seconds to stop.
RUN_SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from components.common.runtime import process_control
from components.common.workspace.artifact_store import Workdir
from pipelines.runs import run_folder

signal.signal(signal.SIGTERM, signal.default_int_handler)
process_control.adopt_orphans()
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
with run_folder.lock_workdir(workdir):
    run = run_folder.create_run(workdir)
    shell = ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", step, "kfp.dsl.executor_main", seconds]
    try:
        child = subprocess.Popen(shell)
        child.wait()
    except KeyboardInterrupt:
        error = run_folder.stop_steps(run)
        run.update(status="interrupted", error=run_folder.describe_error(error))
        print(error.message, flush=True)
        sys.exit(75)
"""


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """Return a function that starts a run whose step takes the given seconds to stop, and waits until the step works."""
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float) -> subprocess.Popen[str]:
        environment = process_control.build_python_environment(
            PYTHONPATH=str(Path(__file__).parents[2]), **{marker_variable(tmp_path): "1"}
        )
        command = [sys.executable, "-c", RUN_SCRIPT, str(tmp_path), str(seconds)]
        options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **options, start_new_session=True, preexec_fn=hear_interrupts))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "working\n"
        return started[-1]

    yield start
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_cancel_waits_for_the_step_and_all_processes(
    tmp_path: Path, start_run: Callable[[float], subprocess.Popen[str]]
) -> None:
    child = start_run(1.0)
    run = run_folder.find_run(Workdir(tmp_path), "latest")
    assert run.state == "running"
    waits: list[float] = []
    run_folder.cancel_run(run, on_wait=waits.append)
    assert waits
    assert left_of(tmp_path) == []
    assert (run.state, child.communicate()[0], child.returncode) == (
        "interrupted",
        "saved\nthe run was interrupted\n",
        75,
    )
    with pytest.raises(UsageError, match="is not running; its state is interrupted"):
        run_folder.cancel_run(run, on_wait=waits.append)
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_kills_all_processes(
    tmp_path: Path, start_run: Callable[[float], subprocess.Popen[str]], number: signal.Signals
) -> None:
    child = start_run(300.0)
    run = run_folder.find_run(Workdir(tmp_path), "latest")
    os.killpg(child.pid, signal.SIGINT)  # the shell between run and step ends too; the run must end the step
    while "stopping" not in run.read():
        time.sleep(0.02)
    time.sleep(0.5)
    child.send_signal(number)
    assert child.communicate(timeout=120)[0] == "the run was killed before it saved its last steps\n"
    assert left_of(tmp_path) == []
    assert (run.state, child.returncode) == ("interrupted", 75)
    assert run.read()["error"]["hint"] == "Run the same command again to resume."


def test_lock_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".lock.{liveness.identify_host()}.4194303-1.0a1b2c3d").write_text("{")
    (tmp_path / f".stale-lock.{liveness.identify_host()}.4194303-1.0a1b2c3d").write_text("{")
    kept_names = [
        ".lock.notes",
        f".lock.{liveness.identify_host()}.{liveness.identify_process(os.getppid())}.0a1b2c3d",
        ".lock.node7-0a1b2c3d.1-1.0a1b2c3d",
    ]
    for name in kept_names:
        (tmp_path / name).write_text("{}")
    with run_folder.lock_workdir(Workdir(tmp_path)):
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept_names, "lock.json"])


def test_suspended_run_does_not_remove_the_lock_of_another_run(tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    with run_folder.lock_workdir(Workdir(tmp_path)):
        other_content = json.dumps({"pid": 7, "process_started": 1.0, "where": "node7-0a1b2c3d", "token": "0a1b2c3d"})
        lock.write_text(other_content)
    assert lock.read_text() == other_content
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]
