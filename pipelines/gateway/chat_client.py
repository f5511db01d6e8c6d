"""Client of an OpenAI-compatible server for `tuneline chat`: lists its models and streams answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from components.common.runtime import http_client
from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError, TunelineError, UsageError
from components.common.runtime.url_credentials import remove_credentials

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 600.0  # between two pieces of an answer
MAX_RESPONSE_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
VERSION_HEADER = "x-tuneline-model-version"

Message = dict[str, str]


@dataclass
class Answer:
    """An answer so far.

    Attributes:
        version: version of the model, or None if the server does not state it.
        usage: the server's token counts, or None.
        seconds: time from the request to the end of the answer.
        first_token_seconds: time to the first piece of text, or None before it.
        finish_reason: "" until the answer is complete.
    """

    text: str = ""
    version: str | None = None
    usage: dict[str, Any] | None = None
    seconds: float = 0.0
    first_token_seconds: float | None = None
    finish_reason: str = ""
    _began: float = field(default_factory=time.perf_counter)

    def add(self, text: str) -> None:
        """Add a piece of text."""
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self._began
        self.text += text

    def end(self) -> None:
        """Record the end."""
        self.seconds = time.perf_counter() - self._began


class ChatClient:
    """Calls one server.

    Args:
        url: address of the server, with or without /v1.
        key: API key, or "".

    Raises:
        UsageError: the URL or the key is not valid.
    """

    def __init__(self, url: str, key: str = "") -> None:
        if remove_credentials(url) != url:
            raise UsageError("the URL contains a user name or a password", hint="Set TUNELINE_API_KEY instead.")
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError(
                "the API key contains a control character, such as a line break, or a non-ASCII character",
                hint="Copy the key again.",
            )
        try:
            is_valid = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise UsageError(f"{url!r} is not the URL of a server", hint="Example: http://127.0.0.1:8000")
        self.base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._opener = http_client.build_opener(url)

    def list_models(self) -> dict[str, set[str]]:
        """Return the names of the models, each with the names under which the server knows it.

        Raises:
            EngineMissingError: the server does not answer.
            UsageError: the server refuses the request.
        """
        with self._open("/models", None, CONNECT_SECONDS) as response:
            try:
                models = json.loads(response.read(MAX_RESPONSE_BYTES))["data"]
                return {str(each["id"]): {str(each["id"]), str(each.get("root", ""))} for each in models}
            except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
                raise self._no_answer("the response to /models is not a list of models") from None

    def stream(
        self, answer: Answer, model: str, messages: Sequence[Message], settings: Mapping[str, object]
    ) -> Iterator[str]:
        """Yield the pieces of an answer, and record it. Closing the iterator stops the answer.

        Raises:
            EngineMissingError: the server does not answer, or breaks the answer off.
            UsageError: the server refuses the request.
        """
        body = {"model": model, "messages": list(messages), **settings}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._open("/chat/completions", body, ANSWER_SECONDS) as response:
            answer.version = response.headers.get(VERSION_HEADER)
            try:
                for event in read_events(iter(lambda: response.readline(MAX_LINE_BYTES), b"")):
                    if "error" in event:
                        raise EngineMissingError(
                            f"the answer was interrupted: {_read_message(event) or 'the server reports an error'}",
                            hint="Send the message again.",
                        )
                    answer.usage = event.get("usage") or answer.usage
                    for choice in event.get("choices", [])[:1]:
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                        if text := choice.get("delta", {}).get("content"):
                            answer.add(text)
                            yield text
            except (OSError, HTTPException, ValueError, TypeError, AttributeError) as error:
                raise self._no_answer(f"the answer was interrupted: {error or type(error).__name__}") from None
        answer.end()
        if not answer.finish_reason:
            raise self._no_answer("the connection closed before the answer was complete")

    def _open(self, path: str, body: Mapping[str, object] | None, timeout: float) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, self._headers)  # noqa: S310 - http and https only
            response: HTTPResponse = self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, HTTPException, ValueError) as error:
            raise self._no_answer(str(getattr(error, "reason", error)) or type(error).__name__) from None
        return response

    def _refusal(self, error: urllib.error.HTTPError) -> TunelineError:
        try:
            message = _read_message(json.loads(error.read(MAX_RESPONSE_BYTES)))
        except (OSError, HTTPException, ValueError):
            message = ""
        said = f"{self.base_url} returned status {error.code}: {message or error.reason}"
        if error.code in (401, 403):
            return UsageError(said, hint="Set an API key of this server in TUNELINE_API_KEY or with --key.")
        if error.code == 429 or error.code >= 500:
            wait = error.headers.get("Retry-After", "")
            when = f"in {format_count(int(wait), 'second')}" if wait.isdecimal() else "later"
            return EngineMissingError(said, hint=f"Try again {when}.")
        return UsageError(said, hint="Correct the request, or the address of the server.")

    def _no_answer(self, reason: str) -> EngineMissingError:
        return EngineMissingError(
            f"{self.base_url}: {reason}", hint="Check that the server is running at this address."
        )


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of server-sent events until the event [DONE]; comments and other fields are skipped.

    Raises:
        ValueError: an event is not a JSON object.
    """
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name != b"data" or not value.strip():
            continue
        if value.strip() == b"[DONE]":
            return
        event = json.loads(value)
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object")
        yield event


def _read_message(body: object) -> str:
    """Return the message of an error response; servers differ in its form."""
    error = body.get("error", body.get("detail", "")) if isinstance(body, dict) else ""
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)
