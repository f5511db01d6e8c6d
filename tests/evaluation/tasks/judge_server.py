"""A fake judge: a small OpenAI-compatible server that decides by a rule instead of a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL_NAME = "stand-in"
Reply = tuple[int, Any]
ANSWERS = re.compile(r"<answer_a>\n(.*)\n</answer_a>\n\n<answer_b>\n(.*)\n</answer_b>", re.DOTALL)


@dataclass
class FakeJudge:
    """The URL of the server, its rule, and the received requests as path, headers and body."""

    url: str
    decide: Callable[[str, str], Reply]
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)


def build_judgement(text: str) -> Reply:
    """Build a judgement in the format of the endpoint."""
    return 200, {
        "model": f"{MODEL_NAME}: not a model",
        "choices": [{"message": {"role": "assistant", "content": text}}],
    }


def longer_is_better(first: str, second: str) -> Reply:
    """Prefer the longer answer in either position."""
    winner = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
    return build_judgement(
        f"This is a stand-in that counts letters: {len(first)} against {len(second)}.\nVerdict: {winner}"
    )


@contextmanager
def serve_judge(decide: Callable[[str, str], Reply] = longer_is_better) -> Iterator[FakeJudge]:
    """Serve the judge on a free local port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    judge = FakeJudge(f"http://127.0.0.1:{server.server_address[1]}/v1", decide)
    server.judge = judge  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        judge: FakeJudge = self.server.judge  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        judge.requests.append((self.path, dict(self.headers), body))
        answers = ANSWERS.search(body["messages"][-1]["content"])
        assert answers
        status, reply = judge.decide(answers[1], answers[2])
        content = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{judge.url}/elsewhere")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
