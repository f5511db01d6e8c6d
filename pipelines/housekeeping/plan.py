"""What may go: whatever no root reaches, nobody used for long, and is of a kind that was asked for. Nothing is read or removed here."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

Kind = Literal["artifact", "base_model", "copy", "state", "run", "package", "data_object", "mlflow_run", "mlflow_model"]
KINDS: tuple[Kind, ...] = ("artifact", "copy", "state", "run", "package", "data_object", "mlflow_run", "mlflow_model")
ON_REQUEST: tuple[Kind, ...] = ("base_model",)  # brought in by people, and named in configurations that nobody can look through
DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class Thing:
    """Something that takes space. `name` is what others need it by, `needs` the names of what it needs itself; `path` is a path or an
    address; `unused` the seconds since it was used. `stays` is why it is kept whatever its age, "" where nothing speaks for it.
    Of an artifact `what` is its kind as its manifest says it, and `revisions` the addresses of the published datasets it was made from."""

    kind: Kind
    name: str
    path: str
    bytes: int
    unused: float
    needs: tuple[str, ...] = ()
    stays: str = ""
    what: str = ""
    revisions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Root:
    """A name that is needed, with all that it needs, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Policy:
    """What may go: things of these kinds that were not used for so many seconds."""

    older_than: float
    kinds: Collection[Kind] = KINDS


@dataclass(frozen=True)
class Item:
    """A thing with what was decided: why it may go, or what keeps it."""

    thing: Thing
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The object that `tuneline gc --json` prints of what may go."""
        thing = self.thing
        return {"kind": thing.kind, "path": thing.path, "bytes": thing.bytes, "unused_seconds": int(thing.unused), "reason": self.reason}


@dataclass(frozen=True)
class Plan:
    """What may go, in the order in which it should (what needs something before what it needs), and what is kept."""

    going: list[Item]
    kept: list[Item] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of what may go."""
        return {item.thing.name for item in self.going}


def plan(things: Sequence[Thing], roots: Iterable[Root], policy: Policy) -> Plan:
    """Decide for every thing. What is kept for its own sake, its youth among the reasons, keeps what it needs as well."""
    needs = {thing.name: thing.needs for thing in things}
    why = _reached([*roots, *_standing(things, policy)], needs)
    kept = [Item(thing, why[thing.name]) for thing in things if thing.name in why]
    going = [Item(thing, f"nothing needs it, unused for {days(thing.unused)}") for thing in things if thing.name not in why]
    return Plan(_dependents_first(going), kept)


def days(seconds: float) -> str:
    """A duration as people read it."""
    if seconds < 2 * DAY:
        return f"{seconds / 3600:,.0f} h"
    return f"{seconds / DAY:,.0f} days"


def _standing(things: Sequence[Thing], policy: Policy) -> Iterable[Root]:
    """Roots of their own: what was told to stay, what is young, and what was not asked for. The first reason that applies is told."""
    yield from (Root(thing.name, thing.stays) for thing in things if thing.stays)
    yield from (Root(thing.name, f"used within {days(policy.older_than)}") for thing in things if thing.unused < policy.older_than)
    yield from (Root(thing.name, "of a kind that was not asked for") for thing in things if thing.kind not in policy.kinds)


def _reached(roots: Sequence[Root], needs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Everything that the roots reach, with the reason of the root that reaches it in the fewest steps."""
    why: dict[str, str] = {}
    waiting = deque(roots)
    while waiting:
        root = waiting.popleft()
        if root.name in why:
            continue
        why[root.name] = root.why
        waiting.extend(Root(name, root.why) for name in needs.get(root.name, ()))
    return why


def _dependents_first(items: Sequence[Item]) -> list[Item]:
    """Whatever needs something goes before it, so that whenever the removal ends, what is left still has what it needs."""
    by_name = {item.thing.name: item for item in items}
    users: dict[str, list[str]] = {name: [] for name in by_name}
    for item in items:
        for name in by_name.keys() & set(item.thing.needs):
            users[name].append(item.thing.name)
    try:
        return [by_name[name] for name in TopologicalSorter(users).static_order()]
    except CycleError:  # only manifests that were tampered with need one another in a circle
        return list(items)
