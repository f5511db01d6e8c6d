"""Retention: a plan deletes an item if no root references it, it was unused for long enough and its kind is requested.

This module does not access the storage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

Kind = Literal["artifact", "base_model", "copy", "state", "run", "package", "data_object", "mlflow_run", "mlflow_model"]
DEFAULT_KINDS: tuple[Kind, ...] = (
    "artifact", "copy", "state", "run", "package", "data_object", "mlflow_run", "mlflow_model",
)  # fmt: skip
OPT_IN_KINDS: tuple[Kind, ...] = ("base_model",)  # imported by users, and possibly referenced elsewhere
DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class StoredItem:
    """An item that occupies storage.

    Attributes:
        kind: the kind of the item.
        name: the name by which other items reference it.
        path: a path or an address.
        bytes: the size in bytes.
        unused: seconds since the last use.
        references: the names of the items that this item references.
        keep_reason: the reason to keep the item regardless of age, or "".
        artifact_kind: the kind in the manifest of an artifact.
        revisions: the addresses of published datasets among the inputs of an artifact.
    """

    kind: Kind
    name: str
    path: str
    bytes: int
    unused: float
    references: tuple[str, ...] = ()
    keep_reason: str = ""
    artifact_kind: str = ""
    revisions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Root:
    """The name of an item to keep together with all items that it references, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class RetentionPolicy:
    """Limits of a deletion: only items of `kinds` that have been unused for at least `older_than` seconds."""

    older_than: float
    kinds: Collection[Kind] = DEFAULT_KINDS


@dataclass(frozen=True)
class Decision:
    """An item, and the reason to delete or keep it."""

    item: StoredItem
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tuneline gc` for an item to delete."""
        item = self.item
        return {
            "kind": item.kind,
            "path": item.path,
            "bytes": item.bytes,
            "unused_seconds": int(item.unused),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class RetentionPlan:
    """The items to delete, dependents before their dependencies, and the items to keep."""

    to_delete: list[Decision]
    kept: list[Decision] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of the items to delete."""
        return {decision.item.name for decision in self.to_delete}


def build_plan(items: Sequence[StoredItem], roots: Iterable[Root], policy: RetentionPolicy) -> RetentionPlan:
    """Decide for each item whether to delete or keep it. A kept item also keeps the items that it references."""
    recent_use = f"used within the last {format_age(policy.older_than)}"
    # In this order: the first reason that applies to an item is reported.
    own_roots = [
        *(Root(item.name, item.keep_reason) for item in items if item.keep_reason),
        *(Root(item.name, recent_use) for item in items if item.unused < policy.older_than),
        *(Root(item.name, "of a kind that was not selected") for item in items if item.kind not in policy.kinds),
    ]
    # Breadth-first search: an item has the reason of the root that reaches it in the fewest steps.
    references = {item.name: item.references for item in items}
    reasons: dict[str, str] = {}
    queue = deque([*roots, *own_roots])
    while queue:
        root = queue.popleft()
        if root.name not in reasons:
            reasons[root.name] = root.reason
            queue.extend(Root(name, root.reason) for name in references.get(root.name, ()))
    plan, unreferenced = RetentionPlan([]), []
    for item in items:
        if item.name in reasons:
            plan.kept.append(Decision(item, reasons[item.name]))
        else:
            unreferenced.append(item)
    for item in _order_dependents_first(unreferenced):
        plan.to_delete.append(Decision(item, f"unreferenced, unused for {format_age(item.unused)}"))
    return plan


def format_age(seconds: float) -> str:
    """Format a duration in hours or days."""
    if seconds < 2 * DAY_SECONDS:
        return f"{seconds / 3600:,.0f} h"
    return f"{seconds / DAY_SECONDS:,.0f} days"


def _order_dependents_first(items: Sequence[StoredItem]) -> list[StoredItem]:
    """Order dependents before their dependencies, so that an interrupted deletion leaves no dangling reference."""
    by_name = {item.name: item for item in items}
    dependents: dict[str, list[str]] = {name: [] for name in by_name}
    for item in items:
        for name in by_name.keys() & set(item.references):
            dependents[name].append(item.name)
    try:
        return [by_name[name] for name in TopologicalSorter(dependents).static_order()]
    except CycleError:  # only in manifests that were tampered with
        return list(items)
