"""Servers that have imported the libraries of a program and run the program in a fork, for tests of its results.

Imports are 70% of the CPU time of a tiny run, and half of that of a comparison with Daft. The first run of a session,
its comparison included, and the tests of interrupted runs start each process as users do.

`python -P -m tests.preloaded_server NAME MODULE…` serves the Unix socket NAME of the abstract namespace.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from components.common.runtime import process_control

ROOT = Path(__file__).parents[1]
# Imports by the name of the server, which `preloaded/sitecustomize.py` reads in a variable: PRELOADED_ENGINE for the
# processes of Daft; PRELOADED_STEPS for the steps of a run and PRELOADED_COMMANDS for the commands of tuneline.
MODULES = {
    "engine": ("daft", "daft.functions", "components.data_curation.engine"),
    "tuneline": (
        "kfp.local", "mlflow.store.tracking.sqlalchemy_store", "peft", "trl", "transformers.generation.continuous_batching",
        "pipelines.cli.main", "pipelines.runs.local_runner", "components.common.pipeline_step",
    ),
}  # fmt: skip


@functools.cache
def _start(server_name: str) -> str:
    """Start a server, which ends with this process; return its address."""
    address = f"tuneline-{server_name}-{os.getpid()}"
    command = process_control.build_module_command("tests.preloaded_server", address, *MODULES[server_name])
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = psutil.Popen(command, env=variables, stdout=subprocess.PIPE, preexec_fn=process_control.die_with_parent)
    assert server.stdout.readline() == b"ready\n", "the server did not start"
    _servers.append(server)
    return address


_servers: list[psutil.Popen] = []


def get_variables(*variables: str) -> dict[str, str]:
    """Return the environment variables of a process whose children a server runs; start the server if necessary."""
    address = _start("engine" if variables == ("PRELOADED_ENGINE",) else "tuneline")
    path = f"{ROOT / 'tests' / 'preloaded'}{os.pathsep}{ROOT}"
    return {**dict.fromkeys(variables, address), "PYTHONPATH": path}


def get_cpu_seconds() -> float:
    """Return the CPU time of the servers and their ended forks."""
    return sum(sum(server.cpu_times()[:4]) for server in _servers)


def main(name: str, modules: list[str]) -> None:
    """Serve each connection in a fork: the server has one thread and no state of a program."""
    process_control.relax_garbage_collector()
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()
    signal.signal(signal.SIGCHLD, _reap_children)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    request, streams = _receive(connection)
    program = os.fork()
    if program == 0:
        connection.close()
        _run(request, streams)
    else:
        for stream in streams:
            os.close(stream)
        _watch(program, connection)


def _reap_children(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request and the program's standard streams."""
    header, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, data = int.from_bytes(header, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return json.loads(data), streams


def _run(request: dict[str, Any], streams: list[int]) -> None:
    process_control.die_with_parent()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in ((1, "stdout"), (2, "stderr")):  # flushed at the end of a line, as with PYTHONUNBUFFERED
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if patch := os.environ.get("PRELOADED_PATCH"):  # as preloaded/sitecustomize.py does
        runpy.run_path(patch)
    module, *sys.argv[1:] = request["program"]
    sys.modules.pop(module, None)  # runpy warns of an imported module
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch(program: int, connection: socket.socket) -> None:
    """Send the program's process ID and exit status; kill the program if its client ends first."""
    connection.sendall(f"{program}\n".encode())
    descriptor = os.pidfd_open(program)
    ended, _, _ = select.select([descriptor, connection], [], [])
    if descriptor not in ended:
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):
        connection.sendall(f"{status}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
