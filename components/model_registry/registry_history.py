"""History of alias moves in MLflow: version n of the registered model NAME.history is entry n of NAME's history.

The server's database assigns the numbers, without duplicates or gaps, and never reuses the number of a deleted entry.
"""

# An entry is appended before its move (`pending`) and closed after the move (`done`, or `void` if the alias did not
# move). Only the lowest pending entry may move, so moves are serialized. A closed entry has a seal: a digest of its
# content and the previous seal. An audit detects later edits in the UI by the seals.

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from components.common.artifacts import hashing
from components.common.runtime.errors import RegistryError
from components.common.workspace import liveness
from components.model_registry import checkpoints, entry_signatures, mlflow_retry, model_versions, signers
from components.model_registry.model_versions import HISTORY_SUFFIX, TAG_PREFIX

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.entities.model_registry import RegisteredModel as MlflowModel

OBJECTION_SEPARATOR = " and "  # between the objections in `forced`
SIGNED_TAG = f"{TAG_PREFIX}signed"  # tag of the history's registered model
PENDING, DONE, VOID = "pending", "done", "void"
SIGNATURE_FIELDS = {"seal", "signature", "intent"}  # of an entry; they cover its other fields
Kind = Literal[
    "register", "promote", "rollback", "foreign", "approval", "policy", "acknowledged", "trial", "evaluation"
]
MAX_TEXT_CHARACTERS = 4000  # MLflow limits a tag to 5000


class Entry(BaseModel):
    """An entry of the history.

    Attributes:
        number: assigned by the server; 0 before the assignment.
        from_, to: version numbers before and after the move; None if the alias is not set.
        by: name of the person who moves the alias.
        account: MLflow user of the process.
        at: time of the entry in ISO 8601 format.
        digest, evaluation: digests of the model and of its evaluation.
        forced: objections that a forced promotion overruled.
        state: pending, done or void.
        note: reason for the state `void`.
        token: unique ID of the intent.
        owner: host and process that wrote the entry.
        seal: digest; empty until the entry is closed.
        signature: signed envelope of the seal; "" if the process that closed the entry has no signing key.
        intent: signed envelope of the entry before its move; "" if the process that appended it has no signing key.
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
    signature: str = ""
    intent: str = ""

    @property
    def is_move(self) -> bool:
        """Whether the entry records a move of an alias."""
        return self.kind in ("register", "promote", "rollback", "foreign")

    def get_public_fields(self) -> dict[str, object]:
        """Return the fields for `tuneline registry history`."""
        return self.model_dump(by_alias=True, exclude={"token", "owner", *SIGNATURE_FIELDS})


def get_history_name(model: str) -> str:
    """Return the name of the registered model that stores the history of `model`."""
    return model + HISTORY_SUFFIX


def is_history_name(name: str) -> bool:
    """Return whether the name is that of a history."""
    return name.endswith(HISTORY_SUFFIX)


def read(client: MlflowClient, model: str) -> list[Entry]:
    """Return the entries of a model's history, oldest first."""
    return [_parse_entry(version) for version in model_versions.search_versions(client, get_history_name(model))]


def read_entry(client: MlflowClient, model: str, number: int) -> Entry:
    """Return the current content of an entry."""
    return _parse_entry(client.get_model_version(get_history_name(model), str(number)))


def _parse_entry(version: ModelVersion) -> Entry:
    tags = model_versions.get_tuneline_tags(version)
    kind = tags.pop("kind", "")
    fields = {key: value for key, value in tags.items() if key in TAG_FIELDS}
    if kind not in get_args(Kind):
        fields |= {"state": VOID, "note": "tuneline did not write this version"}
        kind = "foreign"
    return Entry(number=int(version.version), kind=kind, **fields)


TAG_FIELDS = {field.alias or name for name, field in Entry.model_fields.items()} - {"number", "kind"}


def append(client: MlflowClient, model: str, intent: Entry) -> Entry:
    """Append an intent and return it with its number. If the response is lost, a retry finds the entry by its token.

    Raises:
        RegistryError: the history is signed, and this process has no signer.
        ConfigurationError, EngineMissingError: the signer cannot be used.
    """
    name = get_history_name(model)
    purpose = f"The history of {model}: every version of this model is an entry of the history."
    home = model_versions.ensure_model(
        client, name, f"{purpose} Do not edit or delete versions: only tuneline writes the history."
    )
    _require_key(model, is_signed=_is_marked_signed(home))
    entry = intent.model_copy(
        update={
            "token": intent.token or uuid.uuid4().hex,
            "owner": f"{liveness.identify_host()}/{liveness.identify_process()}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "account": os.environ.get("MLFLOW_TRACKING_USERNAME", ""),
            "reason": intent.reason[:MAX_TEXT_CHARACTERS],
            "forced": intent.forced[:MAX_TEXT_CHARACTERS],
        }
    )
    entry = entry.model_copy(update={"intent": entry_signatures.sign_intent(model, compute_intent_sha256(entry))})
    fields = entry.model_dump(by_alias=True, exclude={"number"})
    tags = {TAG_PREFIX + key: str(value) for key, value in fields.items() if value not in ("", None)}

    def find_created() -> ModelVersion | None:
        return next(iter(model_versions.search_versions(client, name, (f"{TAG_PREFIX}token", entry.token))), None)

    source = f"tuneline-history:/{quote(model, safe='')}"
    created = mlflow_retry.retry(
        lambda: client.create_model_version(name, source, tags=tags, description=describe(entry), await_creation_for=0),
        find_created,
    )
    return entry.model_copy(update={"number": int(created.version)})


def close(
    client: MlflowClient, model: str, entry: Entry, earlier_entries: Sequence[Entry], state: str, note: str = ""
) -> Entry:
    """Close an entry, and return the closed entry. Idempotent, so a killed call can be repeated.

    Args:
        earlier_entries: all earlier entries, oldest first; they must be closed.
        state: DONE or VOID.
        note: reason for the state VOID.
    """
    closed = entry.model_copy(update={"state": state, "note": note[:MAX_TEXT_CHARACTERS]})
    seal = compute_seal(closed, earlier_entries[-1].seal if earlier_entries else "")
    is_signed = any(each.signature for each in earlier_entries)
    _require_key(model, is_signed=is_signed)
    signature = entry_signatures.sign_entry(model, entry.number, seal, compute_content_sha256(closed))
    if signature and not is_signed:
        client.set_registered_model_tag(get_history_name(model), SIGNED_TAG, "true")
    closed = closed.model_copy(update={"seal": seal, "signature": signature})
    fields = closed.model_dump(by_alias=True)
    # The state is set last: a pending entry can be closed again.
    for key in ("from", "note", "seal", "signature", "state"):
        if fields[key]:
            client.set_model_version_tag(get_history_name(model), str(entry.number), TAG_PREFIX + key, fields[key])
    if checkpoints.is_writing():
        # Another process may have closed the entry with another note; the checkpoint is for what the database has.
        stored = read_entry(client, model, entry.number)
        checkpoints.write(model, stored.number, stored.seal, stored.signature)
    return closed


def _is_marked_signed(home: MlflowModel | None) -> bool:
    return home is not None and SIGNED_TAG in home.tags


def check_key(client: MlflowClient, model: str, entries: Sequence[Entry]) -> None:
    """Raise RegistryError if this process could not append an entry, because the history is signed.

    Args:
        entries: the history, as read.
    """
    home = model_versions.find_model(client, get_history_name(model))
    _require_key(model, is_signed=_is_marked_signed(home) or any(entry.signature for entry in entries))


def _require_key(model: str, *, is_signed: bool) -> None:
    """Raise RegistryError if the history is signed and this process has no key: an audit would find the entry."""
    if is_signed and not signers.is_signing():
        raise RegistryError(
            f"the history of {model} is signed, and this process has no signing key",
            hint=signers.HINT,
        )


def compute_seal(entry: Entry, before: str) -> str:
    """Return the SHA-256 of an entry's content and the previous seal (`before`), in hexadecimal digits."""
    return hashing.digest({"before": before, **entry.model_dump(by_alias=True, exclude=SIGNATURE_FIELDS)})


def compute_content_sha256(entry: Entry) -> str:
    """Return the SHA-256 of an entry's content without its seal and signature, in hexadecimal digits."""
    return hashing.digest(entry.model_dump(by_alias=True, exclude=SIGNATURE_FIELDS))


def compute_intent_sha256(entry: Entry) -> str:
    """Return the SHA-256 of the fields that are known before the move, in hexadecimal digits."""
    later = {"number", "from_", "state", "note", "owner"}
    return hashing.digest(entry.model_dump(by_alias=True, exclude=SIGNATURE_FIELDS | later))


def join_objections(objections: Iterable[str]) -> str:
    """Return the text of the objections that a forced promotion overrides."""
    return OBJECTION_SEPARATOR.join(objections)


def list_open_objections(entries: Iterable[Entry], alias: str, version: str, objections: Iterable[str]) -> list[str]:
    """Return the objections that the last promotion of a version did not overrule.

    The number of the policy's entry does not count: another policy with the same requirement gives the same objection.
    """
    own = [move for move in list_completed_moves(entries, alias) if move.kind == "promote" and move.to == version]
    forced = own[-1].forced if own else ""
    return [objection for objection in objections if not is_overruled(objection, forced)]


def is_overruled(objection: str, forced: str) -> bool:
    """Return whether an objection is one of those that a forced promotion overruled (`Entry.forced`)."""
    wanted, overruled = (
        re.sub(r"policy entry \d+", "policy entry", join_objections(["", text, ""])) for text in (objection, forced)
    )
    return wanted in overruled


def list_gaps(entries: Iterable[Entry]) -> list[int]:
    """Return the numbers of deleted entries. Entries deleted at the end leave no gap."""
    numbers = {entry.number for entry in entries}
    return sorted({*range(1, max(numbers, default=0))} - numbers)


def describe_gap(number: int) -> str:
    """Return the finding of an audit for a deleted entry; an acknowledgement in the history has this text."""
    return f"entry {number} of the history was deleted"


def describe_edit(number: int) -> str:
    """Return the finding of an audit for an edited entry, as `describe_gap` does."""
    return f"entry {number} of the history was edited"


def list_edited(entries: Sequence[Entry]) -> list[Entry]:
    """Return the closed entries with a wrong seal. The seal of an entry after a gap cannot be checked.

    Entries are closed in their order, so a pending entry before a closed one was closed, too.
    """
    newest = max((entry.number for entry in entries if entry.state != PENDING and entry.seal), default=0)
    return [
        entry
        for before, entry in zip([None, *entries], entries, strict=False)
        if (entry.state != PENDING or entry.number < newest)
        and (before.number if before else 0) == entry.number - 1
        and entry.seal != compute_seal(entry, before.seal if before else "")
    ]


def list_completed_moves(entries: Iterable[Entry], alias: str) -> list[Entry]:
    """Return the completed moves of an alias, oldest first."""
    return [entry for entry in entries if entry.alias == alias and entry.state == DONE and entry.is_move]


def get_recorded_holder(entries: Iterable[Entry], alias: str) -> str | None:
    """Return the number of the version with an alias according to the history; None if the alias is not set."""
    moves = list_completed_moves(entries, alias)
    return moves[-1].to if moves else None


def list_rollback_candidates(entries: Iterable[Entry], alias: str, initial: Sequence[str] = ()) -> list[str]:
    """Return the version numbers that a rollback can restore, oldest first; a rollback restores the last version.

    Args:
        initial: versions that had the alias before the history began, oldest first.
    """
    versions = list(initial)
    for move in list_completed_moves(entries, alias):
        if move.kind == "rollback":
            while versions and versions.pop() != move.to:
                pass
        elif move.from_ is not None:
            versions.append(move.from_)
    return versions


def describe(entry: Entry) -> str:
    """Return the description of an entry for MLflow's UI."""
    move = f"{entry.kind}: {entry.alias or 'no alias'} → {entry.to or 'none'}"
    return f"{move}, by {entry.by or 'unknown'} at {entry.at}{': ' + entry.reason if entry.reason else ''}"
