"""Rows for curation from captured traffic and feedback: conversations, and preference pairs from corrections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from components.common.artifacts import hashing
from pipelines.capture import row_selection
from pipelines.capture.row_selection import RowFilter
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import Row
from pipelines.capture.traffic_rows import COMPLETE

SOURCE = "traffic"
SAMPLED = "sampled"  # a key of feedback on an answer that was drawn at random, see `review_sample`


@dataclass(frozen=True)
class TrainingRows:
    """The training rows of one captured answer and its feedback.

    Attributes:
        conversation: an SFT row, or None.
        preference: a preference pair with the correction as the chosen answer, or None.
        conversation_key: digest of the user's first message, which all answers of a conversation share.
        group: hash of the subject; without a subject, the key of the conversation.
    """

    conversation: dict[str, Any] | None = None
    preference: dict[str, Any] | None = None
    conversation_key: str = ""
    group: str = ""


def select_feedback(lines: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the feedback that counts by the answer's id: the last line of an id and a key, then the last with content."""
    latest = {(line["id"], line.get("key")): line for line in lines}
    return {
        line["id"]: line
        for line in latest.values()
        if line.get("rating") or line.get("correction") or line.get("labels")
    }


def build_training_rows(row: Row, feedback: Mapping[str, Any] | None, *, include_unrated: bool) -> TrainingRows:
    """Return the rows for curation of one captured answer.

    A correction replaces the answer of the conversation, and is preferred to it. An answer without a correction is a
    row if it was rated "up", or with `include_unrated` if it was not rated. Answers that were cut off, and requests for
    several answers or without messages, give no row.
    """
    messages, choices = row["request"].get("messages"), row["response"]["choices"]
    if not messages or len(choices) != 1:
        return TrainingRows()
    message, subject, given = choices[0]["message"], row["tuneline"]["subject"], feedback or {}
    prompt = [_join_parts(each) for each in messages]
    answer = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
    first = next((each["content"] for each in prompt if each.get("role") == "user"), "")
    key = hashing.digest(["conversation", first])
    group = subject or key
    common = {"id": row["response"]["id"], "source": SOURCE, "meta": _build_meta(row, given)}
    tools = {"tools": row["request"]["tools"]} if row["request"].get("tools") else {}
    if correction := given.get("correction"):
        chosen = {"role": "assistant", "content": correction}
        conversation = {**common, "messages": [*prompt, chosen], **tools}
        has_answer = answer.get("content") not in (None, correction)
        pair = {**common, "prompt": prompt, "chosen": [chosen], "rejected": [answer]}
        return TrainingRows(conversation, pair if has_answer else None, key, group)
    if _is_accepted(row, feedback, include_unrated=include_unrated) and len(answer) > 1:
        return TrainingRows({**common, "messages": [*prompt, answer], **tools}, None, key, group)
    return TrainingRows()


def _is_accepted(row: Row, feedback: Mapping[str, Any] | None, *, include_unrated: bool) -> bool:
    """Return whether an answer was not cut off, and was rated "up" or, with `include_unrated`, not rated."""
    state, finish_reason = row["tuneline"]["state"], row["response"]["choices"][0]["finish_reason"]
    is_whole = state == COMPLETE and finish_reason in ("stop", "tool_calls")
    return is_whole and (include_unrated if feedback is None else feedback.get("rating") == "up")


def _build_meta(row: Row, feedback: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of a row for training: the answer, its model and its feedback."""
    request, facts, correction = row["request"], row["tuneline"], feedback.get("correction")
    return {
        "response_id": row["response"]["id"],
        "subject": facts["subject"],
        "model_version": f"{facts['model']}:{facts['version']}",
        "repository_sha256": facts.get("repository_sha256") or "",
        "day": str(datetime.fromtimestamp(row["timestamp"], UTC).date()),
        "rating": feedback.get("rating"),
        "max_tokens": request.get("max_completion_tokens") or request.get("max_tokens"),
        "labels": feedback.get("labels") or [],
        "origin": "correction" if correction else "model",
        **({SAMPLED: True} if correction and feedback.get(SAMPLED) else {}),
    }


def _join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as text."""
    content = message.get("content")
    return (
        {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else {**message}
    )


def read_training_rows(
    settings: CaptureSettings, feedback: Mapping[str, Mapping[str, Any]], model: str | None, *, include_unrated: bool
) -> Iterator[TrainingRows]:
    """Yield the rows for curation of all stored answers, without those of erased subjects. Call it under the lock.

    Args:
        settings: the capture file.
        feedback: the feedback by the answer's id.
        model: name of the model that answered; None: all models.
        include_unrated: include answers without feedback.
    """
    for row in row_selection.read_rows(settings, RowFilter(model=model or ""), feedback):
        yield build_training_rows(row, feedback.get(row["response"]["id"]), include_unrated=include_unrated)
