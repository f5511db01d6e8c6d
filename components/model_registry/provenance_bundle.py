"""Provenance of a model version as a bundle: signatures, attestations, manifests, history and checkpoint, no weights.

`collect` reads a bundle from the registry and the store, `write` and `read` move it to another machine, and `verify`
checks it with public keys alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError
from components.common.workspace.artifact_store import Workdir
from components.model_registry import (
    artifact_signatures,
    checkpoints,
    evidence,
    history_signatures,
    model_versions,
    registry_history,
    signature_checks,
)
from components.model_registry.artifact_signatures import SignatureRecord, SignerDescription
from components.model_registry.checkpoints import Checkpoint
from components.model_registry.model_versions import TAG_PREFIX
from components.model_registry.registry_history import Entry
from components.model_registry.signature_checks import LineageCheck
from components.model_registry.trust_root import SignatureInvalidError, Trust

SCHEMA = "tuneline/provenance_bundle/v1"
INDEX_FILENAME, HISTORY_FILENAME, CHECKPOINT_FILENAME = "bundle.json", "history.json", "checkpoint.json"
RECORDS_FOLDER = "records"
MAX_BUNDLE_BYTES = 64 * 2**20  # a bundle of a small lineage has about 100 kB
KINDS = ("model", "evaluation", "repository")
Content = TypeVar("Content")


class Index(BaseModel):
    """bundle.json: which version the bundle is about. Nothing in it is trusted.

    Attributes:
        alias: the alias whose promotion is verified; None for a version by number.
        artifacts: content digest by kind.
        certificates: certificates of the signing keys in PEM format.
    """

    schema_: str = Field(SCHEMA, alias="schema")
    name: str
    version: str
    alias: str | None
    artifacts: dict[str, str]
    certificates: list[str] = []


class Bundle(BaseModel):
    """The provenance of a version.

    Attributes:
        records: signature records by content digest.
        checkpoint: the checkpoint of the history; None if it does not exist.
    """

    index: Index
    records: dict[str, list[SignatureRecord]]
    history: list[Entry]
    checkpoint: Checkpoint | None


class VerifiedArtifact(BaseModel):
    """An artifact whose signature and attestation verify.

    Attributes:
        key_id: ID of the key or of the identity.
        hashed: whether all its files were hashed and compared with the signature.
    """

    kind: str
    sha256: str
    key_id: str
    signer: SignerDescription
    hashed: bool


class Leaf(BaseModel):
    """An input that no step of tuneline produced, known by its digest."""

    kind: str
    sha256: str
    uri: str


class ForcedPromotion(BaseModel):
    """A promotion of the version to the bundle's alias that was forced, from its entry of the history.

    Attributes:
        overrules: whether it overrules the evaluation's verdict: the entry has a valid signature of its own, unlike one
            before the first signed entry, and is about this model with this evaluation.
    """

    entry: int
    by: str
    reason: str
    objections: str
    overrules: bool


class Verification(BaseModel):
    """The result of `verify`.

    Attributes:
        objections: clauses; empty if everything verifies.
        forced: the forced promotion of the version; None if its promotion was not forced.
        artifacts, leaves: the verified artifacts, and the inputs without attestation.
        entries: number of history entries.
        checkpoint: number of the entry of the checkpoint; None without checkpoint.
        notes: what a reader must know although it verifies.
    """

    name: str
    version: str
    alias: str | None
    verified: bool
    forced: ForcedPromotion | None
    objections: list[str]
    artifacts: list[VerifiedArtifact]
    leaves: list[Leaf]
    entries: int
    checkpoint: int | None
    notes: list[str]


def collect(name: str, which: str) -> Bundle:
    """Return the bundle of a version from the registry, the artifact store and the checkpoint.

    Args:
        which: alias or number of the version.

    Raises:
        RegistryError: the model, version or alias does not exist.
    """
    store = Workdir.from_environment().store
    model_versions.require_store(name)
    with model_versions.registry_client() as client:
        checkpoint = checkpoints.read(name)  # before the history, which may grow
        find = model_versions.get_version if which.isdecimal() else model_versions.get_version_by_alias
        version = find(client, name, which)
        history = registry_history.read(client, name)
    digests = {kind: version.tags.get(f"{TAG_PREFIX}{kind}_sha256", "") for kind in KINDS}
    artifacts = {kind: sha256 for kind, sha256 in digests.items() if sha256}
    records: dict[str, list[SignatureRecord]] = {}
    pending = list(artifacts.values())
    while pending:
        sha256 = pending.pop()
        if sha256 in records:
            continue
        if found := artifact_signatures.load_records(store, sha256):
            records[sha256] = found
            pending += [source for record in found for source in _list_inputs(record)]
    index = Index(
        name=name,
        version=str(version.version),
        alias=None if which.isdecimal() else which,
        artifacts=artifacts,
        certificates=artifact_signatures.list_certificates(store),
    )
    return Bundle(index=index, records=records, history=history, checkpoint=checkpoint)


def _list_inputs(record: SignatureRecord) -> list[str]:
    try:
        return [source.content_sha256 for source in record.parse_manifest().inputs]
    except SignatureInvalidError:  # `verify` reports it
        return []


def write(bundle: Bundle, folder: Path) -> None:
    """Write a bundle into a new or empty folder.

    Raises:
        OutputOccupiedError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputOccupiedError(f"{folder} is not empty", hint="Choose an empty or new folder with --export.")
    (folder / RECORDS_FOLDER).mkdir(parents=True, exist_ok=True)
    for sha256, records in bundle.records.items():
        for number, record in enumerate(records):
            text = record.model_dump_json(exclude_defaults=True, indent=1) + "\n"
            (folder / RECORDS_FOLDER / f"{sha256}.{number}.json").write_text(text, encoding="utf-8")
    entries = [entry.model_dump(by_alias=True) for entry in bundle.history]
    (folder / HISTORY_FILENAME).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    if bundle.checkpoint:
        text = bundle.checkpoint.model_dump_json(indent=1) + "\n"
        (folder / CHECKPOINT_FILENAME).write_text(text, encoding="utf-8")
    text = bundle.index.model_dump_json(by_alias=True, indent=1) + "\n"
    artifact_folder.write_atomically(folder / INDEX_FILENAME, text)


def is_bundle(folder: Path) -> bool:
    """Return whether a folder has a bundle."""
    return (folder / INDEX_FILENAME).is_file()


def read(folder: Path) -> Bundle:
    """Read a bundle that `write` wrote.

    Raises:
        ArtifactDamagedError: a file is missing or unreadable.
    """
    if sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > MAX_BUNDLE_BYTES:
        raise _unreadable_error(folder, f"it has more than {MAX_BUNDLE_BYTES >> 20} MiB")
    records: dict[str, list[SignatureRecord]] = {}
    for path in sorted((folder / RECORDS_FOLDER).glob("*.json")):
        record = _read_file(folder, f"{RECORDS_FOLDER}/{path.name}", SignatureRecord)
        records.setdefault(path.name.partition(".")[0], []).append(record)
    has_checkpoint = (folder / CHECKPOINT_FILENAME).exists()
    return Bundle(
        index=_read_file(folder, INDEX_FILENAME, Index),
        records=records,
        history=_read_file(folder, HISTORY_FILENAME, list[Entry]),
        checkpoint=_read_file(folder, CHECKPOINT_FILENAME, Checkpoint) if has_checkpoint else None,
    )


def _read_file(folder: Path, name: str, kind: type[Content]) -> Content:
    """Return the content of a bundle's file. Devices and pipes are refused, because their content may be endless."""
    if not (folder / name).is_file():
        raise _unreadable_error(folder, f"{name} is missing or not a regular file")
    try:
        return TypeAdapter(kind).validate_json((folder / name).read_bytes())
    except ValidationError as error:
        [problem, *_] = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, problem["loc"]))
        raise _unreadable_error(folder, f"{name}: {f'{where}: ' if where else ''}{problem['msg']}") from None
    except OSError as error:
        raise _unreadable_error(folder, f"{name}: {error.strerror}") from None


def _unreadable_error(folder: Path, problem: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"the bundle in {folder} is unreadable: {problem}",
        hint="Export the bundle again with `tuneline verify --export`.",
    )


def verify(
    bundle: Bundle, trust: Trust, find_artifact: Callable[[str], Artifact | None] = lambda _: None
) -> Verification:
    """Verify the signatures, the links, the evaluation's statement, the promotion, the history and the checkpoint.

    Args:
        find_artifact: returns an artifact by its content digest, whose files are then hashed; None if it is not here.
    """
    index, history = bundle.index, sorted(bundle.history, key=lambda entry: entry.number)
    pinned, trust = trust, trust.add_certificates(index.certificates)
    roots = {sha256: kind for kind, sha256 in index.artifacts.items()}
    lineage = signature_checks.check_lineage(roots, lambda sha256: bundle.records.get(sha256, []), trust)
    objections, notes = [*lineage.objections], []
    forced = _find_forced_promotion(index, history, trust)
    objections += _check_evidence(index, lineage, forced)
    objections += _check_history(bundle, history, trust)
    objections += _check_promotion(index, history)
    if "repository" not in index.artifacts:
        notes.append("the version has no Triton package")
    if index.alias is None:
        notes.append("no promotion was verified, because the version was specified by number")
    artifacts = []
    for sha256, (manifest, record) in lineage.verified.items():
        try:
            artifact = find_artifact(sha256)
            found = _check_files(bundle.records[sha256], artifact, trust) if artifact else []
        except ArtifactDamagedError as error:
            artifact, found = None, [f"its {manifest.kind} {sha256[:12]} does not verify: {error.message}"]
        objections += found
        is_hashed = artifact is not None and not found
        signer = artifact_signatures.describe_signer(record, pinned, index.certificates)
        fields = {"kind": manifest.kind, "sha256": sha256, "key_id": record.key_id}
        artifacts.append(VerifiedArtifact(**fields, signer=signer, hashed=is_hashed))
    if unhashed := [one.kind for one in artifacts if not one.hashed]:
        notes.append(f"the files of these artifacts are not on this machine and were not hashed: {', '.join(unhashed)}")
    return Verification(
        name=index.name,
        version=index.version,
        alias=index.alias,
        verified=not objections,
        forced=forced,
        objections=objections,
        artifacts=artifacts,
        leaves=[Leaf(kind=one.kind, sha256=one.content_sha256, uri=one.uri) for one in lineage.leaves],
        entries=len(history),
        checkpoint=bundle.checkpoint.entries if bundle.checkpoint else None,
        notes=notes,
    )


def _check_files(records: Sequence[SignatureRecord], artifact: Artifact, trust: Trust) -> list[str]:
    text = (artifact.path / artifact_folder.MANIFEST_FILENAME).read_text(encoding="utf-8")
    own = [record for record in records if record.manifest == text]
    kind, sha256 = artifact.manifest.kind, artifact.sha256
    found, objection = signature_checks.find_valid(own, sha256, trust)
    try:
        if found is None:
            raise SignatureInvalidError(objection if own else "its manifest differs from the signed manifest")
        artifact_signatures.check_files(found[1], artifact.path, trust)
    except SignatureInvalidError as error:
        return [f"its {kind} {sha256[:12]} does not verify: {error.message}"]
    return []


def _check_evidence(index: Index, lineage: LineageCheck, forced: ForcedPromotion | None) -> Iterator[str]:
    """Yield the objections to the statement of the evaluation, and to an evaluation or a package of another model.

    Another verdict than accepted is no objection if the forced promotion overruled it.
    """
    found = {kind: lineage.verified.get(index.artifacts.get(kind, "")) for kind in KINDS}
    if "model" not in index.artifacts or "evaluation" not in index.artifacts:
        yield "the version has no model or no evaluation"
    for kind, verified in found.items():
        if verified is not None and verified[0].role != kind:
            yield f"its {kind} is of another kind: {verified[0].kind}"
    if found["model"] is None:  # reported with its signature
        return
    model = found["model"][0]
    if found["evaluation"] is not None:
        evaluation, record = found["evaluation"]
        try:
            content = json.loads(record.statements[evidence.EVALUATION_FILENAME])
            yield from evidence.check_subject(content["measured"], model)
            yield from evidence.compare_dataset(content["measured"], model)
            objection = f"{evidence.VERDICT_OBJECTION} {content['verdict']}"
            if content["verdict"] != "accepted" and not (
                forced and forced.overrules and registry_history.is_overruled(objection, forced.objections)
            ):
                yield objection
        except (LookupError, TypeError, ValueError):
            yield evidence.EARLIER_EVALUATION
        source = evaluation.find_input("model")
        if source is None or source.content_sha256 != model.content_sha256:
            yield "its evaluation measured another model"
    if found["repository"] is not None:
        source = found["repository"][0].find_input("model")
        if source is None or source.content_sha256 != model.content_sha256:
            yield "its Triton package was built from another model"


def _check_history(bundle: Bundle, history: Sequence[Entry], trust: Trust) -> list[str]:
    """Return the findings in the history that no signed entry acknowledges."""
    name = bundle.index.name
    if not any(entry.signature for entry in history):
        return ["the history is not signed"]
    acknowledged = history_signatures.list_acknowledged(history, name, trust)
    findings = [what for _, what in history_signatures.list_findings(history, name, trust)]
    findings += [registry_history.describe_gap(number) for number in registry_history.list_gaps(history)]
    findings += [registry_history.describe_edit(entry.number) for entry in registry_history.list_edited(history)]
    if bundle.checkpoint is None:
        findings.append("the history has no checkpoint outside of the database")
    elif what := history_signatures.check_checkpoint(history, bundle.checkpoint, name, trust):
        findings.append(what)
    return [what for what in findings if what not in acknowledged]


def _evaluates(entry: Entry, move: Entry) -> bool:
    """Return whether an entry records a new evaluation of the version that a move promoted."""
    is_same = (entry.to, entry.digest) == (move.to, move.digest)
    return entry.kind == "evaluation" and entry.state == registry_history.DONE and is_same


def _check_registration(index: Index, history: Sequence[Entry]) -> list[str]:
    """Return the objections to the number of a version: it was registered with another model."""
    model = index.artifacts.get("model", "none")
    registered = [
        entry
        for entry in history
        if (entry.kind, entry.state, entry.to) == ("register", registry_history.DONE, index.version)
    ]
    return [
        f"entry {entry.number} registered model {entry.digest[:12]} as version {entry.to}; the bundle has {model[:12]}"
        for entry in registered
        if entry.digest not in ("", model)
    ]


def _find_forced_promotion(index: Index, history: Sequence[Entry], trust: Trust) -> ForcedPromotion | None:
    """Return the last promotion of the version to the alias if it was forced; a rollback restores what it decided."""
    moves = registry_history.list_completed_moves(history, index.alias or "")
    move = next((move for move in reversed(moves) if move.kind == "promote" and move.to == index.version), None)
    if move is None or not move.forced:
        return None
    unverified = {number for number, _ in history_signatures.list_findings(history, index.name, trust)}
    is_about_bundle = (move.digest, move.evaluation) == tuple(map(index.artifacts.get, ("model", "evaluation")))
    is_intact = move.number not in unverified and move not in registry_history.list_edited(history)
    overrules = bool(move.signature) and is_intact and is_about_bundle
    return ForcedPromotion(
        entry=move.number, by=move.by, reason=move.reason, objections=move.forced, overrules=overrules
    )


def _check_promotion(index: Index, history: Sequence[Entry]) -> list[str]:
    """Return the objections to the promotion to the bundle's alias."""
    if index.alias is None:
        return _check_registration(index, history)
    moves = registry_history.list_completed_moves(history, index.alias)
    if not moves or moves[-1].to != index.version or moves[-1].kind == "foreign":
        holder = f"version {moves[-1].to}" if moves else "no version"
        what = "by a move outside tuneline" if moves and moves[-1].kind == "foreign" else "in the history"
        return [f"{index.alias} is at {holder} {what}; the bundle is about version {index.version}"]
    move, found = moves[-1], {kind: index.artifacts.get(kind, "none") for kind in KINDS}
    later = {entry.evaluation for entry in history if entry.number > move.number and _evaluates(entry, move)}
    objections = []
    if move.digest != found["model"]:
        what = f"model {move.digest[:12] or 'unknown'}; the bundle has {found['model'][:12]}"
        objections.append(f"entry {move.number} moved {index.alias} to {what}")
    if found["evaluation"] not in {move.evaluation, *later}:
        what = f"evaluation {move.evaluation[:12] or 'unknown'}; the bundle has {found['evaluation'][:12]}"
        objections.append(f"entry {move.number} moved {index.alias} with {what}")
    return objections
