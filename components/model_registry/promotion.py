"""Moving an alias: only to what the evaluation accepted and Triton proved, with a note of who, when, from where, and a way back."""

from __future__ import annotations

import getpass
import json
import os
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.common.errors import RegistryError
from components.common.progress import Reporter
from components.model_registry import versions
from components.model_registry.lineage import PROVEN
from components.model_registry.versions import PREFIX

CHAMPION = "champion"
REMEMBERED = 50

ANYTHING = "anything"  # the caller does not say what the version was compared with


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
    reporter: Reporter,
) -> Promotion:
    """Give `alias` to a version whose evaluation was accepted and whose package was proven; `force` with a reason overrides that.

    `by` defaults to the user of this system. Raises RegistryError for an unknown model or version, naming those that exist, and when
    the version may not be promoted, saying why. `compared_with` is the digest of the model in service that the version was evaluated
    against (None: there was none); where another holds the alias by now, the version is not promoted.
    """
    with versions.talking() as client:
        found = versions.get(client, name, str(version))
        current = versions.holder(client, name, alias)
        if current and current.version == found.version:
            return Promotion(name=name, alias=alias, from_=str(current.version), to=str(found.version))
        _check_compared(current, compared_with, alias)
        objections = _objections(found)
        _check(found, objections, force=force, reason=reason)
        _remember(client, name, alias, _earlier(client, name, alias) + ([str(current.version)] if current else []))
        reporter.step(f"promoting {name} version {found.version}")
        moved = _move(client, found, alias, current, by=by, reason=reason, forced=objections)
    for objection in objections:
        reporter.note(f"promoted by force although {objection}")
    return moved


def _check_compared(current: Any | None, compared_with: str | None, alias: str) -> None:
    """Raise RegistryError when the alias was given to another model while this one was being made."""
    present = current.tags.get(f"{PREFIX}model_sha256") if current else None
    if compared_with != ANYTHING and present != compared_with:
        raise RegistryError(
            f"the {alias} changed to version {current.version if current else 'none'} while this model was being made",
            hint="Run again: the model is then compared with the one in service now.",
        )


def _objections(version: Any) -> list[str]:
    """Why a version may not be promoted, as clauses."""
    verdict, proof = version.tags.get(f"{PREFIX}verdict"), version.tags.get(f"{PREFIX}proof")
    found = [] if verdict == "accepted" else [f"its evaluation's verdict is {verdict or 'missing'}"]
    if f"{PREFIX}repository_sha256" not in version.tags:
        return [*found, "it has no Triton package"]
    return found if proof == PROVEN else [*found, "its Triton package is unproven"]


def _check(version: Any, objections: list[str], *, force: bool, reason: str) -> None:
    if force and not reason.strip():
        raise RegistryError("a forced promotion needs a reason", hint="Say why with --reason; it is kept with the version.")
    if objections and not force:
        raise RegistryError(
            f"version {version.version} of {version.name} cannot be promoted: {' and '.join(objections)}",
            hint="Promote a version that was accepted and proven, or use --force with --reason, which is recorded.",
        )


def _move(client: Any, to: Any, alias: str, current: Any | None, *, by: str, reason: str, forced: list[str]) -> Promotion:
    """Note the move on the version, then move the alias: a killed promotion leaves the old champion in service."""
    before = str(current.version) if current else ""
    noted = {"by": by or user(), "at": datetime.now(UTC).isoformat(timespec="seconds"), "from": before, "reason": reason}
    noted["forced"] = " and ".join(forced)
    keys = {f"{PREFIX}{alias}.{name}": value for name, value in noted.items()}
    versions.tag(client, to, {key: value for key, value in keys.items() if value})
    versions.untag(client, to, [key for key, value in keys.items() if not value])
    client.set_registered_model_alias(to.name, alias, str(to.version))
    return Promotion(name=to.name, alias=alias, from_=before or None, to=str(to.version))


def user() -> str:
    """The user of this system."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _earlier(client: Any, name: str, alias: str) -> list[str]:
    """The versions that held the alias before, latest last."""
    kept = versions.require_model(client, name).tags.get(f"{PREFIX}{alias}.earlier", "[]")
    return [str(version) for version in json.loads(kept)]


def _remember(client: Any, name: str, alias: str, earlier: list[str]) -> None:
    client.set_registered_model_tag(name, f"{PREFIX}{alias}.earlier", json.dumps(earlier[-REMEMBERED:]))


def rollback(name: str, *, alias: str = CHAMPION, by: str = "", reason: str = "", reporter: Reporter) -> Promotion:
    """Give `alias` back to the version that held it before the present one. Raises RegistryError when there is none."""
    with versions.talking() as client:
        versions.require_model(client, name)
        current = versions.holder(client, name, alias)
        if current is None:
            raise RegistryError(f"no version of {name} is its {alias}", hint=f"Promote one: tuneline promote {name} --version N")
        there = {str(v.version) for v in versions.listed(client, name)}
        # An interrupted promotion or rollback may have left the present version, or a deleted one, on the list.
        earlier = [v for v in _earlier(client, name, alias) if v in there]
        while earlier and earlier[-1] == str(current.version):
            earlier.pop()
        if not earlier:
            raise RegistryError(f"{name} had no {alias} before version {current.version}", hint="Promote another version instead.")
        to = versions.get(client, name, earlier[-1])
        reporter.step(f"rolling {name} back to version {to.version}")
        moved = _move(client, to, alias, current, by=by, reason=reason or f"rollback from version {current.version}", forced=[])
        _remember(client, name, alias, earlier[:-1])
    return moved
