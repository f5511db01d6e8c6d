"""A real git server for tests."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@contextmanager
def git_over_http(folder: Path, user: str, password: str) -> Iterator[str]:
    """Git's own HTTP backend for the repositories in a folder, for this user alone."""
    home = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True).stdout.strip()
    wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class Asked(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            told = {
                "GIT_PROJECT_ROOT": str(folder), "GIT_HTTP_EXPORT_ALL": "1", "REMOTE_USER": user, "PATH": os.environ["PATH"],
                "REQUEST_METHOD": self.command, "PATH_INFO": path, "QUERY_STRING": query,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""), "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            }  # fmt: skip
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            done = subprocess.run([f"{home}/git-http-backend"], env=told, input=body, capture_output=True, check=True)
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + done.stdout)

        do_POST = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
