"""Whether the aliases are where the history says, and the history is whole: what was moved, deleted or edited by hand is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field

from components.common.errors import TunelineError
from components.common.progress import Reporter
from components.model_registry import files, history, moving, versions
from components.model_registry.history import DONE, MOVES, PENDING, Entry
from components.model_registry.versions import PREFIX

LOOKS = 20  # a model whose aliases move faster than they are read is looked at this often


class Finding(BaseModel):
    """What is not as it should be. `kind`: moved, deleted, edited, gap or digest; `entry` is 0 where no entry is meant."""

    kind: str
    what: str
    alias: str = ""
    entry: int = 0


class Audit(BaseModel):
    """What an audit came to. `notes` are worth knowing and nothing wrong: a move that was interrupted, findings that were acknowledged."""

    name: str
    clean: bool
    entries: int
    aliases: dict[str, str]
    findings: list[Finding] = Field([])
    notes: list[str] = Field([])


def audit(name: str, *, repair: bool = False, by: str = "", reporter: Reporter) -> Audit:
    """Compare the aliases of a model with its history, and the history with its seals.

    `repair` closes interrupted moves, writes down moves made by hand, and has what cannot be mended acknowledged by an entry of its own;
    nothing is removed and no alias moves. Raises RegistryError for an unknown model.
    """
    versions.require_store(name)
    with versions.talking() as client:
        versions.require_model(client, name)
        if repair:
            reporter.step(f"repairing the history of {name}")
            _repair(client, name, by)
        reporter.step(f"auditing {name}")
        return _look(client, name)


def _at_once(client: Any, name: str) -> tuple[list[Entry], dict[str, str]]:
    """History and aliases of one moment: they are read again while a move comes between, and as they are after the last of the LOOKS."""
    entries = history.read(client, name)
    for _ in range(LOOKS):
        aliases = {alias: str(version) for alias, version in sorted(versions.require_model(client, name).aliases.items())}
        before, entries = entries, history.read(client, name)
        if entries == before:
            break
    return entries, aliases


def _look(client: Any, name: str) -> Audit:
    entries, aliases = _at_once(client, name)
    found = list(_findings(client, name, entries, aliases))
    known = {entry.reason for entry in entries if entry.kind == "acknowledged" and entry.state == DONE}
    open_ = [finding for finding in found if finding.what not in known]
    notes = [f"acknowledged: {finding.what}" for finding in found if finding.what in known]
    notes += [_interrupted(entry, aliases, entries) for entry in entries if entry.state == PENDING]
    return Audit(name=name, clean=not open_, entries=len(entries), aliases=aliases, findings=open_, notes=notes)


def _interrupted(entry: Entry, aliases: dict[str, str], entries: Sequence[Entry]) -> str:
    earlier = [one for one in entries if one.number < entry.number]
    moved = moving.took_place(entry, earlier, aliases.get(entry.alias))
    where = "the alias moved already" if moved else "the alias did not move yet"
    return f"entry {entry.number} ({history.sentence(entry)}) is going on or was interrupted: {where}; the next move or --repair closes it"


def _findings(client: Any, name: str, entries: Sequence[Entry], aliases: dict[str, str]) -> Iterator[Finding]:
    yield from _gaps(entries)
    yield from _seals(entries)
    yield from _chain(entries)
    yield from _aliases(entries, aliases)
    yield from _digests(client, name, entries, aliases)


def _gaps(entries: Sequence[Entry]) -> Iterator[Finding]:
    numbers = {entry.number for entry in entries}
    for number in range(1, max(numbers, default=0)):
        if number not in numbers:
            yield Finding(kind="gap", entry=number, what=f"entry {number} of the history was deleted")


def _seals(entries: Sequence[Entry]) -> Iterator[Finding]:
    """An entry after a missing one cannot be checked: the gap is told instead."""
    for before, entry in zip([None, *entries], entries, strict=False):
        if entry.state == PENDING or (before.number if before else 0) != entry.number - 1:
            continue
        if entry.seal != history.seal(entry, before.seal if before else ""):
            yield Finding(kind="edited", entry=entry.number, alias=entry.alias, what=f"entry {entry.number} of the history was edited")


def _chain(entries: Sequence[Entry]) -> Iterator[Finding]:
    at: dict[str, str | None] = {}
    for entry in entries:
        if entry.state != DONE or entry.kind not in MOVES:
            continue
        if entry.kind == "foreign":
            what = f"{entry.alias} was moved from {entry.from_ or 'none'} to {entry.to or 'none'} outside tuneline (entry {entry.number})"
            yield Finding(kind="moved", entry=entry.number, alias=entry.alias, what=what)
        if entry.alias in at and at[entry.alias] != entry.from_:
            what = f"entry {entry.number} moves {entry.alias} from {entry.from_ or 'none'}, where it was not ({at[entry.alias] or 'none'})"
            yield Finding(kind="edited", entry=entry.number, alias=entry.alias, what=what)
        at[entry.alias] = entry.to


def _aliases(entries: Sequence[Entry], aliases: dict[str, str]) -> Iterator[Finding]:
    """A pending move accounts for its alias being where it was and where it goes."""
    going = {entry.alias: entry.to for entry in reversed(entries) if entry.state == PENDING and entry.kind in MOVES}
    for alias in sorted({*aliases, *(entry.alias for entry in entries if entry.kind in MOVES)}):
        now, written = aliases.get(alias), history.last(entries, alias)
        if now == written or (alias in going and now == going[alias]):
            continue
        if alias in going and not history.moves(entries, alias):  # its first move: nothing was written before it
            continue
        yield Finding(kind="moved", alias=alias, what=f"{alias} is at {_at(now)}, and by the history it is at {_at(written)}")


def _at(version: str | None) -> str:
    return f"version {version}" if version else "no version"


def _digests(client: Any, name: str, entries: Sequence[Entry], aliases: dict[str, str]) -> Iterator[Finding]:
    """The tags of versions against what the history says of them, and of those in use against the files that MLflow keeps."""
    there = {str(version.version): version for version in versions.listed(client, name)}
    moved = {entry.to: entry for entry in entries if entry.state == DONE and entry.kind in MOVES and entry.to and entry.digest}
    for number, entry in moved.items():
        now = there[number].tags.get(f"{PREFIX}model_sha256", "") if number in there else None
        if now is None:
            yield Finding(kind="deleted", entry=entry.number, what=f"version {number}, which had the alias {entry.alias}, was deleted")
        elif now != entry.digest:
            what = f"version {number} says it is model {now[:12] or 'unknown'}, and it was {entry.digest[:12]} when it became {entry.alias}"
            yield Finding(kind="digest", entry=entry.number, alias=entry.alias, what=what)
    for number in sorted({*aliases.values()} & {*there}, key=int):
        yield from _files(name, number, there[number].tags.get(f"{PREFIX}model_sha256"))


def _files(name: str, number: str, sha256: str | None) -> Iterator[Finding]:
    if sha256 is None:
        yield Finding(kind="digest", what=f"version {number} has an alias and was not registered by tuneline")
        return
    try:
        kept = files.kept(name, number).content_sha256
    except TunelineError as error:
        yield Finding(kind="digest", what=f"version {number}: {error.message}")
        return
    if kept != sha256:
        yield Finding(kind="digest", what=f"version {number} says it is model {sha256[:12]}, and MLflow keeps the files of {kept[:12]}")


def _repair(client: Any, name: str, by: str) -> None:
    moving.settle(client, name, history.read(client, name))
    for finding in _look(client, name).findings:
        if finding.kind == "moved" and not finding.entry:
            moving.record_foreign(client, name, finding.alias, by)
    for finding in _look(client, name).findings:
        moving.move(client, name, Entry(kind="acknowledged", alias=finding.alias, by=by, reason=finding.what))
