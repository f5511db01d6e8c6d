"""Starts `tuneline gateway`, and sends raw requests to it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

CHAT = "/v1/chat/completions"
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class GatewayProcess:
    """A running gateway."""

    url: str
    log: Path
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        """The port of the URL."""
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def send(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request on a new connection, and return status, headers in lower case and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, data, {**HEADERS, **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content

    def send_raw(self, data: bytes, timeout: float = 30.0) -> bytes:
        """Send bytes, close the sending side, and return all that the gateway answers."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            received = b""
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    received += part
            except OSError:
                pass  # the gateway closed the connection before it read everything; its answer may be lost
            return received

    def count_running(self) -> float:
        """Return the number of requests in progress, from the metrics."""
        metrics = self.send("GET", "/metrics")[2].decode()
        return float(metrics.split("\ntuneline_gateway_running_requests ")[1].split()[0])

    def get_resident_mib(self) -> int:
        """Return the resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss) >> 20

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def running_gateway(grpc_url: str, log: Path, *options: str) -> Iterator[GatewayProcess]:
    """Start a gateway on a free port, and stop it at the end of the block."""
    command = [sys.executable, "-P", "-m", "pipelines.cli", "gateway", "--grpc-url", grpc_url, "--http-port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--json", *options], stdout=subprocess.PIPE, stderr=output, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield GatewayProcess(json.loads(line)["http"], log, process)
        finally:
            process.kill()
            process.wait()
