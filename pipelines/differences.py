"""What differs between an artifact and the one that was made again: which files, and in them which tensors, keys or rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.common.artifacts import Artifact, Manifest
from pipelines.surroundings import flat

SHOWN = 100  # keys of a file that are listed
NOTHING = "nothing"  # in place of a value that one side lacks


def payload(recorded: Manifest, made: Artifact, folder: Path | None) -> list[dict[str, Any]]:
    """The payload files that differ: {"artifact", "path", "recorded", "reproduced", "detail", "tensors"?, "keys"?}, digests null where a
    side lacks the file.

    `folder` holds the recorded files; without it (None) it is only told which differ. "tensors" are [{"name", "max_difference",
    "recorded", "reproduced"}], see `tensors`; "keys" [{"key", "recorded", "reproduced"}].
    """
    was, now = (_digests(manifest) for manifest in (recorded, made.manifest))
    found = []
    for path in sorted(was.keys() | now.keys()):
        if was.get(path) != now.get(path):
            both = path in was and path in now
            detail = _inside(folder / path, made.path / path) if both and folder else {"detail": _outside(path in was, both)}
            names = {"artifact": recorded.kind, "path": path, "recorded": was.get(path), "reproduced": now.get(path)}
            found.append({**names, **detail})
    return found


def _digests(manifest: Manifest) -> dict[str, str]:
    return {file.path: file.sha256 for file in manifest.files if file.payload}


def _outside(recorded: bool, both: bool) -> str:
    """What can be said of a file without looking into it."""
    if both:
        return "other bytes; the recorded file is not there to compare with"
    return "was recorded and was not made again" if recorded else "was made and is not recorded"


def _inside(recorded: Path, made: Path) -> dict[str, Any]:
    looks: dict[str, Callable[[Path, Path], dict[str, Any]]] = {".safetensors": _weights, ".json": _values, ".parquet": _rows}
    look = looks.get(recorded.suffix)
    return look(recorded, made) if look else {"detail": "other bytes"}


def _weights(recorded: Path, made: Path) -> dict[str, Any]:
    found, count = tensors(recorded, made)
    if not found:
        return {"detail": f"all {count} tensors are equal; what is said of them differs", "tensors": []}
    told = f"{len(found)} of {count} tensors differ"
    measured = [one for one in found if one["max_difference"] is not None]
    if measured:
        most = max(measured, key=lambda one: float(one["max_difference"]))
        told += f", {most['name']} most, by up to {most['max_difference']:.3g}"
    return {"detail": told, "tensors": found}


def tensors(recorded: Path, made: Path) -> tuple[list[dict[str, Any]], int]:
    """The tensors of two safetensors files that differ in any bit, and how many there are in both together.

    "max_difference" is the largest absolute difference of two elements; null where a side lacks the tensor, has it in another shape or
    type, or holds an element that is no number. "recorded" and "reproduced" are type and shape, or "nothing".
    """
    from safetensors import safe_open

    with safe_open(recorded, framework="pt") as was, safe_open(made, framework="pt") as now:
        sides = (was, now)
        names = sorted({*was.keys(), *now.keys()})
        pairs = ((name, [side.get_tensor(name) if name in side.keys() else None for side in sides]) for name in names)  # noqa: SIM118
        found = [_tensor(name, *pair) for name, pair in pairs if not _same(*pair)]
    return found, len(names)


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are equal bit by bit: a NaN equals itself, and 0 is not -0."""
    import torch

    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(*(side.contiguous().reshape(-1).view(torch.uint8) for side in (one, other))))


def _tensor(name: str, one: Any, other: Any) -> dict[str, Any]:
    alike = one is not None and other is not None and one.dtype == other.dtype and one.shape == other.shape
    most = float((one.double() - other.double()).abs().max()) if alike else math.nan
    shapes = [f"{str(side.dtype).removeprefix('torch.')} {list(side.shape)}" if side is not None else NOTHING for side in (one, other)]
    return {"name": name, "max_difference": most if math.isfinite(most) else None, "recorded": shapes[0], "reproduced": shapes[1]}


def _values(recorded: Path, made: Path) -> dict[str, Any]:
    try:
        was, now = (flat(json.loads(path.read_text(encoding="utf-8"))) for path in (recorded, made))
    except ValueError:
        return {"detail": "other bytes, which are not JSON"}
    pairs = {name: (was.get(name, NOTHING), now.get(name, NOTHING)) for name in sorted(was.keys() | now.keys())}
    keys = [{"key": name, "recorded": one, "reproduced": other} for name, (one, other) in pairs.items() if one != other]
    shown = ", ".join(f"{one['key']} ({_brief(one['recorded'])} → {_brief(one['reproduced'])})" for one in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return {"detail": f"keys that differ: {shown}{more}" if keys else "equal values, written otherwise", "keys": keys[:SHOWN]}


def _brief(value: Any) -> str:
    text = value if value is NOTHING else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _rows(recorded: Path, made: Path) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    was, now = (parquet.read_metadata(path).num_rows for path in (recorded, made))
    return {"detail": f"{was:,} rows were recorded, {now:,} were made" if was != now else f"as many rows ({was:,}), and not the same"}
