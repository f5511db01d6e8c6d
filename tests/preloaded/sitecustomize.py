"""Hands a program over to a server of `tests/preloaded_server.py`, which has imported the program's libraries.

Python imports this module at its start if its folder is in PYTHONPATH. Programs without a server start as usual.
"""

import os
import sys


def find_server(command: list[str]) -> str | None:
    """Return the address of the server for this process' command line."""
    program = command[command.index("-m") + 1 :] if "-m" in command[1:3] else []
    match program:
        case ["components.data_curation.engine", *_]:
            return os.environ.get("PRELOADED_ENGINE")
        case ["kfp.dsl.executor_main", *_]:
            return os.environ.get("PRELOADED_STEPS")
        case ["pipelines.cli", *_]:
            return os.environ.get("PRELOADED_COMMANDS")
    return None


def run_on_server(address: str, program: list[str]) -> None:
    """Run a module in a fork of the server, with the standard streams of this process, and exit as the fork does."""
    import json
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{address}")
    folder = os.getcwd()  # noqa: PTH109 - each Python of a test imports this module; it imports no pathlib
    # A command starts others, such as the gateway, with descriptors that a server does not have.
    variables = {name: value for name, value in os.environ.items() if name != "PRELOADED_COMMANDS"}
    request = {"program": program, "folder": folder, "umask": os.umask(0), "environment": variables}
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(data)
    answers = connection.makefile("r")
    pid = int(answers.readline())
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, _: os.kill(pid, number))
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if server := find_server(sys.orig_argv):
    run_on_server(server, sys.orig_argv[sys.orig_argv.index("-m") + 1 :])
# A file that changes a library for a test; a server runs it in its forks.
if patch := os.environ.get("PRELOADED_PATCH"):
    import runpy

    runpy.run_path(patch)
