"""Client of an OpenAI-compatible chat endpoint, with retries and backoff."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

from components.common.runtime import chat_completions
from components.common.runtime.errors import EngineMissingError

AnswerT = TypeVar("AnswerT")
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


class NoAnswerError(Exception):
    """The endpoint returned no usable answer in any attempt."""


class RequestRejectedError(EngineMissingError):
    """The endpoint rejects the request, and would also reject a retry."""

    is_request_specific = False  # whether the endpoint may answer another question


class MissingTextError(ValueError):
    """The endpoint's response contains no text."""


@dataclass(frozen=True)
class ChatEndpoint:
    """Address, model name, key and limits of a chat endpoint.

    Attributes:
        base_url: URL without /chat/completions.
        model: Name of the model at the endpoint.
        key: API key; "" for no key.
        timeout: Timeout of each request in seconds.
        retries: Maximum number of retries per question.
        role: What the model does, for errors.
        hint: Hint of the error if the endpoint rejects a request.
        stopped: Ends all retries when set.
    """

    base_url: str
    model: str
    key: str = field(repr=False)
    timeout: float
    retries: int
    role: str = "judge"
    hint: str = "Check base_url (without /chat/completions), the model name, and the key in api_key_env."
    stopped: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def complete(self, messages: Sequence[dict[str, str]], max_tokens: int) -> str:
        """Return the model's answer at temperature 0.

        Args:
            messages: Turns of the conversation, as {role, content}.
            max_tokens: Maximum answer length in tokens.

        Raises:
            NoAnswerError: All retries failed.
            RequestRejectedError: The endpoint rejects the key, the path or the question.
        """
        body = {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        return self.request(body, get_text)

    def request(self, body: Mapping[str, object], read_answer: Callable[[Any], AnswerT]) -> AnswerT:
        """Send a request to the model, again until its response contains an answer, and return the answer.

        Args:
            body: The request without the model's name.
            read_answer: Returns the answer in a response. Raises MissingTextError if there is none.

        Raises:
            NoAnswerError: All retries failed.
            RequestRejectedError: The endpoint rejects the key, the path or the question.
        """
        reason = ""
        for attempt in range(self.retries + 1):
            rejection = None
            try:
                request = {"model": self.model, **body}
                return read_answer(chat_completions.post(self.base_url, self.key, request, self.timeout))
            except urllib.error.HTTPError as error:
                rejection, reason = error, f"HTTP {error.code}"
                text = chat_completions.describe_status(error, self.key)
                if error.code not in chat_completions.RETRYABLE_STATUSES:
                    raise self._build_rejection(error.code, text) from None
            except MissingTextError as error:
                reason = str(error)
            except (OSError, HTTPException, ValueError) as error:
                reason = chat_completions.describe_failure(error)
            if attempt < self.retries and self.stopped.wait(chat_completions.compute_backoff(attempt, rejection)):
                break
        raise NoAnswerError(reason)

    def _build_rejection(self, status: int, text: str) -> RequestRejectedError:
        rejection = RequestRejectedError(
            f"the {self.role} at {self.base_url} rejects the request: {text}", hint=self.hint
        )
        rejection.is_request_specific = status in chat_completions.REQUEST_ERROR_STATUSES
        return rejection


def get_text(answer: Any) -> str:
    """Return the text of a response. Raises MissingTextError for a response without text."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise MissingTextError("the response has no text in choices[0].message.content")
    return text


def check_url(address: str, setting: str, key_setting: str, key_variable: str) -> None:
    """Check the URL of an endpoint.

    Args:
        address: The URL, without /chat/completions.
        setting: The key of the configuration that has the URL.
        key_setting: The key of the configuration that names the environment variable with the API key.
        key_variable: The name of this variable; "" for no key.

    Raises:
        ValueError: The URL is not http or https, contains a password, or would send the key unencrypted.
    """
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(
            f"{setting} has scheme {url.scheme!r} and host {url.hostname or ''!r}; expected scheme http or https, and a host"
        )
    if url.scheme == "http" and url.hostname not in LOCAL_HOSTS and key_variable:
        raise ValueError(
            f"{setting} has scheme http, which would send the key unencrypted; expected https, a host on this machine, or no "
            f"{key_setting}"
        )
    if url.username or url.password or url.query or url.fragment:
        raise ValueError(
            f"{setting} contains a user, password, query or fragment; allowed: scheme, host, port and path ({key_setting} "
            "names the environment variable with the API key)"
        )
