"""Row-by-row comparison of two revisions of a dataset.

Rows are identified by id. An id is a digest of the content unless the source has ids. Only a row with an id from the
source can therefore be `changed`: same id, different content. A row in a different split has `moved`.
"""

# A row whose id changed with its content counts as removed and added.

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import Artifact
from components.data_versioning import dataset_rows

NON_CONTENT_COLUMNS = ("id", "source", "meta")
RowIndex = dict[str, tuple[str, bytes]]  # by id: the split, and a digest of the content


def compare_datasets(before: Artifact, after: Artifact, examples: int) -> dict[str, object]:
    """Return the changes from `before` to `after`, with up to `examples` ids of each kind.

    A split satisfies before = kept + changed + removed + moved_out and after = kept + changed + added + moved_in.
    A row that moved and has different content counts as moved and, in "rows", also as changed.

    Returns:
        {"rows": {"before", "after", "added", "removed", "changed", "moved", "kept"},
        "splits": {split: {"before", "after", "added", "removed", "changed", "moved_in", "moved_out", "kept",
        "examples": {kind: [id…]}}}, "moved": [{"from", "to", "rows", "examples"}],
        "reasons": {reason: {"before", "after"}}, "quarantined": {"before", "after"}}
    """
    old, new = _index_rows(before), _index_rows(after)
    names = sorted({*dataset_rows.list_splits(before), *dataset_rows.list_splits(after)})
    splits = {name: _compare_split(name, old, new) for name in names}
    moves: dict[tuple[str, str], list[str]] = defaultdict(list)
    changed = 0
    for row_id in sorted(old.keys() & new.keys()):
        (old_split, old_digest), (new_split, new_digest) = old[row_id], new[row_id]
        changed += old_digest != new_digest
        if old_split != new_split:
            moves[old_split, new_split].append(row_id)
    old_counts, new_counts = _read_row_counts(before), _read_row_counts(after)
    old_reasons, new_reasons = (Counter(counts.get("rejected", {})) for counts in (old_counts, new_counts))
    return {
        "rows": {
            "before": len(old),
            "after": len(new),
            "added": len(new.keys() - old.keys()),
            "removed": len(old.keys() - new.keys()),
            "changed": changed,
            "moved": sum(map(len, moves.values())),
            "kept": sum(len(kinds["kept"]) for kinds in splits.values()),
        },
        "splits": {
            name: {
                **{kind: len(ids) for kind, ids in kinds.items()},
                "examples": {
                    kind: sorted(ids)[:examples]
                    for kind, ids in kinds.items()
                    if kind not in ("before", "after", "kept")
                },
            }
            for name, kinds in splits.items()
        },
        "moved": [
            {"from": source, "to": target, "rows": len(ids), "examples": ids[:examples]}
            for (source, target), ids in sorted(moves.items())
        ],
        "reasons": {
            reason: {"before": old_reasons[reason], "after": new_reasons[reason]}
            for reason in sorted({*old_reasons, *new_reasons})
        },
        "quarantined": {"before": old_counts.get("quarantined", 0), "after": new_counts.get("quarantined", 0)},
    }


def _index_rows(dataset: Artifact) -> RowIndex:
    index = {}
    for split in dataset_rows.list_splits(dataset):
        for row in dataset_rows.read_rows(dataset, split):
            content = {
                name: value for name, value in row.items() if name not in NON_CONTENT_COLUMNS and value is not None
            }
            digest = hashlib.blake2b(hashing.canonical_json(content), digest_size=16).digest()
            index[row["id"]] = (split, digest)
    return index


def _compare_split(name: str, old: RowIndex, new: RowIndex) -> dict[str, set[str]]:
    """Return the row ids of a split: before, after, and by kind of change."""
    before = {row_id for row_id, (split, _) in old.items() if split == name}
    after = {row_id for row_id, (split, _) in new.items() if split == name}
    common = before & after
    changed = {row_id for row_id in common if old[row_id][1] != new[row_id][1]}
    return {
        "before": before,
        "after": after,
        "added": after - old.keys(),
        "removed": before - new.keys(),
        "changed": changed,
        "moved_in": (after - before) & old.keys(),
        "moved_out": (before - after) & new.keys(),
        "kept": common - changed,
    }


def _read_row_counts(dataset: Artifact) -> Mapping[str, Any]:
    """Return the row counts in the manifest; empty if another program wrote the manifest."""
    counts = dataset.manifest.summary.get("rows")
    return counts if isinstance(counts, Mapping) else {}
