"""What a doctor finds: one object a question, for people and for scripts."""

from __future__ import annotations

from typing import Any

Finding = dict[str, Any]


def finding(name: str, ok: bool, found: str, hint: str, *, needed: bool = True) -> Finding:
    """{"name", "ok", "needed", "found", "hint"}: a needed one that is not ok stops a run; the hint says how to mend it."""
    return {"name": name, "ok": ok, "needed": needed, "found": found, "hint": "" if ok else hint}


def unchecked(name: str, why: str, hint: str) -> Finding:
    """A question that could not be answered from here."""
    return finding(name, False, f"not checked: {why}", hint, needed=False)


def all_well(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(one["ok"] or not one["needed"] for one in findings)
