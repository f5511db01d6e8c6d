"""A stand-in for a judge: a small server with OpenAI's way of being asked, which decides by a rule instead of a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "stand-in"
Reply = tuple[int, Any]
ANSWERS = re.compile(r"<answer_a>\n(.*)\n</answer_a>\n\n<answer_b>\n(.*)\n</answer_b>", re.DOTALL)


@dataclass
class StandIn:
    """Where it listens, what it was sent (path, headers, body), and how it decides: two answers in, a reply out."""

    url: str
    decide: Callable[[str, str], Reply]
    sent: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)


def says(text: str) -> Reply:
    """A judgement as the endpoint sends it."""
    return 200, {"model": f"{NAME}: not a model", "choices": [{"message": {"role": "assistant", "content": text}}]}


def longer_is_better(first: str, second: str) -> Reply:
    """The longer answer wins, whichever place it has."""
    better = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
    return says(f"This is a stand-in that counts letters: {len(first)} against {len(second)}.\nVerdict: {better}")


@contextmanager
def stand_in(decide: Callable[[str, str], Reply] = longer_is_better) -> Iterator[StandIn]:
    """The server, on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    known = StandIn(f"http://127.0.0.1:{server.server_address[1]}/v1", decide)
    server.known = known  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        known: StandIn = self.server.known  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known.sent.append((self.path, dict(self.headers), body))
        found = ANSWERS.search(body["messages"][-1]["content"])
        assert found
        status, reply = known.decide(found[1], found[2])
        content = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{known.url}/elsewhere")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""
