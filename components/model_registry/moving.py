"""The steps of a move: write the intent down, wait for its turn, move the alias, close the entry. A kill between any two of them is mended.

MLflow moves an alias without looking what it was, so those who move go one after the other: the lowest pending entry of the history is
the one whose turn it is. An entry whose process is gone is closed by whoever comes next, as what the alias says: done where it moved,
else void.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from components.common import liveness
from components.common.errors import BusyError, RegistryError
from components.model_registry import history, patience, versions
from components.model_registry.history import DONE, MOVES, PENDING, VOID, Entry

SILENT_AFTER = 300.0  # seconds: a move on another machine that takes longer is taken for dead; a call is tried again for 60
SHORTEST_WAIT, LONGEST_WAIT = 0.05, 2.0  # seconds between two looks at whose turn it is
GONE = "gone"  # the owner of an entry whose process has given it up
INTERRUPTED = "interrupted before the alias moved"
REPEATED = "the same entry was written twice, since an answer of the server was lost"

_going: set[str] = set()  # tokens of the moves that this process is making now
_lock = threading.Lock()


class MovedByHandError(Exception):
    """The alias is not where the history says: it was moved elsewhere, which has to be written down first."""


Check = Callable[[Any | None, Sequence[Entry]], None]


def move(client: Any, model: str, intent: Entry, check: Check = lambda *_: None) -> Entry:
    """Make a move and write it down; what is no move (an approval, a policy) is only written. Returns the closed entry.

    `check` is given the version that holds the alias when the turn has come, and the history up to there; what it raises ends the move, and
    the entry says why. A move made by hand before is written down first, as one of the kind `foreign`.
    """
    for _ in range(10):
        try:
            return _attempt(client, model, intent, check)
        except MovedByHandError:
            record_foreign(client, model, intent.alias)
    raise BusyError(f"{model}@{intent.alias} is moved by hand all the time", hint="See who moves it: `tuneline registry audit`.")


def record_foreign(client: Any, model: str, alias: str, by: str = "") -> Entry | None:
    """Write down where an alias is that was moved elsewhere; None where the history says so already."""
    holder = versions.holder(client, model, alias)
    intent = Entry(
        kind="foreign", alias=alias, to=_number(holder), by=by, digest=_digest(holder), reason="moved outside tuneline; found here"
    )

    def still_so(now: Any | None, entries: Sequence[Entry]) -> None:
        if _number(now) != intent.to or history.last(entries, alias) == intent.to:
            raise RegistryError(f"{model}@{alias} was moved meanwhile", hint="Run the same command again.")

    with suppress(RegistryError):
        return _attempt(client, model, intent, still_so)
    return None


def _attempt(client: Any, model: str, intent: Entry, check: Check) -> Entry:
    with _in_hand() as token:
        entry = history.begin(client, model, intent.model_copy(update={"token": token}))
        try:
            earlier = _turn(client, model, entry)
            return _perform(client, model, entry, earlier, check)
        except BaseException as error:
            if not patience.passes(error):  # the server is away: whoever comes next closes the entry
                _give_up(client, model, entry, str(error))
            raise


@contextmanager
def _in_hand() -> Iterator[str]:
    """A token that is known to be in use as long as this process makes the move."""
    token = uuid.uuid4().hex
    with _lock:
        _going.add(token)
    try:
        yield token
    finally:
        with _lock:
            _going.discard(token)


def _perform(client: Any, model: str, entry: Entry, earlier: Sequence[Entry], check: Check) -> Entry:
    began = time.monotonic()
    if entry.kind not in MOVES:
        check(None, earlier)
        return history.close(client, model, entry, earlier, DONE)
    holder = versions.holder(client, model, entry.alias)
    begun = bool(history.moves(earlier, entry.alias))
    before = history.last(earlier, entry.alias) if begun else _number(holder)
    if entry.kind == "foreign":
        check(holder, earlier)
        return history.close(client, model, entry.model_copy(update={"from_": before if begun else None}), earlier, DONE)
    if before != _number(holder):
        raise MovedByHandError(f"{model}@{entry.alias} is at {_number(holder)}, the history says {before}")
    check(holder, earlier)
    if not begun and before:  # the history of this alias begins here: who comes after a kill could not know it from earlier entries
        client.set_model_version_tag(history.name_of(model), str(entry.number), f"{versions.PREFIX}from", before)
    _put(client, model, entry, began)
    return history.close(client, model, entry.model_copy(update={"from_": before}), earlier, DONE)


def _put(client: Any, model: str, entry: Entry, began: float) -> None:
    """Move the alias. Who was slow, and may have been taken for dead, looks before and after whether it is still its turn."""
    slow = SILENT_AFTER / 4
    if time.monotonic() - began > slow:
        _still_mine(client, model, entry)
    if entry.to is None:
        client.delete_registered_model_alias(model, entry.alias)
    else:
        client.set_registered_model_alias(model, entry.alias, entry.to)
    if time.monotonic() - began > slow:
        _still_mine(client, model, entry)


def _still_mine(client: Any, model: str, entry: Entry) -> None:
    found = {one.number: one.state for one in history.read(client, model)}
    if found.get(entry.number) != PENDING:
        raise RegistryError(
            f"moving {model}@{entry.alias} took so long that it was taken for dead",
            hint=f"Look where it is (`tuneline registry audit {model}`), then run the same command again.",
        )


def _give_up(client: Any, model: str, entry: Entry, why: str) -> None:
    """Close the entry of a move that did not come to its end, as what the alias says; if that fails, whoever comes next does it."""
    with suppress(Exception):
        earlier = [one for one in history.read(client, model) if one.number < entry.number]
        if all(one.state != PENDING for one in earlier):
            _settle(client, model, entry, earlier, why or INTERRUPTED)
        else:  # it is not its turn yet: nothing moved, and whose turn comes closes it
            client.set_model_version_tag(history.name_of(model), str(entry.number), f"{versions.PREFIX}owner", GONE)


def _turn(client: Any, model: str, entry: Entry) -> list[Entry]:
    """Wait until all earlier entries are closed; those whose process is gone are closed here. Returns them."""
    seen: dict[int, float] = {}
    while True:
        entries = history.read(client, model)
        earlier = [one for one in entries if one.number < entry.number]
        waiting = settle(client, model, earlier, seen)
        if not any(one.state == PENDING for one in waiting):
            return waiting
        time.sleep(min(SHORTEST_WAIT * 2 ** min(sum(one.state == PENDING for one in waiting), 6), LONGEST_WAIT))


def settle(client: Any, model: str, entries: Sequence[Entry], seen: dict[int, float] | None = None) -> list[Entry]:
    """Close what processes left that are gone, the oldest first and up to the first that is alive. Returns the entries as they are then.

    `seen` keeps since when a pending entry is known, for those of other machines, which cannot be looked at.
    """
    settled: list[Entry] = []
    known = seen if seen is not None else {}
    for place, entry in enumerate(entries):
        if entry.state == PENDING:
            repeated = any(one.token == entry.token for one in settled)
            if not repeated and not _is_gone(entry, known.setdefault(entry.number, time.monotonic())):
                return [*settled, *entries[place:]]
            entry = _settle(client, model, entry, settled, INTERRUPTED)
        settled.append(entry)
    return settled


def _settle(client: Any, model: str, entry: Entry, earlier: Sequence[Entry], why: str) -> Entry:
    """Close a pending entry that nobody works on. The holder is read before the entry: while that is pending nobody else has moved."""
    holder = _number(versions.holder(client, model, entry.alias)) if entry.kind in MOVES else None
    found = history.one(client, model, entry.number)
    if found.state != PENDING:
        return found
    if any(one.token == found.token for one in earlier):
        return history.close(client, model, found, earlier, VOID, REPEATED)
    if not took_place(found, earlier, holder):
        return history.close(client, model, found, earlier, VOID, why)
    before = found.from_ or history.last(earlier, found.alias)
    return history.close(client, model, found.model_copy(update={"from_": before}), earlier, DONE)


def took_place(entry: Entry, earlier: Sequence[Entry], holder: str | None) -> bool:
    """Whether a pending move has moved its alias already, which `holder` has now."""
    return entry.kind in MOVES and entry.kind != "foreign" and holder == entry.to and holder != history.last(earlier, entry.alias)


def _is_gone(entry: Entry, since: float) -> bool:
    """Whether nobody works on a pending entry: its process is gone, which can be seen on this machine, or it took too long."""
    where, _, process = entry.owner.rpartition("/")
    if entry.owner == GONE or time.monotonic() - since > SILENT_AFTER:
        return True
    if where != liveness.where():
        return False
    with _lock:
        if process == liveness.name():
            return entry.token not in _going
    return liveness.is_gone(process)


def _number(version: Any | None) -> str | None:
    return str(version.version) if version is not None else None


def _digest(version: Any | None) -> str:
    return str(version.tags.get(f"{versions.PREFIX}model_sha256", "")) if version is not None else ""
