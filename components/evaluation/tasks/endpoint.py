"""A model behind an OpenAI-compatible endpoint: one question, one text, with a limit to how often it is asked again.

The key travels in a header and stands in no message and no log; a redirect is not followed, since it could carry the key elsewhere.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from components.common import web
from components.common.errors import ConfigurationError, EngineMissingError

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})  # statuses after which the same request may succeed
OF_ITS_OWN = frozenset({400, 413, 422})  # statuses that may lie in this one question: too long a prompt, or words that a filter refuses
PAUSE = 0.5  # seconds before the first repetition; doubled each time
LONGEST_PAUSE = 20.0  # seconds, also when the server asks for more
MOST = 4 << 20  # bytes of an answer
TOLD = 200  # characters of what an endpoint says with a refusal


class NoAnswerError(Exception):
    """The endpoint gave no answer that can be used, however often it was asked."""


class RefusedError(EngineMissingError):
    """The endpoint refuses, and asking the same again cannot help."""

    of_its_own = False  # whether another question may be answered


@dataclass(frozen=True)
class Endpoint:
    """Where the model is, how it is named there, and how long it is waited for (seconds)."""

    base_url: str
    model: str
    key: str
    timeout: float
    retries: int
    sleep: Callable[[float], None] = time.sleep

    def __repr__(self) -> str:
        return f"Endpoint({self.base_url}, {self.model})"

    def ask(self, messages: Sequence[dict[str, str]], max_tokens: int) -> str:
        """The model's answer, at temperature 0.

        Raises NoAnswerError once the retries are used up, and RefusedError where asking again cannot help: a wrong key or path, or a
        question that this endpoint does not take.
        """
        body = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        why = ""
        for attempt in range(self.retries + 1):
            try:
                return _content(self._post(body))
            except urllib.error.HTTPError as error:
                why, wait = f"HTTP {error.code}", _asked_to_wait(error)
                said = self._said(error)
                error.close()
                if error.code not in AGAIN:
                    raise self._refused(error.code, said) from None
            except (OSError, HTTPException, ValueError) as error:
                why, wait = type(error).__name__ if isinstance(error, ValueError) else _reason(error), 0.0
            if attempt < self.retries:
                self.sleep(min(max(PAUSE * 2**attempt, wait), LONGEST_PAUSE))
        raise NoAnswerError(why)

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        url = self.base_url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 the settings allow https and loopback alone
        with web.opener(url).open(request, timeout=self.timeout) as response:
            return json.loads(response.read(MOST))

    def _said(self, error: urllib.error.HTTPError) -> str:
        """The beginning of a refusal's text on one line; a key that it repeats is left out, also one that the end cuts."""
        try:
            text = error.read(MOST).decode("utf-8", "replace")
        except (OSError, HTTPException, ValueError):
            return ""
        bare = text.replace(self.key, "[key]") if self.key else text
        return "".join(one if one.isprintable() else " " for one in " ".join(bare.split()))[:TOLD]

    def _refused(self, status: int, said: str) -> RefusedError:
        refused = RefusedError(
            f"the judge at {self.base_url} refuses: HTTP {status}" + (f": {said}" if said else ""),
            hint="See that base_url ends where /chat/completions begins, that it serves this model, and that api_key_env names its key.",
        )
        refused.of_its_own = status in OF_ITS_OWN
        return refused


def _content(answer: Any) -> str:
    """The text in an answer. Raises ValueError where there is none."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("an answer without choices") from None
    if not isinstance(text, str):
        raise ValueError("an answer without a text")
    return text


def _asked_to_wait(error: urllib.error.HTTPError) -> float:
    try:
        return float(error.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0


def _reason(error: BaseException) -> str:
    """What went wrong on the way, without what was sent."""
    inner = getattr(error, "reason", error)
    return f"{type(inner).__name__}: {os.strerror(inner.errno)}" if isinstance(inner, OSError) and inner.errno else type(inner).__name__


def key(variable: str, field: str) -> str:
    """The key in an environment variable, "" where none is named. Raises ConfigurationError where the variable is not set."""
    if not variable:
        return ""
    found = os.environ.get(variable, "").strip()
    if not found:
        raise ConfigurationError(
            f"{field} names {variable}, which is not set", hint=f"Set {variable} in the environment of the evaluation."
        )
    return found
