"""A stand-in for a teacher: an OpenAI-compatible server that answers from the passage by a rule instead of a model.

    python -m tests.pipelines.synthesis.stand_in_teacher [PORT]      serves until it is killed, and prints its URL

It chooses the sentence that the request names, or one by the checksum of the request, and asks for the sentence by its longest words.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL_NAME = "stand-in"
PASSAGE = re.compile(r"<passage>\n(.*)\n</passage>", re.DOTALL)
SENTENCE = re.compile(r"[^.!?\n#]{15,}[.!?]")
NUMBERED_SENTENCE = re.compile(r"about sentence (\d+)")
Reply = tuple[int, Any]


def build_reply(text: str, *, tokens: tuple[int, int] | None = (100, 20), finish: str = "stop") -> Reply:
    """Build a response of the endpoint; `tokens` of prompt and answer, None for a response without usage."""
    usage = {"usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}} if tokens else {}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return 200, {"model": f"{MODEL_NAME}: not a model", "choices": [choice], **usage}


def answer_from_passage(body: dict[str, Any]) -> Reply:
    """Answer with a sentence of the passage, or rate a row for the judge: 9, of a row with the word "rusty" 3."""
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {}).get("properties", {})
    content = body["messages"][1]["content"]
    if "score" in schema:
        return build_reply(
            json.dumps({"score": 3 if "rusty" in content.partition("[row]")[2] else 9, "reason": "rule"})
        )
    passage = PASSAGE.search(content)
    assert passage
    sentences = [one.strip() for one in SENTENCE.findall(passage[1])]
    turns = []
    named = NUMBERED_SENTENCE.search(content)
    first = int(named[1]) - 1 if named else zlib.crc32(content.encode())
    for number in range(2 if "turns" in schema else 1):
        sentence = sentences[(first + number) % len(sentences)]
        words = sorted(dict.fromkeys(re.findall(r"[A-Za-z]{4,}", sentence)), key=lambda word: (-len(word), word))[:3]
        turns.append(
            {"question": f"What is known about {' and '.join(words)}?", "answer": sentence, "evidence": sentence}
        )
    if "turns" in schema:
        return build_reply(json.dumps({"turns": turns}))
    if "chosen" in schema:
        turn = turns[0]
        pair = {
            "question": turn["question"],
            "chosen": turn["answer"],
            "rejected": "Nobody knows.",
            "evidence": turn["evidence"],
        }
        return build_reply(json.dumps(pair))
    return build_reply(json.dumps(turns[0]))


@dataclass
class StandInTeacher:
    """The URL of the server, its rule, the delay of an answer, and the bodies of the requests."""

    url: str
    reply: Callable[[dict[str, Any]], Reply]
    seconds: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serve_teacher(
    reply: Callable[[dict[str, Any]], Reply] = answer_from_passage, *, port: int = 0, seconds: float = 0.0
) -> Iterator[StandInTeacher]:
    """Serve the stand-in on a local port, 0 for a free one."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    teacher = StandInTeacher(f"http://127.0.0.1:{server.server_address[1]}/v1", reply, seconds)
    server.teacher = teacher  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": MODEL_NAME}]})

    def do_POST(self) -> None:
        teacher: StandInTeacher = self.server.teacher  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        teacher.requests.append(body)
        time.sleep(teacher.seconds)
        self._send(*teacher.reply(body))

    def _send(self, status: int, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


if __name__ == "__main__":
    with serve_teacher(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as served:
        print(served.url, flush=True)
        threading.Event().wait()
