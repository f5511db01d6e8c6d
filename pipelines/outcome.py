"""What came of a run in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def verdict(evaluated: str, registered: Mapping[str, Any]) -> str:
    """The evaluation's verdict, or "unchanged": a version that was the champion when it was registered was in service before this run,
    because the promotion comes after."""
    return "unchanged" if "champion" in registered.get("aliases", []) else evaluated


def aliases(registered: Mapping[str, Any], moved: Mapping[str, Any] | None) -> list[str]:
    """The aliases of the version: those it was registered with and the one that was moved to it, where one was."""
    return sorted({*registered.get("aliases", []), *([moved["alias"]] if moved else [])})
