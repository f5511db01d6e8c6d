"""Isolated execution of generated Python code with its tests: without network, files, environment and other processes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass

from components.common.runtime import sandbox_process
from components.common.runtime.errors import ConfigurationError

# Without site-packages and bytecode files; the hash seed makes the order of sets reproducible.
COMMAND = [sys.executable, "-S", "-s", "-B", "-P", sandbox_process.__file__]
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
WALL_SECONDS_PER_CPU_SECOND, STARTUP_SECONDS = 4, 20  # for a program that sleeps, on a busy machine
MAX_RESULT_BYTES = 4096
HINT = "Train on Linux 5.12 or later where processes may create user namespaces, or remove the reward unit_tests."


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
        ConfigurationError: the code cannot be isolated on this machine; it did not run.
    """
    # The process writes the token after the tests, so that code that ends the process does not pass.
    token = secrets.token_hex(16)
    with tempfile.TemporaryFile() as request:
        request.write(json.dumps({**asdict(program), "token": token}).encode())
        request.seek(0)
        process = subprocess.Popen(
            COMMAND,
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            process.wait(STARTUP_SECONDS + WALL_SECONDS_PER_CPU_SECOND * program.cpu_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()  # its child ends with it
            process.wait()
        result = os.read(process.stdout.fileno(), MAX_RESULT_BYTES)
    if not result.startswith(sandbox_process.READY):
        raise ConfigurationError(
            f"generated code cannot be isolated on this machine: {result.decode(errors='replace') or 'no answer'}",
            hint=HINT,
        )
    return result == sandbox_process.READY + token.encode()


def check_isolation() -> None:
    """Run a trivial test. Raises ConfigurationError if code cannot be isolated on this machine."""
    if not passes_tests(Program("def one():\n    return 1", "assert one() == 1", "", 10, 256 << 20)):
        raise ConfigurationError("generated code cannot be isolated on this machine: a trivial test fails", hint=HINT)
