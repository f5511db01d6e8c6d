"""Moving an alias: only to what the evaluation accepted and Triton proved, written to the history, and with a way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.common.errors import RegistryError
from components.common.people import user
from components.common.progress import Reporter
from components.model_registry import approval, checks, history, moving, versions
from components.model_registry.approval import Policy
from components.model_registry.history import Entry
from components.model_registry.versions import PREFIX

CHAMPION = "champion"
ANYTHING = "anything"  # the caller does not say what the version was compared with


class AlreadyThereError(Exception):
    """Another process moved the alias to this very version in the meantime."""


class Promotion(BaseModel):
    """An alias that moved, or stayed (`from` equals `to`)."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    alias: str
    from_: str | None = Field(None, alias="from")
    to: str


def promote(
    name: str,
    version: str | int,
    *,
    alias: str = CHAMPION,
    by: str = "",
    force: bool = False,
    reason: str = "",
    compared_with: str | None = ANYTHING,
    policy: Policy | None = None,
    reporter: Reporter,
) -> Promotion:
    """Give `alias` to a version that was accepted against the present champion, is whole and proven; `force` with a reason overrides that.

    `by` defaults to the user of this system. Raises RegistryError for an unknown model or version, naming those that exist, and when
    the version may not be promoted, saying why; ApprovalNeededError when the policy (the history's, else `policy`) asks for others. The
    caller's `compared_with` is the digest of the model in service that the version was evaluated against (None: there was none); where
    another holds the alias by now, the version is not promoted, and force does not help.
    """
    with versions.talking() as client:
        found = versions.get(client, name, str(version))
        entries = moving.settle(client, name, history.read(client, name))
        current = versions.holder(client, name, alias)
        if _same(current, found):
            return _stayed(found, alias)
        _check_compared(current, compared_with, alias)
        reporter.step(f"checking {name} version {found.version}")
        present = _present(current, alias)
        objections = list(dict.fromkeys([*checks.said(found, present), *checks.looked_at(found, present)]))
        _check(found, objections, force=force, reason=reason)
        intent = _intent("promote", alias, found, by=by, reason=reason, forced=objections)
        wanted = intent.model_copy(update={"from_": _number(current)})
        approved = approval.collect(client, name, entries, approval.in_force(entries, policy), wanted)
        reporter.step(f"promoting {name} version {found.version}")

        def permitted(then: Sequence[Entry]) -> None:
            approval.recheck(then, policy, wanted, approved)

        moved = _move(client, found, intent.model_copy(update={"by": ", ".join(approved)}), current, permitted, force=force)
    for objection in objections:
        reporter.note(f"promoted by force although {objection}")
    return moved


def _same(current: Any | None, found: Any) -> bool:
    return current is not None and str(current.version) == str(found.version)


def _number(version: Any | None) -> str | None:
    return str(version.version) if version is not None else None


def _stayed(found: Any, alias: str) -> Promotion:
    return Promotion(name=found.name, alias=alias, from_=str(found.version), to=str(found.version))


def _present(current: Any | None, alias: str) -> str | None:
    """The digest of the champion, which a version must have been compared with to take its place."""
    if alias != CHAMPION:
        return checks.NOT_COMPARED
    return current.tags.get(f"{PREFIX}model_sha256", f"of version {current.version}") if current else None


def _intent(kind: history.Kind, alias: str, to: Any, *, by: str, reason: str, forced: Sequence[str] = ()) -> Entry:
    digests = {name: to.tags.get(f"{PREFIX}{key}", "") for name, key in (("digest", "model_sha256"), ("evaluation", "evaluation_sha256"))}
    why = {"by": by or user(), "reason": reason, "forced": " and ".join(forced)}
    return Entry(kind=kind, alias=alias, to=str(to.version), **digests, **why)


def _check_compared(current: Any | None, compared_with: str | None, alias: str) -> None:
    """Raise RegistryError when the alias was given to another model while this one was being made."""
    present = current.tags.get(f"{PREFIX}model_sha256") if current else None
    if compared_with != ANYTHING and present != compared_with:
        raise RegistryError(
            f"the {alias} changed to version {current.version if current else 'none'} while this model was being made",
            hint="Run again: the model is then compared with the one in service now.",
        )


def _check(version: Any, objections: list[str], *, force: bool, reason: str) -> None:
    if force and not reason.strip():
        raise RegistryError("a forced promotion needs a reason", hint="Say why with --reason; it is kept in the history.")
    if objections and not force:
        against = any("compared it with" in one for one in objections)
        hint = "Evaluate it again, against the present champion" if against else "Promote a version that was accepted and proven"
        raise RegistryError(
            f"version {version.version} of {version.name} cannot be promoted: {' and '.join(objections)}",
            hint=f"{hint}, or use --force with --reason, which is recorded.",
        )


def _move(
    client: Any, to: Any, intent: Entry, planned: Any | None, permitted: Callable[[Sequence[Entry]], None], *, force: bool = False
) -> Promotion:
    """Move the alias as soon as it is this move's turn, if the alias and the version are still what they were when this was decided.

    `permitted` is given the history up to there, and raises where its policy and approvals do not let the move through.
    """

    def unchanged(holder: Any | None, entries: Sequence[Entry]) -> None:
        if _same(holder, to):
            raise AlreadyThereError(f"version {to.version} has the alias already")
        now = versions.get(client, to.name, str(to.version))
        differs = [key for key in ("model_sha256", "evaluation_sha256", "verdict") if _of(now, key) != _of(to, key)]
        if differs:
            raise RegistryError(
                f"the {differs[0]} of {to.name} version {to.version} changed meanwhile", hint="Look at it, and promote it again."
            )
        if _number(holder) != _number(planned) and not force:
            raise RegistryError(
                f"the {intent.alias} of {to.name} was given to version {_number(holder) or 'none'} meanwhile",
                hint="Evaluate against the present champion, then promote again.",
            )
        permitted(entries)
        _note(client, to, intent, holder)

    try:
        entry = moving.move(client, to.name, intent, unchanged)
    except AlreadyThereError:
        return _stayed(to, intent.alias)
    return Promotion(name=to.name, alias=intent.alias, from_=entry.from_, to=str(to.version))


def _of(version: Any, key: str) -> str | None:
    found: str | None = version.tags.get(PREFIX + key)
    return found


def _note(client: Any, to: Any, intent: Entry, holder: Any | None) -> None:
    """Say on the version itself who moves the alias to it, for whoever looks at it in MLflow; the history is what counts."""
    noted = {"by": intent.by, "at": datetime.now(UTC).isoformat(timespec="seconds"), "from": _number(holder) or "", "reason": intent.reason}
    keys = {f"{PREFIX}{intent.alias}.{name}": value for name, value in {**noted, "forced": intent.forced}.items()}
    versions.tag(client, to, {key: value for key, value in keys.items() if value})
    versions.untag(client, to, [key for key, value in keys.items() if not value])


def _before_history(client: Any, name: str, alias: str) -> list[str]:
    """The versions that held the alias before there was a history, latest last: earlier releases kept them in a tag of the model."""
    return [str(version) for version in json.loads(versions.require_model(client, name).tags.get(f"{PREFIX}{alias}.earlier", "[]"))]


def rollback(
    name: str, *, alias: str = CHAMPION, by: str = "", reason: str = "", policy: Policy | None = None, reporter: Reporter
) -> Promotion:
    """Give `alias` back to the version that held it before the present one, by the history. Raises RegistryError when there is none.

    One of the approvers is enough, also where the policy asks for two: the way back must be short.
    """
    with versions.talking() as client:
        versions.require_model(client, name)
        entries = moving.settle(client, name, history.read(client, name))
        current = versions.holder(client, name, alias)
        if current is None:
            raise RegistryError(f"no version of {name} is its {alias}", hint=f"Promote one: tuneline promote {name} --version N")

        def permitted(then: Sequence[Entry]) -> None:
            approval.check_named(approval.in_force(then, policy), by or user())

        permitted(entries)
        to = versions.get(client, name, _way_back(client, name, alias, entries, current))
        reporter.step(f"rolling {name} back to version {to.version}")
        intent = _intent("rollback", alias, to, by=by, reason=reason or f"rollback from version {current.version}")
        return _move(client, to, intent, current, permitted)


def _way_back(client: Any, name: str, alias: str, entries: Sequence[Entry], current: Any) -> str:
    """The version to go back to: the last one before the present that is still there."""
    there = {str(version.version) for version in versions.listed(client, name)}
    way = history.earlier_holders(entries, alias, _before_history(client, name, alias))
    if history.last(entries, alias) not in (None, str(current.version)):  # moved by hand since: the last one written is the one before
        way.append(str(history.last(entries, alias)))
    fit = [version for version in way if version in there and version != str(current.version)]
    if not fit:
        raise RegistryError(f"{name} had no {alias} before version {current.version}", hint="Promote another version instead.")
    return fit[-1]
