"""Clients that send chat requests without pause and without retries, for tests of disruptions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

import openai

PAUSE_SECONDS = 0.1
TIMEOUT_SECONDS = 120.0
CLOSING = {"Connection": "close"}
# Headers and streaming by client. The official client keeps its connections open, which a Service does not move to another pod.
CLIENTS = {
    "kept connection": ({}, False),
    "second kept connection": ({}, False),
    "stream on a kept connection": ({}, True),
    "new connections": (CLOSING, False),
    "streams on new connections": (CLOSING, True),
}


class ChatTraffic:
    """Runs the clients in threads until the end of the block. `answered` counts answers by client; `failures` describes the other requests."""

    def __init__(self, url: str, key: str) -> None:
        self.answered: Counter[str] = Counter()
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(name, url, key)) for name in CLIENTS]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_SECONDS)

    def wait_for_answers(self, count: int) -> None:
        """Wait until each client has received this number of further answers."""
        targets = {name: self.answered[name] + count for name in CLIENTS}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(self.answered[name] < target for name, target in targets.items()) and not self.failures:
            assert time.monotonic() < deadline, self.answered
            time.sleep(PAUSE_SECONDS)

    def _run(self, name: str, url: str, key: str) -> None:
        headers, stream = CLIENTS[name]
        began = time.monotonic()
        with openai.OpenAI(
            base_url=url, api_key=key, default_headers=headers, max_retries=0, timeout=TIMEOUT_SECONDS
        ) as client:
            while not self._stop.wait(PAUSE_SECONDS):
                try:
                    reason = self._ask(client, stream=stream)
                    assert reason in ("stop", "length"), f"finish_reason is {reason!r}"
                    self.answered[name] += 1
                except Exception as error:  # a failure of any kind is a failed request
                    seconds = time.monotonic() - began
                    self.failures.append(f"{name}, after {seconds:.1f} s: {type(error).__name__}: {error}")

    @staticmethod
    def _ask(client: openai.OpenAI, *, stream: bool) -> str | None:
        """Send a request and return the answer's finish reason."""
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
        if not stream:
            answer = client.chat.completions.create(model="tuneline", messages=messages, max_tokens=32)
            return answer.choices[0].finish_reason
        reason: str | None = None
        for chunk in client.chat.completions.create(model="tuneline", messages=messages, max_tokens=32, stream=True):
            reason = chunk.choices[0].finish_reason if chunk.choices else reason
        return reason
