"""What may be served under an alias, wherever that was moved: the version it names, promote's own checks on it, its package; and the tags
that say what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from components.common import hashing
from components.common.artifacts import Artifact
from components.common.errors import RegistryError
from components.model_registry import checks, history, patience, versions
from components.model_registry.history import DONE, MOVES, PENDING, Entry
from components.model_registry.promotion import CHAMPION
from components.model_registry.versions import PREFIX

UNKNOWN = "unknown"  # the caller serves nothing yet, so the history says which model was in service
LOOK_SECONDS = 5.0
SERVING = f"{PREFIX}serving"
IN_SERVICE, REFUSED, RETIRED = "in service", "refused", "retired"


@dataclass(frozen=True)
class Wanted:
    """The version an alias names: its number, the digests of its model and its package ("" where it has none), and of all that the
    registry says of it: once that changes, what was refused may be served."""

    name: str
    version: str
    model_sha256: str
    repository_sha256: str
    said_sha256: str = ""


def wanted(name: str, alias: str) -> Wanted | None:
    """The version that holds the alias now, or None. One look at the registry, which is not waited for long: there will be another.

    Raises what `versions.talking` does.
    """
    versions.require_store(name)
    with patience.at_most(LOOK_SECONDS), versions.talking() as client:
        found = versions.holder(client, name, alias)
        if found is None:
            versions.require_model(client, name)
            return None
    digests = {key: str(found.tags.get(PREFIX + key, "")) for key in ("model_sha256", "repository_sha256")}
    return Wanted(name, str(found.version), **digests, said_sha256=hashing.digest(_lasting(found.tags)))


def _lasting(tags: Mapping[str, str]) -> dict[str, str]:
    """A version's tags, less those that say what became of it in service."""
    return {key: value for key, value in tags.items() if key.startswith(PREFIX) and not key.startswith(SERVING)}


def objections(name: str, version: str, alias: str, in_service: str | None = UNKNOWN) -> list[str]:
    """Why a version that holds an alias may not be served, as clauses; none where it may. Every file of it is read.

    The checks are promote's: accepted, proven, and every file what was registered. That it was compared with the model in service
    (`in_service`, its digest) is asked where the alias was moved by hand to a version that never had it; `promote` looked at that itself,
    and a way back needs no comparison. What a promotion was forced against is let through.
    """
    with versions.talking() as client:
        found = versions.get(client, name, version)
        entries = list(_taken_place(history.read(client, name), alias, str(found.version)))
        present = _to_compare_with(client, found, alias, entries, in_service)
        said = [*checks.said(found, present), *checks.looked_at(found, present), *_changed(found, _move_to(entries, found, alias))]
    move = _move_to(entries, found, alias)
    forced = move.forced if move else ""
    return [clause for clause in dict.fromkeys(said) if clause not in forced]


def _taken_place(entries: Sequence[Entry], alias: str, holder: str) -> Iterator[Entry]:
    """The entries that are done, and the one of a move that has moved the alias already and is just being closed."""
    for entry in entries:
        moved = entry.kind in MOVES and entry.kind != "foreign" and (entry.alias, entry.to) == (alias, holder)
        if entry.state == DONE:
            yield entry
        elif entry.state == PENDING and moved:
            yield entry.model_copy(update={"state": DONE})


def _move_to(entries: Sequence[Entry], version: Any, alias: str) -> Entry | None:
    """The last move of the alias, if tuneline made it and it led to this version."""
    moves = history.moves(entries, alias)
    ours = bool(moves) and moves[-1].to == str(version.version) and moves[-1].kind != "foreign"
    return moves[-1] if ours else None


def _changed(version: Any, move: Entry | None) -> list[str]:
    """Whether what was promoted is what the version names now."""
    model = version.tags.get(f"{PREFIX}model_sha256", "")
    return [f"it was promoted with model {move.digest[:12]} and names {model[:12]} now"] if move and move.digest not in ("", model) else []


def _to_compare_with(client: Any, version: Any, alias: str, entries: Sequence[Entry], in_service: str | None) -> str | None:
    number = str(version.version)
    moves = history.moves(entries, alias)
    held = {entry.to for entry in moves if entry.kind != "foreign"} | {entry.from_ for entry in moves}
    if alias != CHAMPION or number in held:
        return checks.NOT_COMPARED
    if in_service != UNKNOWN:
        return in_service
    last = history.last(entries, alias)
    there = {str(v.version): v for v in versions.listed(client, version.name)}
    return there[last].tags.get(f"{PREFIX}model_sha256") if last in there else None


@contextmanager
def package(name: str, version: str) -> Iterator[Artifact]:
    """The version's Triton package where it lies, every digest checked. Raises RegistryError where it has none, ArtifactDamagedError."""
    with versions.talking() as client:
        found = versions.get(client, name, version)
    sha256 = found.tags.get(f"{PREFIX}repository_sha256")
    if not sha256:
        raise RegistryError(f"{name} version {version} has no Triton package", hint="Package the model and register it again.")
    with checks.found_at(found, "repository", sha256) as artifact:
        if artifact.sha256 != sha256:
            raise RegistryError(
                f"the package of {name} version {version} is {artifact.sha256[:12]}, and the version names {sha256[:12]}",
                hint="Register the version again with its own package.",
            )
        yield artifact


def mark(name: str, version: str, state: str, reason: str = "") -> None:
    """Say on the version what became of it: in service, refused with the reason, or retired. Raises what `versions.talking` does."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    with versions.talking() as client:
        found = versions.get(client, name, version)
        versions.tag(client, found, {SERVING: state, f"{SERVING}.at": at, **({f"{SERVING}.reason": reason[:4000]} if reason else {})})
        if not reason:
            versions.untag(client, found, [f"{SERVING}.reason"])
