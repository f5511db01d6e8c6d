"""A proxy in front of an MLflow server that injects faults: 503, delays, lost responses, closed connections."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

TIMEOUT_SECONDS = 30.0
PASS, UNAVAILABLE, RESPONSE_LOST, SLOW, DISCONNECTED = "pass", "busy", "lost", "slow", "gone"
Rule = Callable[[str, str], str]


@dataclass
class Proxy:
    """The proxy's URL and its rule, which maps method and path of a request to one of the faults above."""

    target: str
    url: str = ""
    rule: Rule = lambda method, path: PASS
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def count(self, path_part: str, fault: str = "") -> int:
        """Count the requests whose path contains `path_part`; with `fault`, only those it was applied to."""
        return sum(path_part in path and fault in ("", applied) for _, path, applied in self.requests)


@contextmanager
def run_proxy(target: str) -> Iterator[Proxy]:
    """Listen on a free port and forward requests to `target`."""
    proxy = Proxy(target)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.rule(self.command, self.path)
            proxy.requests.append((self.command, self.path, fault))
            if fault == DISCONNECTED:
                self.close_connection = True
                return
            if fault == UNAVAILABLE:
                self._respond(503, b"too many people are asking", {})
                return
            if fault == SLOW:
                time.sleep(TIMEOUT_SECONDS)
            response = self._forward(body)
            if fault == RESPONSE_LOST:
                self.close_connection = True
                return
            self._respond(*response)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the names are those of http.server

        def _forward(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            upstream = urlparse(proxy.target)
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=TIMEOUT_SECONDS)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, content, {"Content-Type": response.headers.get("Content-Type", "application/json")}

        def _respond(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    return Handler
