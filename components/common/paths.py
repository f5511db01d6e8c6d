"""Paths of which only a beginning may exist."""

from __future__ import annotations

from pathlib import Path


def existing(path: Path) -> Path:
    """The path, or what is there of the way to it."""
    return next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))
