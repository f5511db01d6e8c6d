"""Audit of a registered model: detects moves, deletions and edits that were made outside of tuneline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import Reporter
from components.model_registry import (
    alias_moves,
    checkpoints,
    history_signatures,
    model_files,
    model_versions,
    promotion_checks,
    promotion_policy,
    registry_history,
)
from components.model_registry.model_versions import MODEL_SHA256_TAG
from components.model_registry.promotion import CHAMPION
from components.model_registry.registry_history import DONE, PENDING, Entry

if TYPE_CHECKING:
    from mlflow import MlflowClient

EVIDENCE = "evidence"  # kind of a finding that only a move of the alias resolves
MAX_SNAPSHOT_READS = 20  # applies if an alias moves during every read


class Finding(BaseModel):
    """A discrepancy.

    Attributes:
        kind: moved, deleted, edited, gap, digest, signature or evidence.
        what: description. It identifies an acknowledged finding in the history, so its wording must not change.
        alias: the alias; "" if the finding concerns no alias.
        entry: number of the history entry; 0 if the finding concerns no entry.
    """

    kind: str
    what: str
    alias: str = ""
    entry: int = 0


class Audit(BaseModel):
    """The result of an audit.

    Attributes:
        name: name of the registered model.
        clean: whether no finding is open.
        entries: number of history entries.
        aliases: current version number by alias.
        findings: open findings.
        notes: interrupted moves and acknowledged findings, which are not errors.
    """

    name: str
    clean: bool
    entries: int
    aliases: dict[str, str]
    findings: list[Finding] = Field([])
    notes: list[str] = Field([])


def audit(name: str, *, repair: bool = False, by: str = "", reporter: Reporter) -> Audit:
    """Compare a model's aliases with its history, and verify the seals of the history.

    Args:
        repair: close interrupted moves, record moves made outside of tuneline, acknowledge the remaining findings in
            the history, except those about the champion's evidence, and write a missing checkpoint. The repair deletes
            nothing and moves no alias.
        by: name of the person who repairs the history.

    Raises:
        RegistryError: the model does not exist.
    """
    model_versions.require_store(name)
    with model_versions.registry_client() as client:
        model_versions.require_model(client, name)
        if repair:
            reporter.step(f"repairing the history of {name}")
            alias_moves.close_abandoned(client, name)
            for finding in _audit(client, name).findings:
                if finding.kind == "moved" and not finding.entry:
                    alias_moves.record_external_move(client, name, finding.alias, by)
            for finding in _audit(client, name).findings:
                if finding.kind == EVIDENCE:
                    continue
                entry = Entry(kind="acknowledged", alias=finding.alias, by=by, reason=finding.what)
                alias_moves.move_alias(client, name, entry)
            _restore_checkpoint(client, name)
        reporter.step(f"auditing {name}")
        return _audit(client, name)


def _restore_checkpoint(client: MlflowClient, name: str) -> None:
    """Write a lost checkpoint, or the first one of a history from before the checkpoints."""
    if checkpoints.is_writing() and checkpoints.read(name) is None:
        closed = [entry for entry in registry_history.read(client, name) if entry.state != PENDING]
        if closed:
            checkpoints.write(name, closed[-1].number, closed[-1].seal, closed[-1].signature)


def _audit(client: MlflowClient, name: str) -> Audit:
    entries, aliases = _read_snapshot(client, name)
    trust = history_signatures.load_trust()
    unverified = history_signatures.list_history_findings(client, name, entries, trust)
    findings = [
        *_find_tampering(entries),
        *(Finding(kind="signature", entry=number, what=what) for number, what in unverified),
        *_find_chain_breaks(entries),
        *_find_alias_mismatches(entries, aliases),
        *_find_digest_mismatches(client, name, entries, aliases),
    ]
    unchecked: list[str] = []
    if not any(finding.kind in ("digest", "deleted") for finding in findings):
        evidence_findings, unchecked = _check_champion(client, name, entries, aliases)
        findings += evidence_findings
    acknowledged = history_signatures.list_acknowledged(entries, name, trust)
    open_findings = [f for f in findings if f.kind == EVIDENCE or f.what not in acknowledged]
    notes = [f"acknowledged: {finding.what}" for finding in findings if finding not in open_findings] + unchecked
    if trust and not any(entry.signature for entry in entries):
        notes.append("the history is not signed; the first signed entry will also cover all entries before it")
    if trust and checkpoints.read(name) is None:
        notes.append(f"the history has no checkpoint in {checkpoints.describe_location(name)}")
    for entry in entries:
        if entry.state == PENDING:
            earlier = [each for each in entries if each.number < entry.number]
            has_moved = alias_moves.has_moved(entry, earlier, aliases.get(entry.alias))
            progress = "the alias has moved" if has_moved else "the alias has not moved yet"
            notes.append(
                f"entry {entry.number} ({registry_history.describe(entry)}) is in progress or was interrupted: "
                f"{progress}; the next move or --repair closes the entry"
            )
    return Audit(
        name=name, clean=not open_findings, entries=len(entries), aliases=aliases, findings=open_findings, notes=notes
    )


def _check_champion(
    client: MlflowClient, name: str, entries: Sequence[Entry], aliases: dict[str, str]
) -> tuple[list[Finding], list[str]]:
    """Check the champion's evidence as a promotion does, apart from the incumbent, which has changed since.

    Returns:
        The findings, and a note for each artifact that is not available on this machine.
    """
    number = aliases.get(CHAMPION)
    if number is None:
        return [], []
    version = model_versions.get_version(client, name, number)
    policy, _ = promotion_policy.find_policy(entries)  # an edited policy is a finding of its own
    requirements = promotion_checks.build_repeated_requirements(version, entries, policy)
    try:
        objections = promotion_checks.list_objections(version, requirements)
    except TunelineError as error:
        return [], [f"the evidence of version {number} was not checked: {error.message}"]
    open_objections = registry_history.list_open_objections(entries, CHAMPION, number, objections)
    unavailable = [clause for clause in open_objections if model_files.UNAVAILABLE in clause]
    findings = [
        Finding(kind=EVIDENCE, alias=CHAMPION, what=f"version {number} must not be {CHAMPION}: {clause}")
        for clause in open_objections
        if clause not in unavailable
    ]
    return findings, [f"the evidence of version {number} was not checked: {clause}" for clause in unavailable]


def _read_snapshot(client: MlflowClient, name: str) -> tuple[list[Entry], dict[str, str]]:
    """Read history and aliases consistently: repeat the read if an alias moves, up to MAX_SNAPSHOT_READS times."""
    entries = registry_history.read(client, name)
    for _ in range(MAX_SNAPSHOT_READS):
        aliases = model_versions.require_model(client, name).aliases
        before, entries = entries, registry_history.read(client, name)
        if entries == before:
            break
    return entries, {alias: str(version) for alias, version in sorted(aliases.items())}


def _find_tampering(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield deleted entries, then entries with a wrong seal. The seal of an entry after a gap cannot be checked."""
    for number in registry_history.list_gaps(entries):
        yield Finding(kind="gap", entry=number, what=registry_history.describe_gap(number))
    for entry in registry_history.list_edited(entries):
        what = registry_history.describe_edit(entry.number)
        yield Finding(kind="edited", entry=entry.number, alias=entry.alias, what=what)


def _find_chain_breaks(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield moves outside of tuneline, and moves that do not start at the target of the previous move."""
    holders: dict[str, str | None] = {}
    for entry in entries:
        if entry.state != DONE or not entry.is_move:
            continue
        start = entry.from_ or "none"
        if entry.kind == "foreign":
            what = (
                f"{entry.alias} was moved from {start} to {entry.to or 'none'} outside tuneline (entry {entry.number})"
            )
            yield Finding(kind="moved", entry=entry.number, alias=entry.alias, what=what)
        if entry.alias in holders and holders[entry.alias] != entry.from_:
            holder = holders[entry.alias] or "none"
            what = f"entry {entry.number} moves {entry.alias} from {start}, but {entry.alias} was at {holder}"
            yield Finding(kind="edited", entry=entry.number, alias=entry.alias, what=what)
        holders[entry.alias] = entry.to


def _find_alias_mismatches(entries: Sequence[Entry], aliases: dict[str, str]) -> Iterator[Finding]:
    """Yield aliases that are not at the recorded version. A pending move permits both its start and its target."""
    targets = {entry.alias: entry.to for entry in reversed(entries) if entry.state == PENDING and entry.is_move}
    for alias in sorted({*aliases, *(entry.alias for entry in entries if entry.is_move)}):
        now, recorded = aliases.get(alias), registry_history.get_recorded_holder(entries, alias)
        # Before the first move, the history does not record the alias.
        is_pending = alias in targets and (
            now == targets[alias] or not registry_history.list_completed_moves(entries, alias)
        )
        if now != recorded and not is_pending:
            at, expected = (f"version {number}" if number else "no version" for number in (now, recorded))
            what = f"{alias} is at {at}; the history records {expected}"
            yield Finding(kind="moved", alias=alias, what=what)


def _find_digest_mismatches(
    client: MlflowClient, name: str, entries: Sequence[Entry], aliases: dict[str, str]
) -> Iterator[Finding]:
    """Yield versions whose tags differ from the history, and versions with aliases whose files differ from the tags."""
    versions = {str(version.version): version for version in model_versions.list_versions(client, name)}
    moves = {
        entry.to: entry for entry in entries if entry.state == DONE and entry.is_move and entry.to and entry.digest
    }
    for number, entry in moves.items():
        if number not in versions:
            what = f"version {number}, which had the alias {entry.alias}, was deleted"
            yield Finding(kind="deleted", entry=entry.number, what=what)
            continue
        now = versions[number].tags.get(MODEL_SHA256_TAG, "")
        if now != entry.digest:
            what = (
                f"version {number} is tagged with model digest {now[:12] or 'unknown'}; the history records "
                f"{entry.digest[:12]}"
            )
            yield Finding(kind="digest", entry=entry.number, alias=entry.alias, what=what)
    for number in sorted({*aliases.values()} & {*versions}, key=int):
        sha256 = versions[number].tags.get(MODEL_SHA256_TAG)
        if sha256 is None:
            what = f"version {number} has an alias, but was not registered by tuneline"
            yield Finding(kind="digest", what=what)
            continue
        try:
            stored = model_files.read_logged_manifest(name, number).content_sha256
            what = f"version {number} is tagged with model digest {sha256[:12]}; MLflow stores model {stored[:12]}"
        except TunelineError as error:
            stored, what = "", f"version {number}: {error.message}"
        if stored != sha256:
            yield Finding(kind="digest", what=what)
