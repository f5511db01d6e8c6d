"""Digests of files, JSON values and artifacts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CANONICAL_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Return UTF-8 JSON with sorted keys and no spaces: equal values give equal bytes.

    Raises:
        ValueError: the value contains NaN or infinity.
    """
    return CANONICAL_ENCODER.encode(value).encode()


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a value's canonical JSON.

    Raises:
        ValueError: the value contains NaN or infinity.
    """
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 (hex) of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_sha256(files: Iterable[tuple[str, str]]) -> str:
    """Return an artifact's identity: the sha256 of the canonical JSON list of [path, sha256], sorted by path.

    Args:
        files: the relative path and the sha256 (hex) of each payload file.
    """
    return digest([[path, sha] for path, sha in sorted(files)])
