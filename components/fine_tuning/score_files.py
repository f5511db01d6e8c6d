"""Scores in the folder of a training's state, in one file per process, so that a resumed training has equal rewards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def get_own_file(folder: Path, prefix: str) -> Path:
    """Return the file to which this process appends."""
    return folder / f"{prefix}{os.environ.get('RANK', '0')}.jsonl"


def read_all(folder: Path, prefix: str) -> list[dict[str, Any]]:
    """Return the lines of all processes, of this one first: another may have got another score for an equal answer."""
    own = get_own_file(folder, prefix)
    others = sorted(path for path in folder.glob(f"{prefix}*.jsonl") if path != own)
    return [line for path in (own, *others) for line in read(path)]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without a line that an interruption truncated."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            lines.append(values)
    return lines


def append(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line in one write that starts with a new line, after which a truncated line is ignored."""
    with path.open("ab", buffering=0) as file:
        file.write(f"\n{json.dumps(values)}\n".encode())
