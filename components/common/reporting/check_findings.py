"""Results of checks, one object per check, for display and for JSON output."""

from __future__ import annotations

from typing import TypedDict


class CheckResult(TypedDict):
    """A check and its outcome. A needed check that is not ok prevents a run; the hint describes the fix."""

    name: str
    ok: bool
    needed: bool
    found: str
    hint: str


def check_result(name: str, ok: bool, found: str, hint: str, *, needed: bool = True) -> CheckResult:
    """Build the result of a check; `hint` is used only if the check failed.

    Args:
        found: value or state that the check found.
        needed: whether a failure prevents a run.
    """
    return {"name": name, "ok": ok, "needed": needed, "found": found, "hint": "" if ok else hint}


def skipped_check(name: str, reason: str, hint: str) -> CheckResult:
    """Build the result of a check that could not run."""
    return check_result(name, False, f"not checked: {reason}", hint, needed=False)


def all_passed(results: list[CheckResult]) -> bool:
    """Return whether no needed check failed."""
    return all(result["ok"] or not result["needed"] for result in results)
