"""Signatures of a version's lineage: made at its registration, checked at each decision.

A lineage verifies if each artifact in it has a valid signature and attestation, and each input of an attestation is the
subject of another one, or a leaf: raw files, evaluation sets, incumbents, and base models that tuneline did not make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.models import training_lineage
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import STORE_PREFIX, Workdir
from components.model_registry import artifact_signatures, signers
from components.model_registry.artifact_signatures import SignatureRecord
from components.model_registry.signers import Signer
from components.model_registry.trust_root import SignatureInvalidError, Trust

ATTESTED_KINDS = (
    "dataset",
    "model",
    "reward_model",
    "initial_adapter",
    "rewarding_model",
    "evaluation",
    "repository",
)  # inputs that steps produced
COMPARED_KIND = "incumbent"  # an input of an evaluation that is no part of the candidate


@dataclass
class LineageCheck:
    """The result of a check.

    Attributes:
        verified: manifest and record of each artifact that verifies, by content digest.
        leaves: the inputs without attestation.
        objections: the artifacts and links that do not verify, as clauses.
    """

    verified: dict[str, tuple[Manifest, SignatureRecord]] = field(default_factory=dict)
    leaves: list[ArtifactInput] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)


def sign_version(artifacts: Sequence[Artifact], store_uri: str, reporter: Reporter) -> None:
    """Sign the artifacts of a version and of its lineage, if this process has a signer.

    Artifacts with a valid signature of this signer keep it.

    Args:
        store_uri: URI of the model in its artifact store, which also has its inputs.

    Raises:
        ConfigurationError, EngineMissingError: the signer cannot be used.
    """
    signer = signers.load_signer()
    if signer is None:
        return
    reporter.step("signing the version")
    pending, signed = [*artifacts], set[str]()
    missing: dict[str, ArtifactInput] = {}  # another artifact may record a location that still exists
    while pending:
        artifact = pending.pop()
        _sign_once(artifact, signer)
        signed.add(artifact.sha256)
        for source in artifact.manifest.inputs:
            if source.content_sha256 in signed or not (_is_attested(source) or source.kind == "base_model"):
                continue
            if folder := training_lineage.find_folder(source, store_uri):
                pending.append(artifact_folder.read(folder))
            elif _is_attested(source):
                missing[source.content_sha256] = source
    for sha256, source in missing.items():
        if sha256 not in signed:
            reporter.note(
                f"the {source.kind.replace('_', ' ')} {sha256[:12]} is not available, so it is not signed, and the lineage "
                "of the version does not verify"
            )


def _sign_once(artifact: Artifact, signer: Signer) -> None:
    """Sign an artifact unless a valid signature of this signer exists."""
    try:
        check_artifact(artifact, signers.build_own_trust(signer))
    except SignatureInvalidError:
        artifact_signatures.sign_artifact(artifact, signer, Workdir.from_environment().store)


def _is_attested(source: ArtifactInput) -> bool:
    """Return whether a step of tuneline produced the input, so that it has an attestation."""
    return source.kind in ATTESTED_KINDS or (source.kind != COMPARED_KIND and source.uri.startswith(STORE_PREFIX))


def check_lineage(
    roots: Mapping[str, str], load_records: Callable[[str], Sequence[SignatureRecord]], trust: Trust
) -> LineageCheck:
    """Check the signatures and the links of a version's artifacts and their lineage, without reading their files.

    Args:
        roots: kind by content digest of the version's artifacts.
        load_records: returns the records of a content digest.
    """
    result = LineageCheck()
    pending = [(kind, sha256) for sha256, kind in roots.items()]
    seen = {(sha256, True) for sha256 in roots}  # an artifact may be an ancestor and, as the incumbent, a leaf
    while pending:
        kind, sha256 = pending.pop(0)
        found, objection = find_valid(load_records(sha256), sha256, trust)
        if found is None:
            result.objections.append(f"its {kind.replace('_', ' ')} {sha256[:12]} does not verify: {objection}")
            continue
        result.verified[sha256] = found
        for source in found[0].inputs:
            is_attested = _is_attested(source) or (
                source.kind == "base_model" and bool(load_records(source.content_sha256))
            )
            if (source.content_sha256, is_attested) in seen:
                continue
            seen.add((source.content_sha256, is_attested))
            if is_attested:
                pending.append((source.kind, source.content_sha256))
            else:
                result.leaves.append(source)
    result.leaves = [leaf for leaf in result.leaves if (leaf.content_sha256, True) not in seen]
    return result


def find_valid(
    records: Sequence[SignatureRecord], sha256: str, trust: Trust
) -> tuple[tuple[Manifest, SignatureRecord] | None, str]:
    """Return the first record that verifies with its manifest; else None and the objection to the last record."""
    objection = "it has no signature"
    for record in records:
        try:
            manifest = artifact_signatures.check_record(record, trust)
            if manifest.content_sha256 != sha256:
                raise SignatureInvalidError(f"its signature is for artifact {manifest.content_sha256[:12]}")
            return (manifest, record), ""
        except SignatureInvalidError as error:
            objection = error.message
    return None, objection


def list_objections(artifacts: Mapping[str, Artifact], trust: Trust) -> list[str]:
    """Return the objections to the signatures of a version's artifacts and its lineage; reads and hashes the artifacts.

    Args:
        artifacts: model, evaluation and repository by kind, those that are available.
    """
    store = Workdir.from_environment().store
    objections = []
    for kind, artifact in artifacts.items():
        try:
            check_artifact(artifact, trust)
        except SignatureInvalidError as error:
            objections.append(f"its {kind} {artifact.sha256[:12]} does not verify: {error.message}")
    if objections:
        return objections
    own = {artifact.sha256: artifact_signatures.load_own_records(store, artifact) for artifact in artifacts.values()}

    def load_records(sha256: str) -> list[SignatureRecord]:
        return own.get(sha256) or artifact_signatures.load_records(store, sha256)

    roots = {artifact.sha256: kind for kind, artifact in artifacts.items()}
    return check_lineage(roots, load_records, trust).objections


def check_artifact(artifact: Artifact, trust: Trust) -> None:
    """Verify the signature of an artifact that is on this machine, with all its files.

    Raises:
        SignatureInvalidError: the artifact does not verify.
    """
    records = artifact_signatures.load_own_records(Workdir.from_environment().store, artifact)
    found, objection = find_valid(records, artifact.sha256, trust)
    if found is None:
        raise SignatureInvalidError(objection)
    artifact_signatures.check_files(found[1], artifact.path, trust)


def require_signature(artifact: Artifact, trust: Trust) -> None:
    """Refuse an artifact that does not verify.

    Raises:
        SignatureInvalidError: the artifact has no valid signature of a trusted key.
    """
    try:
        check_artifact(artifact, trust)
    except SignatureInvalidError as error:
        raise SignatureInvalidError(
            f"the {artifact.manifest.kind} in {artifact.path} does not verify: {error.message}",
            hint="Register its version again with a trusted signing key, or restore its files.",
        ) from None


def find_artifact(sha256: str) -> Artifact | None:
    """Return the artifact of the workdir's store; None if it is not there.

    Raises:
        ArtifactDamagedError: a file of the artifact has changed.
    """
    store = Workdir.from_environment().store
    return artifact_store.load_artifact(store, sha256) if artifact_store.has_artifact(store, sha256) else None
