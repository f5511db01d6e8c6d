"""Moves of an alias in recoverable steps: append an entry, wait for earlier entries, set the alias, close the entry.

MLflow moves an alias regardless of its current version, so moves are serialized: only the lowest pending entry of the
history may move.
"""

# If a process ends without closing its entry, the next process closes it: done if the alias moved, else void.

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from components.common.runtime.errors import BusyError, RegistryError
from components.common.workspace import liveness
from components.model_registry import history_signatures, mlflow_retry, model_versions, registry_history, signers
from components.model_registry.registry_history import DONE, PENDING, VOID, Entry

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

    Check = Callable[[ModelVersion | None, Sequence[Entry]], None]

# A pending move on another machine is abandoned after this time; a single call is retried for 60 seconds.
OWNER_TIMEOUT_SECONDS = 300.0
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 2.0  # while earlier entries are pending
REGISTRATION_ALIASES = ("candidate", "challenger")  # earlier versions of tuneline left no trace of their moves
ABANDONED_OWNER = "gone"  # the owner of an entry that its process has abandoned
INTERRUPTED_NOTE = "interrupted before the alias moved"
UNSIGNED_NOTE = "no trusted signer signed this entry before its move"
DUPLICATE_NOTE = "the same entry was written twice, because a response of the server was lost"

_active_tokens: set[str] = set()  # tokens of this process's moves in progress


class ExternalMoveError(Exception):
    """The alias was moved outside of tuneline. The move must be recorded before the alias can move again."""


def move_alias(client: MlflowClient, model: str, intent: Entry, check: Check = lambda *_: None) -> Entry:
    """Move an alias and record the move. An intent of another kind (approval, policy) is only recorded.

    An earlier move outside of tuneline is recorded first, with the kind `foreign`.

    Args:
        check: called with the alias's current version and the history before the alias is set. If it raises an error,
            the alias is not set, and the error's message is recorded in the entry.

    Returns:
        The closed entry.

    Raises:
        BusyError: the alias moved outside of tuneline during each of ten attempts.
        RegistryError: the move was slow, and another process has closed its entry.
    """
    for _ in range(10):
        try:
            return _attempt(client, model, intent, check)
        except ExternalMoveError:
            record_external_move(client, model, intent.alias)
    raise BusyError(
        f"{model}@{intent.alias} was moved outside tuneline during each of 10 attempts",
        hint=f"List the moves with `tuneline registry audit {model}`.",
    )


def record_external_move(client: MlflowClient, model: str, alias: str, by: str = "") -> Entry | None:
    """Record the current version of an alias that was moved outside of tuneline.

    Returns:
        The closed entry; None if the history already records the version, or the alias moves again.
    """
    holder = model_versions.get_alias_holder(client, model, alias)
    intent = Entry(
        kind="foreign",
        alias=alias,
        to=_get_version_number(holder),
        by=by,
        digest=holder.tags.get(model_versions.MODEL_SHA256_TAG, "") if holder else "",
        reason="moved outside tuneline; detected here",
    )

    def check_unchanged(now: ModelVersion | None, entries: Sequence[Entry]) -> None:
        if _get_version_number(now) != intent.to or registry_history.get_recorded_holder(entries, alias) == intent.to:
            raise RegistryError(
                f"{model}@{alias} moved again before its last move was recorded", hint="Run the same command again."
            )

    with suppress(RegistryError):
        return _attempt(client, model, intent, check_unchanged)
    return None


def _attempt(client: MlflowClient, model: str, intent: Entry, check: Check) -> Entry:
    """Append an entry for the intent, wait for earlier entries, and move the alias."""
    token = uuid.uuid4().hex
    _active_tokens.add(token)
    try:
        entry = registry_history.append(client, model, intent.model_copy(update={"token": token}))
        try:
            seen: dict[int, float] = {}
            while True:
                earlier = close_abandoned(client, model, before=entry.number, first_seen=seen)
                pending = sum(each.state == PENDING for each in earlier)
                if not pending:
                    return _perform(client, model, entry, earlier, check)
                time.sleep(min(MIN_POLL_SECONDS * 2 ** min(pending, 6), MAX_POLL_SECONDS))
        except BaseException as error:
            if not mlflow_retry.is_transient(error):  # the server is unreachable: the next process closes the entry
                _abandon(client, model, entry, str(error))
            raise
    finally:
        _active_tokens.discard(token)


def _perform(client: MlflowClient, model: str, entry: Entry, earlier: Sequence[Entry], check: Check) -> Entry:
    began = time.monotonic()
    if not entry.is_move:
        check(None, earlier)
        return registry_history.close(client, model, entry, earlier, DONE)
    holder = model_versions.get_alias_holder(client, model, entry.alias)
    has_history = bool(registry_history.list_completed_moves(earlier, entry.alias))
    if not has_history and holder and not _is_older_than_history(client, holder, entry.alias):
        has_history = True  # the alias was set outside of tuneline
    before = registry_history.get_recorded_holder(earlier, entry.alias) if has_history else _get_version_number(holder)
    if entry.kind == "foreign":
        check(holder, earlier)
        recorded = entry.model_copy(update={"from_": before if has_history else None})
        return registry_history.close(client, model, recorded, earlier, DONE)
    if before != _get_version_number(holder):
        raise ExternalMoveError(
            f"{model}@{entry.alias} is at {_get_version_number(holder)}; the history records {before}"
        )
    check(holder, earlier)
    if not has_history and before:  # after a kill, the next process cannot read `before` from earlier entries
        tag = f"{model_versions.TAG_PREFIX}from"
        client.set_model_version_tag(registry_history.get_history_name(model), str(entry.number), tag, before)

    def check_pending() -> None:
        """If the move is slow, check that no other process has closed its entry."""
        if time.monotonic() - began <= OWNER_TIMEOUT_SECONDS / 4:
            return
        states = {each.number: each.state for each in registry_history.read(client, model)}
        if states.get(entry.number) != PENDING:
            raise RegistryError(
                f"moving {model}@{entry.alias} took more than {OWNER_TIMEOUT_SECONDS / 4:.0f} seconds, and another "
                "process closed the history entry",
                hint=f"Check the alias with `tuneline registry audit {model}`.",
            )

    check_pending()
    if entry.to is None:
        client.delete_registered_model_alias(model, entry.alias)
    else:
        client.set_registered_model_alias(model, entry.alias, entry.to)
    check_pending()
    return registry_history.close(client, model, entry.model_copy(update={"from_": before}), earlier, DONE)


def _is_older_than_history(client: MlflowClient, holder: ModelVersion, alias: str) -> bool:
    """Return whether an earlier version of tuneline, which had no history, set the alias."""
    model = model_versions.require_model(client, holder.name)
    own_tags = (f"{model_versions.TAG_PREFIX}{alias}.earlier", f"{model_versions.TAG_PREFIX}{alias}.by")
    return alias in REGISTRATION_ALIASES or own_tags[0] in model.tags or own_tags[1] in holder.tags


def _abandon(client: MlflowClient, model: str, entry: Entry, reason: str) -> None:
    """Close the entry of a failed move according to the alias; if that fails, the next process closes it."""
    with suppress(Exception):
        earlier = [each for each in registry_history.read(client, model) if each.number < entry.number]
        if all(each.state != PENDING for each in earlier):
            _close_abandoned_entry(client, model, entry, earlier, reason or INTERRUPTED_NOTE)
        else:  # earlier entries are pending: the alias has not moved, and the next process closes the entry
            name, tag = registry_history.get_history_name(model), f"{model_versions.TAG_PREFIX}owner"
            client.set_model_version_tag(name, str(entry.number), tag, ABANDONED_OWNER)


def close_abandoned(
    client: MlflowClient, model: str, *, before: float = math.inf, first_seen: dict[int, float] | None = None
) -> list[Entry]:
    """Close the entries of ended processes, oldest first, up to the first entry of a running process.

    Args:
        before: number of the first entry to ignore.
        first_seen: monotonic time in seconds, by entry number, at which a pending entry was first read. An entry of
            another machine is abandoned OWNER_TIMEOUT_SECONDS later.

    Returns:
        The updated entries.
    """
    entries = [entry for entry in registry_history.read(client, model) if entry.number < before]
    settled: list[Entry] = []
    known = first_seen if first_seen is not None else {}
    for entry in entries:
        if entry.state == PENDING:
            repeated = any(each.token == entry.token for each in settled)
            if not repeated and not _is_abandoned(entry, known.setdefault(entry.number, time.monotonic())):
                return [*settled, *entries[len(settled) :]]
            entry = _close_abandoned_entry(client, model, entry, settled, INTERRUPTED_NOTE)
        settled.append(entry)
    return settled


def _close_abandoned_entry(
    client: MlflowClient, model: str, entry: Entry, earlier: Sequence[Entry], reason: str
) -> Entry:
    """Close an abandoned entry. Reads the alias before the entry: no other move happens while the entry is pending."""
    holder = _get_version_number(model_versions.get_alias_holder(client, model, entry.alias)) if entry.is_move else None
    found = registry_history.read_entry(client, model, entry.number)
    if found.state != PENDING:
        return found
    if any(each.token == found.token for each in earlier):
        return registry_history.close(client, model, found, earlier, VOID, DUPLICATE_NOTE)
    if not has_moved(found, earlier, holder):
        return registry_history.close(client, model, found, earlier, VOID, reason)
    if signers.is_signing() and not history_signatures.is_intent_signed(model, found):
        # This process would sign an entry that anyone who can write to MLflow's database could have added.
        return registry_history.close(client, model, found, earlier, VOID, UNSIGNED_NOTE)
    before = found.from_ or registry_history.get_recorded_holder(earlier, found.alias)
    return registry_history.close(client, model, found.model_copy(update={"from_": before}), earlier, DONE)


def has_moved(entry: Entry, earlier: Sequence[Entry], holder: str | None) -> bool:
    """Return whether a pending move has moved its alias; `holder` is the version that has the alias now."""
    return (
        entry.is_move
        and entry.kind != "foreign"
        and holder == entry.to
        and holder != registry_history.get_recorded_holder(earlier, entry.alias)
    )


def _is_abandoned(entry: Entry, since: float) -> bool:
    """Return whether a pending entry is abandoned: its process has ended, or the entry has timed out."""
    host, _, process = entry.owner.rpartition("/")
    if entry.owner == ABANDONED_OWNER or time.monotonic() - since > OWNER_TIMEOUT_SECONDS:
        return True
    if host != liveness.identify_host():
        return False
    if process == liveness.identify_process():
        return entry.token not in _active_tokens
    return liveness.is_process_gone(process)


def _get_version_number(version: ModelVersion | None) -> str | None:
    return str(version.version) if version is not None else None
