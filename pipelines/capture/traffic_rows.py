"""Rows of captured traffic: the data flywheel's keys with request and response in OpenAI's form, and tuneline's own.

A row is redacted before it is written. None of this runs on the request path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from components.common.personal_data import PLACEHOLDERS
from components.common.personal_data.json_redaction import Redactor
from components.common.personal_data.names_config import NamesConfig
from pipelines.capture.traffic_files import Row

NO_NAMES = NamesConfig()
COMPLETE, ABORTED, FAILED = "complete", "aborted", "failed"
USER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")  # identify a person; stored as the subject's hash


@dataclass(frozen=True)
class AnswerFacts:
    """What tuneline knows about an answer.

    Attributes:
        model: name of the model that answered.
        version: its version in the registry.
        model_sha256: the model's content digest, or "".
        repository_sha256: the package's content digest, or "".
        subject: keyed hash of the subject, or None.
        consent: value of the consent header that grants, or None: not asked, or not sent.
        sampling_rate: share of requests sampled for capture.
        state: COMPLETE, ABORTED by the client, or FAILED; the response then has the text so far.
        status: HTTP status.
        seconds: duration of the answer.
        first_token_seconds: time to the first token, or None.
    """

    model: str
    version: str
    model_sha256: str
    repository_sha256: str
    subject: str | None
    consent: str | None
    sampling_rate: float
    state: str
    status: int
    seconds: float
    first_token_seconds: float | None


def build_row(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    facts: AnswerFacts,
    *,
    timestamp: int,
    workload: str,
    client: str,
    shadow_of: str = "",
) -> Row:
    """Return the redacted row of an answered request.

    Args:
        request: the body of the request.
        response: the whole response, also of a stream.
        facts: tuneline's own values.
        timestamp: Unix time of the request.
        workload: name that the client requested.
        client: name of the API key.
        shadow_of: id of the answer that the client received, if this one is a shadow model's.
    """
    redactor = Redactor(PLACEHOLDERS, NO_NAMES, Counter(), is_thorough=True)
    choices = [_redact_choice(choice, redactor) for choice in response["choices"]]
    return {
        "timestamp": timestamp,
        "workload_id": workload,
        "client_id": client,
        "request": _redact_request(request, facts.subject, redactor),
        "response": {**response, "choices": choices},
        "tuneline": {
            **vars(facts),
            "finish_reasons": [choice["finish_reason"] for choice in choices],
            "redactions": dict(redactor.counts),
            **({"shadow_of": shadow_of} if shadow_of else {}),
        },
    }


def is_shadow(row: Row) -> bool:
    """Return whether the row is an answer of a shadow model, which no client has received."""
    return bool(row["tuneline"].get("shadow_of"))


def _redact_request(request: Mapping[str, Any], subject: str | None, redactor: Redactor) -> dict[str, Any]:
    fields = {name: value for name, value in request.items() if name not in ("messages", "metadata", *USER_FIELDS)}
    redacted: dict[str, Any] = redactor.redact_value(fields)
    redacted |= {name: subject for name in USER_FIELDS if name in request}
    redacted |= {"seed": request["seed"]} if "seed" in request else {}  # a random number may look like a card's
    if "metadata" in request:
        redacted["metadata"] = redactor.redact_value({"metadata": request["metadata"]}, use_keys=True)["metadata"]
    if request.get("messages"):
        redacted["messages"] = [_redact_message(message, redactor) for message in request["messages"]]
    return redacted


def _redact_message(message: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        # The model receives the joined text: personal data may extend over several parts.
        text = "".join(part["text"] for part in content)
        message = {**message, "content": [{"type": "text", "text": text}]}
    calls = message.get("tool_calls")
    redacted: dict[str, Any] = redactor.redact_value({k: v for k, v in message.items() if k != "tool_calls"})
    if "tool_calls" in message:
        redacted["tool_calls"] = [_redact_call(call, redactor) for call in calls] if calls else calls
    return redacted


def _redact_call(call: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    with suppress(ValueError, RecursionError):  # not JSON: a text
        arguments = redactor.redact_json(arguments)
    return dict(redactor.redact_value({**call, "function": {**call["function"], "arguments": arguments}}))


def _redact_choice(choice: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    # Personal data extends over several tokens, which cannot be redacted one by one.
    redacted: dict[str, Any] = {**choice, "logprobs": None}
    if "message" in choice:
        redacted["message"] = _redact_message(choice["message"], redactor)
    else:
        redacted["text"] = redactor.redact_text(choice["text"])
    return redacted
