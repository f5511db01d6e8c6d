"""Isolation of generated code: each program tries to escape or to exceed a limit."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from components.common.runtime import code_sandbox, sandbox_process
from components.common.runtime.code_sandbox import Program, passes_tests
from components.common.runtime.errors import ConfigurationError, InterruptedRunError

BASE = {"base": sys.base_prefix}
# A program has no other way to report than to pass its test: `reached` must not be True.
TEST = "assert not reached, reached"

pytestmark = pytest.mark.usefixtures("isolation")


def build(program: str, test: str = TEST, *, entry_point: str = "", cpu_seconds: int = 2) -> Program:
    return Program(program, test, entry_point, cpu_seconds, 256 << 20)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def add(a, b):\n    return a + b", True),
        ("def add(a, b):\n    return a - b", False),
        ("def add(a, b):", False),
        (
            "import json, re, collections, math, itertools, heapq, datetime, decimal\ndef add(a, b):\n    return a + b",
            True,
        ),
        ("def add(a, b):\n    import os; os._exit(0)", False),
        ("def add(a, b):\n    raise SystemExit(0)", False),
        ("import os\nos.write(1, b'ready ' + b'0' * 32)\nos._exit(0)", False),
    ],
)
def test_tests_decide(program: str, expected: bool) -> None:
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4"
    assert passes_tests(build(program, test, entry_point="add")) is expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\nPoint(1)", True),
        (
            "import pickle\nclass Point: pass\nassert type(pickle.loads(pickle.dumps(Point()))) is Point",
            True,
        ),
        ("def add(a: Absent): pass", False),
        ("import os\nopen(os.devnull, 'w').write('1')\nassert open(os.devnull).read() == ''", True),
        (
            "from zoneinfo import ZoneInfo\nassert ZoneInfo('Europe/Paris').key",
            Path("/usr/share/zoneinfo/Europe").exists(),
        ),
        (f"import os\nassert os.listdir({sysconfig.get_path('purelib', vars=BASE)!r}) == []", True),
    ],
)
def test_program_is_an_ordinary_module(program: str, expected: bool) -> None:
    assert passes_tests(build(program, "pass")) is expected


def attempt(statement: str) -> str:
    """Return a program that sets `reached` to whether the statement succeeds."""
    lines = "\n".join(f"    {line}" for line in statement.splitlines())
    return f"import os\nreached = False\ntry:\n{lines}\n    reached = True\nexcept OSError:\n    pass"


def call_kernel(name: str) -> str:
    """Return a statement that makes a system call with small arguments, and raises OSError if it fails."""
    number = sandbox_process.DENIED_CALLS[name][sandbox_process.ARCHITECTURES[platform.machine()][2]]
    return f"import ctypes\nif ctypes.CDLL(None).syscall({number}, 0, 1, 0) < 0: raise OSError"


@pytest.mark.parametrize(
    "statement",
    [
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
        "import socket; socket.socket(socket.AF_UNIX)",
        f"os.listdir({str(Path(__file__).parent)!r})",
        "os.listdir('/proc/1')",
        "open('/etc/passwd')",
        "open(os.__file__, 'a')",
        "os.mkdir('/usr/lib/made')",
        "os.mkdir('/made')",
        "os.kill(os.getppid() or 999_999, 0)",
        "os.setuid(1)",
        "os.chroot('.')",
        "open('big', 'wb').write(bytes(20 << 20))",
        "os.memfd_create('memory')",
        "import socket; socket.socketpair()",
        call_kernel("semget"),
        call_kernel("memfd_secret"),
    ],
)
def test_program_cannot_leave_its_process(statement: str) -> None:
    assert passes_tests(build(attempt(statement)))


def test_environment_and_files_are_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "abc")
    (tmp_path / "secret").write_text("abc")
    program = f"import os\nreached = 'SECRET_KEY' in os.environ or os.path.exists({str(tmp_path)!r}) or os.listdir('.')"
    assert passes_tests(build(program))
    assert passes_tests(build("open('own', 'w').write('1')\nreached = open('own').read() != '1'"))


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "data = bytearray(400 << 20)\nreached = False",
        "blocks = []\nwhile True: blocks.append(bytes(1 << 20))",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import sys\nwhile True: sys.stdout.write('x' * 65536)",
        "import os, signal\nos.killpg(0, signal.SIGKILL)\nwhile True: pass",
        "import ctypes\nctypes.string_at(0)",
        "import threading\nthreading.Thread(target=print).start()\nreached = False",
        "def down(): down()\nimport sys\nsys.setrecursionlimit(10**9)\ndown()",
        "x = 10 ** 10 ** 10\nreached = False",
        "import time\ntime.sleep(600)",
    ],
)
def test_exceeded_limit_ends_only_the_program(program: str) -> None:
    start = time.monotonic()
    assert not passes_tests(build(program, cpu_seconds=1))
    limit = code_sandbox.WALL_SECONDS + code_sandbox.WALL_SECONDS_PER_CPU_SECOND
    assert time.monotonic() - start < code_sandbox.STARTUP_SECONDS + limit + 1


def test_parent_signals_are_not_reset() -> None:
    """A program that could reset the signal of its parent's death would outlive it."""
    program = "import ctypes\nreached = ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0"
    assert passes_tests(build(program))


def test_sleeping_program_ends_with_the_training(tmp_path: Path) -> None:
    code = (
        "from components.common.runtime.code_sandbox import Program, passes_tests\n"
        "passes_tests(Program('import time\\ntime.sleep(600)', 'pass', '', 5, 256 << 20))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 20
    while not (sandboxes := find_sandboxes(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sandboxes
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(is_running, sandboxes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, sandboxes))


def find_sandboxes(parent: int) -> list[int]:
    """Return the process that isolates the code, and its child, once the child exists."""
    children = {
        pid: read_parent(pid) for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    }
    outer = [pid for pid, one in children.items() if one == parent]
    inner = [pid for pid, one in children.items() if one in outer]
    return outer + inner if inner else []


def read_parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_running(pid: int) -> bool:
    return read_parent(pid) != 0


def test_machine_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process starts in a user namespace that forbids others, as in a restricted container."""
    script = tmp_path / "restricted.py"
    script.write_text(
        "import ctypes, os, runpy\n"
        "ctypes.CDLL(None).unshare(0x10000000)\n"
        "open('/proc/self/setgroups', 'w').write('deny')\n"
        f"open('/proc/self/uid_map', 'w').write('0 {os.geteuid()} 1')\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        f"runpy.run_path({sandbox_process.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(code_sandbox, "COMMAND", [sys.executable, "-S", str(script)])
    with pytest.raises(
        ConfigurationError, match=r"cannot be isolated on this machine: OSError: .* unshare: No space left"
    ):
        code_sandbox.check_isolation()


def test_isolation_that_does_not_start_is_retried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, file = tmp_path / "failing.py", tmp_path / "starts"
    script.write_text(
        f"import runpy\nopen({str(file)!r}, 'a').write('1')\n"
        f"if len(open({str(file)!r}).read()) % 3: raise OSError('no memory')\n"
        f"runpy.run_path({sandbox_process.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(code_sandbox, "COMMAND", [sys.executable, "-S", str(script)])
    with pytest.raises(InterruptedRunError, match=r"(?s)failed to start in two attempts: .*OSError: no memory"):
        passes_tests(build("", "pass"))
    assert passes_tests(build("", "pass"))
    with pytest.raises(ConfigurationError, match=r"(?s)cannot be isolated on this machine: .*OSError: no memory"):
        code_sandbox.check_isolation()
    assert passes_tests(build("", "pass")), "the second start succeeds"
