"""Differences between a recorded artifact and its reproduction: files, and the tensors, keys or rows in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.runtime.counts import format_count
from pipelines.provenance.environment_diff import flatten

if TYPE_CHECKING:
    import torch

MAX_LISTED_KEYS = 100  # per file
ABSENT = "nothing"  # placeholder for a value that one side lacks


def compare_payloads(recorded: Manifest, reproduced: Artifact, folder: Path | None) -> list[dict[str, Any]]:
    """Return one object per differing payload file.

    Args:
        recorded: the manifest of the recorded artifact.
        reproduced: the reproduction.
        folder: the folder of the recorded files; None: file contents are not compared.

    Returns:
        [{"artifact", "path", "recorded", "reproduced", "detail", "tensors"?, "keys"?}]. "recorded" and "reproduced" are
        digests, null if a side lacks the file. "keys" is [{"key", "recorded", "reproduced"}]. "tensors" is [{"name",
        "max_difference", "recorded", "reproduced"}] with the type and shape of both sides, or "nothing".
        "max_difference" is the largest absolute elementwise difference. It is null if a side lacks the tensor, or
        has another shape or type, or a non-finite element.
    """
    before, after = (
        {file.path: file.sha256 for file in manifest.files if file.payload}
        for manifest in (recorded, reproduced.manifest)
    )
    differences = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) == after.get(path):
            continue
        details: dict[str, Any]
        if path not in after:
            details = {"detail": "recorded, but not reproduced"}
        elif path not in before:
            details = {"detail": "reproduced, but not recorded"}
        elif not folder:
            details = {"detail": "different bytes; the recorded file is not available for comparison"}
        else:
            details = _compare_files(folder / path, reproduced.path / path)
        digests = {"recorded": before.get(path), "reproduced": after.get(path)}
        differences.append({"artifact": recorded.kind, "path": path, **digests, **details})
    return differences


def _compare_files(recorded: Path, reproduced: Path) -> dict[str, Any]:
    """Compare the contents of a file by its type."""
    if recorded.suffix == ".safetensors":
        return _compare_tensors(recorded, reproduced)
    if recorded.suffix == ".parquet":
        import pyarrow.parquet as parquet

        rows, reproduced_rows = (parquet.read_metadata(path).num_rows for path in (recorded, reproduced))
        equal = f"equal number of rows ({rows:,}) with different content"
        return {
            "detail": equal
            if rows == reproduced_rows
            else f"{format_count(rows, 'row')} recorded, {reproduced_rows:,} reproduced"
        }
    if recorded.suffix != ".json":
        return {"detail": "different bytes"}
    try:
        before, after = (flatten(json.loads(path.read_text(encoding="utf-8"))) for path in (recorded, reproduced))
    except ValueError:
        return {"detail": "different bytes, invalid JSON"}
    pairs = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in sorted(before.keys() | after.keys()))
    keys = [{"key": key, "recorded": one, "reproduced": other} for key, one, other in pairs if one != other]
    listed = ", ".join(
        f"{one['key']} ({_shorten(one['recorded'])} → {_shorten(one['reproduced'])})" for one in keys[:3]
    )
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    detail = f"keys that differ: {listed}{more}" if keys else "equal values in a different format"
    return {"detail": detail, "keys": keys[:MAX_LISTED_KEYS]}


def _compare_tensors(recorded: Path, reproduced: Path) -> dict[str, Any]:
    """Return {"detail", "tensors"} with the tensors of two safetensors files that differ in any bit."""
    import torch
    from safetensors import safe_open

    differing: list[dict[str, Any]] = []
    with safe_open(recorded, framework="pt") as before, safe_open(reproduced, framework="pt") as after:
        names = sorted({*before.keys(), *after.keys()})
        for name in names:
            one, other = (side.get_tensor(name) if name in side.keys() else None for side in (before, after))  # noqa: SIM118
            difference = math.nan
            if one is not None and other is not None and one.dtype == other.dtype and one.shape == other.shape:
                # Bytes are compared: a NaN equals itself, and 0 differs from -0.
                if torch.equal(*(side.contiguous().reshape(-1).view(torch.uint8) for side in (one, other))):
                    continue
                difference = float((one.double() - other.double()).abs().max())
            differing.append(
                {
                    "name": name,
                    "max_difference": difference if math.isfinite(difference) else None,
                    "recorded": _describe_type(one),
                    "reproduced": _describe_type(other),
                }
            )
    if not differing:
        return {"detail": f"all {len(names)} tensors are equal; the metadata differs", "tensors": []}
    detail = f"{len(differing)} of {len(names)} tensors differ"
    if measured := [tensor for tensor in differing if tensor["max_difference"] is not None]:
        worst = max(measured, key=lambda tensor: float(tensor["max_difference"]))
        detail += f"; largest difference: {worst['max_difference']:.3g} in {worst['name']}"
    return {"detail": detail, "tensors": differing}


def _describe_type(tensor: torch.Tensor | None) -> str:
    return ABSENT if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _shorten(value: object) -> str:
    text = ABSENT if value is ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"
