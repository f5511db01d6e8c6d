"""A real git server for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def git_daemon(folder: Path) -> Iterator[str]:
    """A real git server for the repositories in a folder, on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["git", "daemon", "--listen=127.0.0.1", f"--port={port}", "--reuseaddr", "--export-all", "--enable=receive-pack"]
    server = subprocess.Popen([*command, f"--base-path={folder}", str(folder)], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"git://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 9)
        server.wait()
