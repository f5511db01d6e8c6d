"""Cache of one model's scores on one task, keyed by the digests of both, so that an unchanged model is scored once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder, hashing
from components.common.runtime import filesystem
from components.evaluation.task_interface import Item, Scores

if TYPE_CHECKING:
    from components.evaluation.tasks.base_task import AnyTask


def digest_task(task: AnyTask, items: Sequence[Item], files: Sequence[str]) -> str:
    """Return the digest of a task's settings, items and files.

    Args:
        task: The task.
        items: The task's items.
        files: SHA-256 digests of the files that the task reads, because a file may define the scoring.
    """
    contents = [[i.id, i.prompt, i.reference, i.source, i.category, i.length, i.request] for i in items]
    return hashing.digest({"task": task.settings.model_dump(mode="json"), "items": contents, "files": sorted(files)})


def save_scores(path: Path, scores: Scores) -> None:
    """Write scores to `path`, unless a score is not finite: a broken model is scored again in the next evaluation."""
    if not all(math.isfinite(v) for values in (*scores.values.values(), scores.figures.values()) for v in values):
        return
    body = json.loads(json.dumps(asdict(scores)))
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact_folder.write_atomically(path, json.dumps({"sha256": hashing.digest(body), "scores": body}))


def load_scores(path: Path) -> Scores | None:
    """Return the scores in `path`, or None if the file is missing, damaged or does not match its digest."""
    try:
        cached = json.loads(filesystem.read_text(path))
        return Scores(**cached["scores"]) if hashing.digest(cached["scores"]) == cached["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
