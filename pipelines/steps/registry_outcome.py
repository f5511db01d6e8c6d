"""Final verdict and aliases of a run, from the registration's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def determine_verdict(evaluated: str, registered: Mapping[str, Any]) -> str:
    """Return the evaluation's verdict, or "unchanged" if the version was already the champion at registration.

    Promotion follows registration, so such a version was the champion before this run.
    """
    return "unchanged" if "champion" in registered.get("aliases", []) else evaluated


def list_aliases(registered: Mapping[str, Any], moved: Mapping[str, Any] | None) -> list[str]:
    """Return the aliases that the version had at registration, and the alias that was moved to it."""
    return sorted({*registered.get("aliases", []), *([moved["alias"]] if moved else [])})
