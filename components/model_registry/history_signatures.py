"""Verification of a history: signatures, times and the checkpoint outside of the database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from components.common.runtime.errors import RegistryError
from components.common.workspace.artifact_store import Workdir
from components.model_registry import (
    artifact_signatures,
    checkpoints,
    entry_signatures,
    registry_history,
    signers,
    trust_root,
)
from components.model_registry.checkpoints import Checkpoint
from components.model_registry.policy_checks import CLOCK_TOLERANCE
from components.model_registry.registry_history import DONE, PENDING, Entry
from components.model_registry.trust_root import SignatureInvalidError, Trust

if TYPE_CHECKING:
    from mlflow import MlflowClient


def load_trust() -> Trust:
    """Return the configured trust, with the keys that its authorities vouch for."""
    trust = trust_root.load_configured_trust()
    if trust.authorities:
        trust = trust.add_certificates(artifact_signatures.list_certificates(Workdir.from_environment().store))
    return trust


def is_intent_signed(model: str, entry: Entry) -> bool:
    """Return whether this process's own signer or a trusted one signed the entry before its move."""
    intent_sha256 = registry_history.compute_intent_sha256(entry)
    signer = signers.load_signer()
    trusts = [load_trust(), *([signers.build_own_trust(signer)] if signer else [])]
    return any(entry_signatures.is_intent_signed(entry.intent, model, intent_sha256, trust) for trust in trusts)


def list_findings(entries: Sequence[Entry], model: str, trust: Trust) -> list[tuple[int, str]]:
    """Return the entries that a trusted key did not sign, or with impossible times: number, and finding as a clause.

    An entry before the first signed one needs no signature: the signature covers it.
    """
    findings = []
    first = next((entry.number for entry in entries if entry.signature), None)
    for entry in entries:
        if first is None or entry.number < first or entry.state == PENDING:
            continue
        try:
            if not entry.signature:
                raise SignatureInvalidError("it is not signed, unlike an earlier entry")
            content = registry_history.compute_content_sha256(entry)
            expected = {"model": model, "entry": entry.number, "seal": entry.seal, "content_sha256": content}
            entry_signatures.check_entry(entry.signature, expected, trust)
        except SignatureInvalidError as error:
            findings.append((entry.number, f"entry {entry.number} of the history does not verify: {error.message}"))
    return [*findings, *_list_time_findings(entries)]


def _list_time_findings(entries: Sequence[Entry]) -> list[tuple[int, str]]:
    """Return the entries that are dated before their predecessor by more than CLOCK_TOLERANCE."""
    findings, newest = [], None
    for entry in entries:
        try:
            time = datetime.fromisoformat(entry.at)
            is_earlier = newest is not None and time < newest - CLOCK_TOLERANCE
        except (ValueError, TypeError):  # an entry that tuneline did not write, or an edited one
            continue
        if is_earlier and newest is not None:
            what = f"entry {entry.number} of the history is dated {time:%Y-%m-%d %H:%M}, before an earlier entry"
            findings.append((entry.number, f"{what} of {newest:%Y-%m-%d %H:%M}"))
        newest = time if newest is None else max(newest, time)
    return findings


def check_checkpoint(entries: Sequence[Entry], checkpoint: Checkpoint, model: str, trust: Trust) -> str:
    """Return the finding, as a clause, if the history is behind its checkpoint or differs from it; else ""."""
    found = next((entry for entry in entries if entry.number == checkpoint.entries), None)
    first = next((entry.number for entry in entries if entry.signature), None)
    if trust and (checkpoint.signature or (first is not None and checkpoint.entries >= first)):
        try:
            if checkpoint.model != model:
                raise SignatureInvalidError(f"it is a checkpoint of {checkpoint.model}")
            expected = {"model": model, "entry": checkpoint.entries, "seal": checkpoint.head}
            entry_signatures.check_entry(checkpoint.signature, expected, trust)
        except SignatureInvalidError as error:
            return f"the checkpoint of the history does not verify: {error.message}"
    if found is None or found.state == PENDING:
        return f"the history lacks entry {checkpoint.entries}, which its checkpoint records: the history was truncated"
    if found.seal != checkpoint.head:
        return f"entry {checkpoint.entries} of the history differs from its checkpoint: the history was rewritten"
    return ""


def list_history_findings(
    client: MlflowClient, model: str, entries: Sequence[Entry], trust: Trust | None = None
) -> list[tuple[int, str]]:
    """Return the findings of `list_findings` and `check_checkpoint` that apply to this process's configuration.

    Without trusted keys and checkpoints, no finding is possible, and nothing is read.
    """
    trust = load_trust() if trust is None else trust
    findings = list_findings(entries, model, trust) if trust else []
    checkpoint = checkpoints.read(model) if checkpoints.is_reading() else None
    if checkpoint is not None and (what := check_checkpoint(entries, checkpoint, model, trust)):
        # The entries may have been read before the entry of the checkpoint was closed.
        what = check_checkpoint(registry_history.read(client, model), checkpoint, model, trust)
        findings += [(0, what)] if what else []
    return findings


def check_history(client: MlflowClient, model: str, entries: Sequence[Entry]) -> None:
    """Refuse a history that does not verify, apart from acknowledged findings.

    Raises:
        RegistryError: an entry does not verify, or the history is behind its checkpoint.
    """
    if found := list_open_findings(client, model, entries):
        raise RegistryError(
            " and ".join(found),
            hint=f"Check the history with `tuneline registry audit {model}`. Restore MLflow's database from a backup, or "
            "acknowledge the finding with --repair and a trusted key.",
        )


def list_open_findings(client: MlflowClient, model: str, entries: Sequence[Entry]) -> list[str]:
    """Return the findings, as clauses, that no audit has acknowledged.

    With trusted keys, deleted and edited entries count too: the signature of an entry covers those before it by its seal.
    """
    trust = load_trust()
    findings = [what for _, what in list_history_findings(client, model, entries, trust)]
    if trust:
        findings += [registry_history.describe_gap(number) for number in registry_history.list_gaps(entries)]
        findings += [registry_history.describe_edit(entry.number) for entry in registry_history.list_edited(entries)]
    acknowledged = list_acknowledged(entries, model, trust) if findings else set()
    return [what for what in findings if what not in acknowledged]


def list_acknowledged(entries: Sequence[Entry], model: str, trust: Trust) -> set[str]:
    """Return the findings that an audit acknowledged; with trusted keys, only in entries that verify.

    The first signed entry covers those before it, unless one of them was edited or deleted since.
    """
    own = [entry for entry in entries if (entry.kind, entry.state) == ("acknowledged", DONE)]
    first = next((entry.number for entry in entries if entry.signature), None)
    if trust and first is not None:
        unverified = {number for number, _ in list_findings(entries, model, trust)}
        covered = [entry for entry in entries if entry.number <= first]
        is_covered = not (
            first in unverified or registry_history.list_edited(covered) or registry_history.list_gaps(covered)
        )
        own = [one for one in own if (is_covered if one.number < first else one.number not in unverified)]
    return {entry.reason for entry in own}
