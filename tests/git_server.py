"""Git servers for tests: `git daemon` and `git http-backend`."""

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
    """Serve the repositories in a folder with `git daemon` on a free port; yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        "git",
        "daemon",
        "--listen=127.0.0.1",
        f"--port={port}",
        "--reuseaddr",
        "--export-all",
        "--enable=receive-pack",
    ]
    server = subprocess.Popen(
        [*command, f"--base-path={folder}", str(folder)], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
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
    """Serve the repositories in a folder with `git http-backend` and basic authentication; yields the URL."""
    exec_path = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True).stdout.strip()
    expected_authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class GitHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != expected_authorization:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            cgi_environment = {
                "GIT_PROJECT_ROOT": str(folder), "GIT_HTTP_EXPORT_ALL": "1", "REMOTE_USER": user, "PATH": os.environ["PATH"],
                "REQUEST_METHOD": self.command, "PATH_INFO": path, "QUERY_STRING": query,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""), "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            }  # fmt: skip
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            response = subprocess.run(
                [f"{exec_path}/git-http-backend"], env=cgi_environment, input=body, capture_output=True, check=True
            )
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + response.stdout)

        do_POST = do_GET  # noqa: N815 - name required by http.server

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), GitHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
