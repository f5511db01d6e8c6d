"""Scores of one model on one task, kept by the digests of both, so that a model that did not change is never measured twice."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from components.common import artifacts, hashing
from components.evaluation.task import Item, Scores, Task


def task_digest(task: Task, items: Sequence[Item], files: Sequence[str]) -> str:
    """What was asked: the task's settings, everything of its items, and the digests of its files, which may say how it is scored."""
    asked = [[i.id, i.prompt, i.reference, i.source, i.category, i.length, i.ask] for i in items]
    return hashing.digest({"task": task.settings.model_dump(mode="json"), "items": asked, "files": sorted(files)})


def keep(path: Path, scores: Scores) -> None:
    """Keep the scores at `path`. Scores that are not all finite are not: a broken model is looked at again, not remembered."""
    if not all(math.isfinite(v) for values in scores.values.values() for v in values):
        return
    body = {
        "values": {name: list(v) for name, v in scores.values.items()},
        "weights": {name: list(v) for name, v in scores.weights.items()},
        "answers": list(scores.answers),
        "figures": dict(scores.figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_atomically(path, json.dumps({"sha256": hashing.digest(body), "scores": body}))


def kept(path: Path) -> Scores | None:
    """The scores kept at `path`; None where there are none, or where they disagree with their digest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Scores(**found["scores"]) if hashing.digest(found["scores"]) == found["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
