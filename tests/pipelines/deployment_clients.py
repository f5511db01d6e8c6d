"""Clients of a deployed model that send requests without a pause.

As a program, with the addresses of a server and its gateway: sends requests until a line arrives, and prints the answers as JSON. A
separate process keeps the work of a test out of the measured times.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import openai
from tritonclient import grpc

from components.triton_packaging.triton_server import ServerAddress
from tests.triton_packaging.triton_clients import build_tensors, open_stream

SERVED_NAME = "clerk"
PROMPTS = ["What is a list?", "Name the fox."]
TOKENS = 8


@dataclass
class ClientLoad:
    """Clients that send requests without a pause, half of them streamed, with their answers and failures."""

    answers: list[tuple[str, str, str]] = field(default_factory=list)  # version, prompt, text
    times: list[tuple[float, float]] = field(default_factory=list)  # start (time.monotonic) and seconds of each answer
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def apply(self, server: ServerAddress, clients: int = 8, openai_url: str = "") -> Iterator[ClientLoad]:
        """Send requests from `clients` threads until the end of the block; half of them to the gateway, if it is given."""
        requests: list[Callable[[str], tuple[str, str, str]]] = [partial(send, server) for send in REQUESTS]
        if openai_url:
            client = openai.OpenAI(base_url=openai_url, api_key="unused", max_retries=0)
            requests += [partial(ask_gateway, client), partial(stream_from_gateway, client)]
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._send_requests, args=(requests[number % len(requests)], number, stop))
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _send_requests(self, send: Callable[[str], tuple[str, str, str]], number: int, stop: threading.Event) -> None:
        request_number = number
        while not stop.is_set():
            prompt = PROMPTS[request_number % len(PROMPTS)]
            request_number += 1
            began = time.monotonic()
            try:
                self.answers.append(send(prompt))
                self.times.append((began, time.monotonic() - began))
            except Exception as error:  # every error of a client is a failed request
                self.failures.append(repr(error))

    def versions(self) -> list[str]:
        """Return the versions that answered, sorted."""
        return sorted({version for version, _, _ in self.answers})

    def find_wrong_answers(self, proven_texts: Callable[[str], dict[str, str]]) -> list[tuple[str, str, str]]:
        """Return the answers that differ from the proven answer of their version.

        Args:
            proven_texts: returns the proven answers of a version by prompt.
        """
        return [answer for answer in self.answers if proven_texts(answer[0])[answer[1]] != answer[2]]


def request_grpc(server: ServerAddress, prompt: str) -> tuple[str, str, str]:
    """Return the version, the prompt and the text of a complete answer."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(
            SERVED_NAME, build_tensors({"text_input": prompt, "max_tokens": TOKENS}), client_timeout=120
        )
    return result.get_response().model_version, prompt, result.as_numpy("text_output")[0].decode()


def request_stream(server: ServerAddress, prompt: str) -> tuple[str, str, str]:
    """Return the version, the prompt and the text of a streamed answer."""
    pieces: list[Any] = []
    with open_stream(server, f"{SERVED_NAME}_stream", text_input=prompt, max_tokens=TOKENS) as (_, responses):
        while not pieces or not pieces[-1].as_numpy("finish_reason")[0]:
            result, error = responses.get(timeout=120)
            if error is not None:
                raise error
            pieces.append(result)
    return (
        pieces[-1].get_response().model_version,
        prompt,
        "".join(piece.as_numpy("text_output")[0].decode() for piece in pieces),
    )


def ask_gateway(client: openai.OpenAI, prompt: str) -> tuple[str, str, str]:
    """Return the version, the prompt and the text of a complete answer of the gateway."""
    raw = client.chat.completions.with_raw_response.create(
        model=SERVED_NAME, messages=[{"role": "user", "content": prompt}], max_tokens=TOKENS
    )
    return raw.headers["x-tuneline-model-version"], prompt, str(raw.parse().choices[0].message.content)


def stream_from_gateway(client: openai.OpenAI, prompt: str) -> tuple[str, str, str]:
    """Return the version, the prompt and the text of a streamed answer of the gateway."""
    raw = client.chat.completions.with_raw_response.create(
        model=SERVED_NAME, messages=[{"role": "user", "content": prompt}], max_tokens=TOKENS, stream=True
    )
    text = "".join(event.choices[0].delta.content or "" for event in raw.parse())
    return raw.headers["x-tuneline-model-version"], prompt, text


REQUESTS = (request_grpc, request_stream)


@contextmanager
def client_process(server: ServerAddress, openai_url: str) -> Iterator[ClientLoad]:
    """Run clients in another process during the block; yield their load, which is filled at the end."""
    command = [sys.executable, "-m", __name__, server.grpc_url, openai_url]
    load = ClientLoad()
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield load
        finally:
            output, _ = process.communicate("stop\n", timeout=180)
            for name, values in json.loads(output).items():
                getattr(load, name).extend(tuple(value) if isinstance(value, list) else value for value in values)


if __name__ == "__main__":
    with ClientLoad().apply(ServerAddress(sys.argv[1]), openai_url=sys.argv[2]) as load:
        sys.stdin.readline()
    print(json.dumps(asdict(load)))
