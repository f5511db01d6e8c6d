"""Isolated execution of generated Python code with its tests: without network, other files, environment and processes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from multiprocessing import connection

from components.common.runtime import sandbox_process
from components.common.runtime.errors import RESUME_HINT, ConfigurationError, InterruptedRunError

# Without site-packages and bytecode files; the hash seed makes the order of sets reproducible.
COMMAND = [sys.executable, "-S", "-s", "-B", "-P", sandbox_process.__file__]
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
STARTUP_SECONDS = 20  # of the isolation, on a busy machine
WALL_SECONDS_PER_CPU_SECOND, WALL_SECONDS = 2, 2  # for a program that sleeps
MAX_RESULT_BYTES, MAX_ERROR_BYTES = 4096, 300
HINT = "Train on Linux 5.12 or later with user namespaces enabled, or remove the reward unit_tests."


@dataclass(frozen=True)
class Program:
    """Code with its tests.

    Attributes:
        program: The code, which is executed first.
        test: The tests, which are executed in the same module. They fail with an exception.
        entry_point: Name of the function that is passed to `check` of the tests; "" if the tests call it themselves.
        cpu_seconds: Limit of the processor time.
        memory_bytes: Limit of the address space; Python itself uses about 50 MB.
    """

    program: str
    test: str
    entry_point: str
    cpu_seconds: int
    memory_bytes: int


def passes_tests(program: Program) -> bool:
    """Return whether the tests pass. Code that exceeds a limit, or ends the process, does not pass.

    Raises:
        InterruptedRunError: the sandbox failed to start in two attempts; the code did not run.
    """
    passed, problem = _run(program)
    if passed is None:
        passed, problem = _run(program)
    if passed is None:
        raise InterruptedRunError(
            f"the sandbox for generated code failed to start in two attempts: {problem}", hint=RESUME_HINT
        )
    return passed


def check_isolation() -> None:
    """Run a trivial test. Raises ConfigurationError if code cannot be isolated on this machine."""
    passed, problem = _run(Program("def one():\n    return 1", "assert one() == 1", "", 10, 256 << 20))
    if not passed:
        problem = problem or "a trivial test fails"
        raise ConfigurationError(f"generated code cannot be isolated on this machine: {problem}", hint=HINT)


def _run(program: Program) -> tuple[bool | None, str]:
    """Return whether the tests pass; None, and the reason, if the isolation does not start."""
    # The process writes the token after the tests: code that ends the process early does not pass.
    token = secrets.token_hex(16)
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as errors:
        request.write(json.dumps({**asdict(program), "token": token}).encode())
        request.seek(0)
        process = subprocess.Popen(
            COMMAND,
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as pipe:
            try:
                result = _read(pipe.fileno(), STARTUP_SECONDS)
                if result == sandbox_process.READY:
                    result += _read(pipe.fileno(), WALL_SECONDS + WALL_SECONDS_PER_CPU_SECOND * program.cpu_seconds)
            finally:
                process.kill()  # its child ends with it
                process.wait()
        errors.seek(0)
        stderr = errors.read()[-MAX_ERROR_BYTES:]
    if not result.startswith(sandbox_process.READY):
        return None, (result or stderr).decode(errors="replace").strip() or "no answer"
    return result == sandbox_process.READY + token.encode(), ""


def _read(pipe: int, seconds: float) -> bytes:
    """Return the next bytes in a pipe; none if it is closed, or after this time."""
    return os.read(pipe, MAX_RESULT_BYTES) if connection.wait([pipe], seconds) else b""
