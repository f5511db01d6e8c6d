"""A proxy before an MLflow server that does to chosen requests what networks do: refuse, delay, or lose the answer."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

SECONDS = 30.0
PASS, BUSY, LOST, SLOW, GONE = "pass", "busy", "lost", "slow", "gone"
Rule = Callable[[str, str], str]


@dataclass
class Proxy:
    """Where it listens, and what it does: `rule` is given method and path and returns one of the words above."""

    target: str
    url: str = ""
    rule: Rule = lambda method, path: PASS
    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def count(self, part: str, did: str = "") -> int:
        """Requests whose path holds `part`, those only to which this was done."""
        return sum(part in path and did in ("", done) for _, path, done in self.seen)


@contextmanager
def before(target: str) -> Iterator[Proxy]:
    """Listen on a port of its own and hand requests on to `target`."""
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
            what = proxy.rule(self.command, self.path)
            proxy.seen.append((self.command, self.path, what))
            if what == GONE:
                self.close_connection = True
                return
            if what == BUSY:
                self._answer(503, b"too many people are asking", {})
                return
            if what == SLOW:
                time.sleep(SECONDS)
            answer = self._forward(body)
            if what == LOST:
                self.close_connection = True
                return
            self._answer(*answer)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the names are those of http.server

        def _forward(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            where = urlparse(proxy.target)
            onward = http.client.HTTPConnection(where.hostname or "", where.port, timeout=SECONDS)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            onward.request(self.command, self.path, body, headers)
            answer = onward.getresponse()
            content = answer.read()
            onward.close()
            return answer.status, content, {"Content-Type": answer.headers.get("Content-Type", "application/json")}

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    return Handler
