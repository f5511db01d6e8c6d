"""Every move of an alias, written down in MLflow itself: version n of the registered model NAME.history is entry n of NAME's history.

The server's database gives the numbers, so no two entries have the same and none is left out; a deleted version's number is not
given again. An entry is written before its move (`pending`) and closed after it (`done`, or `void` when nothing moved). The lowest
pending entry is the one that may move, so that moves follow each other. A closed entry carries a seal over what it says and the seal
before it: what is changed afterwards in the UI is found.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, get_args
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from components.common import hashing, liveness
from components.model_registry import patience, versions
from components.model_registry.versions import HISTORY, PREFIX

PENDING, DONE, VOID = "pending", "done", "void"
Kind = Literal["register", "promote", "rollback", "foreign", "approval", "policy", "acknowledged"]
MOVES = ("register", "promote", "rollback", "foreign")  # the kinds that say where an alias is
LONGEST = 4000  # characters of a text: MLflow keeps 5000 of a tag


class Entry(BaseModel):
    """A line of the history. `number` is 0 before the server gave one; `seal` is empty until the entry is closed.

    `from_` and `to` are version numbers, None where the alias was or is nowhere; `by` is who said to be the mover and `account` the
    user whom the process signs in to MLflow as; `digest` and `evaluation` are those of the model and of what it was judged by;
    `forced` are the objections that were overruled; `token` and `owner` name the process, so that what it left is known for its own.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    number: int = 0
    kind: Kind
    alias: str = ""
    from_: str | None = Field(None, alias="from")
    to: str | None = None
    by: str = ""
    account: str = ""
    at: str = ""
    reason: str = ""
    forced: str = ""
    digest: str = ""
    evaluation: str = ""
    state: str = PENDING
    note: str = ""
    token: str = ""
    owner: str = ""
    seal: str = ""

    def told(self) -> dict[str, Any]:
        """What people and scripts are shown of it."""
        return self.model_dump(by_alias=True, exclude={"token", "owner", "seal"})


def name_of(model: str) -> str:
    """The registered model that holds the history of `model`."""
    return model + HISTORY


def is_history(name: str) -> bool:
    """Whether a registered model is another one's history."""
    return name.endswith(HISTORY)


def read(client: Any, model: str) -> list[Entry]:
    """The history of a model, oldest first; empty where nothing moved yet."""
    return [_entry(version) for version in versions.search(client, name_of(model))]


def one(client: Any, model: str, number: int) -> Entry:
    """An entry as it is now."""
    return _entry(client.get_model_version(name_of(model), str(number)))


def _entry(version: Any) -> Entry:
    said = {key.removeprefix(PREFIX): value for key, value in version.tags.items() if key.startswith(PREFIX)}
    kind = said.pop("kind", "")
    known = {key: value for key, value in said.items() if key in SAID}
    if kind not in get_args(Kind):
        known |= {"state": VOID, "note": "this version was not written by tuneline"}
        kind = "foreign"
    return Entry(number=int(version.version), kind=kind, **known)


SAID = {field.alias or name for name, field in Entry.model_fields.items()} - {"number", "kind"}


def begin(client: Any, model: str, intent: Entry) -> Entry:
    """Write down what is about to be done. Returns the entry with its number; asked again after a lost answer, it is found by its token."""
    name = name_of(model)
    _ensure(client, model)
    entry = intent.model_copy(
        update={
            "token": intent.token or uuid.uuid4().hex,
            "owner": f"{liveness.where()}/{liveness.name()}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "account": os.environ.get("MLFLOW_TRACKING_USERNAME", ""),
            "reason": intent.reason[:LONGEST],
            "forced": intent.forced[:LONGEST],
        }
    )
    made = patience.again(
        lambda: client.create_model_version(name, _source(model), tags=_tags(entry), description=sentence(entry), await_creation_for=0),
        lambda: _by_token(client, name, entry.token),
    )
    return entry.model_copy(update={"number": int(made.version)})


def _source(model: str) -> str:
    return f"tuneline-history:/{quote(model, safe='')}"


def _tags(entry: Entry) -> dict[str, str]:
    said = entry.model_dump(by_alias=True, exclude={"number"})
    return {PREFIX + key: str(value) for key, value in said.items() if value not in ("", None)}


def _by_token(client: Any, name: str, token: str) -> Any | None:
    found = versions.search(client, name, (f"{PREFIX}token", token))
    return found[0] if found else None


def _ensure(client: Any, model: str) -> None:
    versions.make_model(
        client,
        name_of(model),
        f"The history of {model}: every version of this model is a move of an alias. Written by tuneline; change and delete nothing here.",
    )


def close(client: Any, model: str, entry: Entry, earlier: Sequence[Entry], state: str, note: str = "") -> Entry:
    """Close an entry as done or void; all `earlier` ones are. Closing it again, after a kill, leads to the same."""
    closed = entry.model_copy(update={"state": state, "note": note[:LONGEST]})
    closed = closed.model_copy(update={"seal": seal(closed, earlier[-1].seal if earlier else "")})
    for key in ("from", "note", "seal", "state"):  # the state last: before it the entry is pending, and closed anew
        value = closed.model_dump(by_alias=True)[key]
        if value:
            client.set_model_version_tag(name_of(model), str(entry.number), PREFIX + key, str(value))
    return closed


def seal(entry: Entry, before: str) -> str:
    """The digest of what an entry says, and of the seal before it: hexadecimal SHA-256."""
    return hashing.digest({"before": before, **entry.model_dump(by_alias=True, exclude={"seal"})})


def moves(entries: Iterable[Entry], alias: str) -> list[Entry]:
    """The moves of an alias that took place, oldest first."""
    return [entry for entry in entries if entry.alias == alias and entry.state == DONE and entry.kind in MOVES]


def last(entries: Iterable[Entry], alias: str) -> str | None:
    """The version that holds an alias by the history; None where it says none."""
    found = moves(entries, alias)
    return found[-1].to if found else None


def earlier_holders(entries: Iterable[Entry], alias: str, base: Sequence[str] = ()) -> list[str]:
    """The versions to which a rollback may go back, the nearest last. `base` are those from before the history began."""
    way = list(base)
    for move in moves(entries, alias):
        if move.kind == "rollback":
            while way and way.pop() != move.to:
                pass
        elif move.from_ is not None:
            way.append(move.from_)
    return way


def sentence(entry: Entry) -> str:
    """An entry as people read it in MLflow's UI."""
    what = f"{entry.kind}: {entry.alias or 'no alias'} → {entry.to or 'none'}"
    return f"{what}, by {entry.by or 'unknown'} at {entry.at}{': ' + entry.reason if entry.reason else ''}"
