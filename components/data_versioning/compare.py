"""Two revisions of a dataset, compared row by row.

A row is known by its id. Ids are digests of the content unless the source gave its own, so a row can be `changed` only where it did:
same id, other content. A row that was in one split and is in another has `moved`; what was cleaned otherwise and got another id is one
removed and one added.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from components.common import hashing
from components.common.artifacts import Artifact
from components.data_versioning import rows

BESIDE = ("id", "source", "meta")  # what a row holds beside its content
Known = dict[str, tuple[str, bytes]]  # by id: the split, and a digest of the content


def compare(before: Artifact, after: Artifact, examples: int) -> dict[str, Any]:
    """What changed from `before` to `after`, with at most `examples` ids of each kind.

    {"rows": {"before", "after", "added", "removed", "changed", "moved", "kept"},
     "splits": {split: {"before", "after", "added", "removed", "changed", "moved_in", "moved_out", "kept", "examples": {kind: [id…]}}},
     "moved": [{"from", "to", "rows", "examples"}], "reasons": {reason: {"before", "after"}}, "quarantined": {"before", "after"}}

    Of a split, before = kept + changed + removed + moved_out, and after = kept + changed + added + moved_in. A row that moved and has
    other content too is counted as moved and, in "rows", as changed as well.
    """
    old, new = _known(before), _known(after)
    names = sorted({*rows.splits(before), *rows.splits(after)})
    moves = _moves(old, new)
    splits = {name: _split(name, old, new, examples) for name in names}
    added, removed = len(new.keys() - old.keys()), len(old.keys() - new.keys())
    changed = sum(1 for i in old.keys() & new.keys() if old[i][1] != new[i][1])
    moved, kept = sum(len(ids) for ids in moves.values()), sum(split["kept"] for split in splits.values())
    counted = {"added": added, "removed": removed, "changed": changed, "moved": moved, "kept": kept}
    return {
        "rows": {"before": len(old), "after": len(new), **counted},
        "splits": splits,
        "moved": [{"from": a, "to": b, "rows": len(ids), "examples": ids[:examples]} for (a, b), ids in sorted(moves.items())],
        "reasons": _reasons(before, after),
        "quarantined": _sides(_counts(before).get("quarantined", 0), _counts(after).get("quarantined", 0)),
    }


def _known(dataset: Artifact) -> Known:
    return {row["id"]: (name, _digest(row)) for name in rows.splits(dataset) for row in rows.rows(dataset, name)}


def _digest(row: Mapping[str, Any]) -> bytes:
    content = {name: value for name, value in row.items() if name not in BESIDE and value is not None}
    return hashlib.blake2b(hashing.canonical_json(content), digest_size=16).digest()


def _split(name: str, old: Known, new: Known, examples: int) -> dict[str, Any]:
    was, now = {i for i, (at, _) in old.items() if at == name}, {i for i, (at, _) in new.items() if at == name}
    stayed = was & now
    changed = {i for i in stayed if old[i][1] != new[i][1]}
    kinds = {
        "added": now - old.keys(),
        "removed": was - new.keys(),
        "changed": changed,
        "moved_in": (now - was) & old.keys(),
        "moved_out": (was - now) & new.keys(),
    }
    counts = {kind: len(ids) for kind, ids in kinds.items()}
    shown = {kind: _first(ids, examples) for kind, ids in kinds.items()}
    return {"before": len(was), "after": len(now), **counts, "kept": len(stayed - changed), "examples": shown}


def _first(ids: Iterable[str], examples: int) -> list[str]:
    return sorted(ids)[:examples]


def _moves(old: Known, new: Known) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for i in sorted(old.keys() & new.keys()):
        if old[i][0] != new[i][0]:
            found.setdefault((old[i][0], new[i][0]), []).append(i)
    return found


def _counts(dataset: Artifact) -> Mapping[str, Any]:
    """The counts of rows in the manifest; none in one that another program wrote."""
    found = dataset.manifest.summary.get("rows")
    return found if isinstance(found, Mapping) else {}


def _reasons(before: Artifact, after: Artifact) -> dict[str, dict[str, int]]:
    old, new = (Counter(_counts(dataset).get("rejected", {})) for dataset in (before, after))
    return {reason: _sides(old[reason], new[reason]) for reason in sorted({*old, *new})}


def _sides(before: int, after: int) -> dict[str, int]:
    return {"before": before, "after": after}
