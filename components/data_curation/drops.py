"""Why a row is dropped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drop:
    """Why a row is not kept: a reason to count by, and a detail for people."""

    reason: str
    detail: str
