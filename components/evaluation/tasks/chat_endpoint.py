"""Client of an OpenAI-compatible chat endpoint, with retries and backoff.

The key is sent in a header and does not appear in messages or logs. Redirects are not followed, because they could
send the key to another server.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException

from components.common.runtime import http_client
from components.common.runtime.errors import ConfigurationError, EngineMissingError

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
REQUEST_ERROR_STATUSES = frozenset({400, 413, 422})  # possibly specific to the question, such as too long
INITIAL_BACKOFF_SECONDS = 0.5  # doubled with each retry
MAX_BACKOFF_SECONDS = 20.0  # also the limit for Retry-After
MAX_RESPONSE_BYTES = 4 << 20
MAX_ERROR_CHARACTERS = 200  # of the endpoint's error text


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
    """

    base_url: str
    model: str
    key: str = field(repr=False)
    timeout: float
    retries: int

    def complete(self, messages: Sequence[dict[str, str]], max_tokens: int) -> str:
        """Return the model's answer at temperature 0.

        Args:
            messages: Turns of the conversation, as {role, content}.
            max_tokens: Maximum answer length in tokens.

        Raises:
            NoAnswerError: All retries failed.
            RequestRejectedError: The endpoint rejects the key, the path or the question.
        """
        body = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        reason = ""
        for attempt in range(self.retries + 1):
            wait = 0.0
            try:
                return self._post(body)
            except urllib.error.HTTPError as error:
                reason, text = f"HTTP {error.code}", ""
                with contextlib.suppress(OSError, HTTPException, ValueError):
                    text = error.read(MAX_RESPONSE_BYTES).decode("utf-8", "replace")
                error.close()
                if error.code not in RETRYABLE_STATUSES:
                    if self.key:  # removed before the text is cut, which could split the key
                        text = text.replace(self.key, "[key]")
                    text = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:MAX_ERROR_CHARACTERS]
                    rejection = RequestRejectedError(
                        f"the judge at {self.base_url} rejects the request: HTTP {error.code}"
                        + (f": {text}" if text else ""),
                        hint="Check base_url (without /chat/completions), the model name, and the key in api_key_env.",
                    )
                    rejection.is_request_specific = error.code in REQUEST_ERROR_STATUSES
                    raise rejection from None
                with contextlib.suppress(ValueError):
                    wait = float(error.headers.get("Retry-After", "0"))
            except (OSError, HTTPException, ValueError) as error:
                cause = error.reason if isinstance(error, urllib.error.URLError) else error
                # The text of another error may contain the key.
                reason = str(cause) if isinstance(cause, MissingTextError) else type(cause).__name__
                if isinstance(cause, OSError) and cause.errno:
                    reason += f": {os.strerror(cause.errno)}"
            if attempt < self.retries:
                time.sleep(min(max(INITIAL_BACKOFF_SECONDS * 2**attempt, wait), MAX_BACKOFF_SECONDS))
        raise NoAnswerError(reason)

    def _post(self, body: dict[str, object]) -> str:
        """Send a request and return the answer's text. Raises MissingTextError for a response without text."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        url = self.base_url.rstrip("/") + "/chat/completions"
        # The settings allow only https and loopback addresses.
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
        with http_client.build_opener(url).open(request, timeout=self.timeout) as response:
            answer = json.loads(response.read(MAX_RESPONSE_BYTES))
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise MissingTextError("the response has no text in choices[0].message.content")
        return text


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable; "" for an empty name.

    Raises:
        ConfigurationError: The variable is not set.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigurationError(
            f"api_key_env: the environment variable {variable} is not set",
            hint=f"Set {variable} in the environment of the evaluation.",
        )
    return key
