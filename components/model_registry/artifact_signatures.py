"""Signatures of artifacts: a record for each key beside each artifact in the store.

Its name is `signatures/<content digest>/<manifest digest>.<key ID>.json`; earlier versions left out the key ID. A record has
the manifest, the OpenSSF signature of all files, and the signed attestation of the step. It contains no payload, so it
remains when the artifact is deleted, and travels without the weights.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.workspace import artifact_store
from components.model_registry import (
    attestations,
    evidence,
    signed_envelopes,
    signing_keys,
    sigstore_bundles,
    trust_root,
)
from components.model_registry.signers import Signer
from components.model_registry.signing_keys import SigningKey
from components.model_registry.sigstore_signing import SigstoreSigner
from components.model_registry.trust_root import SignatureInvalidError, Trust

if TYPE_CHECKING:
    from model_signing import hashing as model_hashing

Json = dict[str, Any]
FOLDER, CERTIFICATES_FOLDER = "signatures", "certificates"  # of notes in the store
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
STATEMENT_FILENAMES = (evidence.EVALUATION_FILENAME, evidence.PROOF_FILENAME)


class SignatureRecord(BaseModel):
    """The signatures of one artifact.

    Attributes:
        manifest: manifest.json as text.
        statements: the statements of an evaluation or a package as text, by file name.
        signature: OpenSSF signature of the files, a Sigstore bundle.
        attestation: signed envelope of the step's in-toto statement: DSSE, or a Sigstore bundle.
        certificates: certificates of the key in PEM format; "" without.
    """

    manifest: str
    statements: dict[str, str] = Field(default_factory=dict)
    signature: Json
    attestation: Json
    certificates: str = ""

    @property
    def key_id(self) -> str:
        """ID of the key or identity, as the attestation states it."""
        return signed_envelopes.read_key_id(self.attestation)

    def parse_manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            SignatureInvalidError: the manifest is unreadable.
        """
        try:
            return artifact_folder.parse_manifest(self.manifest)
        except (ValueError, ValidationError, RecursionError) as error:
            raise SignatureInvalidError(f"its manifest is unreadable: {error}") from None


class SignerDescription(BaseModel):
    """Who signed a record.

    Attributes:
        kind: a pinned key, in a file or an HSM, a key with a certificate, or an identity that a Sigstore certified.
        identity: subject of the certificate, or the identity; "" for a pinned key.
        issuer: issuer of the certificate, or of the identity's token; "" for a pinned key.
    """

    kind: Literal["key", "certificate", "sigstore"]
    identity: str = ""
    issuer: str = ""


def compute_manifest_sha256(text: str) -> str:
    """Return the digest of a manifest's fields. Manifests of schema version 1 do not state it."""
    return artifact_folder.compute_manifest_sha256(json.loads(text))


def sign_artifact(artifact: Artifact, signer: Signer, store: Path) -> SignatureRecord:
    """Sign an artifact's folder and the attestation of its step, and write the record to the store.

    Raises:
        ConfigurationError, EngineMissingError: the signer cannot be used.
        SignatureInvalidError: the folder has files that the manifest does not list, or symbolic links.
    """
    text = (artifact.path / artifact_folder.MANIFEST_FILENAME).read_text(encoding="utf-8")
    manifest_sha256 = compute_manifest_sha256(text)
    statement = attestations.build_statement(artifact.manifest, manifest_sha256)
    files = {file.path for file in artifact.manifest.files}
    listed = files & {*STATEMENT_FILENAMES}
    signature = _sign_folder(artifact.path, signer)
    signed = _list_signed_files(json.loads(base64.b64decode(signature["dsseEnvelope"]["payload"])))
    if extra := sorted({*signed} - files - {artifact_folder.MANIFEST_FILENAME}):
        raise _unsigned_error(artifact.path, f"its manifest does not list {extra[0]}")
    certificates = "" if isinstance(signer, SigstoreSigner) else signer.certificates
    record = SignatureRecord(
        manifest=text,
        statements={name: (artifact.path / name).read_text(encoding="utf-8") for name in sorted(listed)},
        signature=signature,
        attestation=signed_envelopes.sign_envelope(signer, statement, attestations.PAYLOAD_TYPE),
        certificates=certificates,
    )
    # A name for each key: after a rotation, the records of the old key still verify versions that share the artifact.
    name = f"{FOLDER}/{artifact.sha256}/{manifest_sha256}.{signer.key_id}.json"
    artifact_store.write_note(store, name, record.model_dump_json(exclude_defaults=True) + "\n")
    if certificates:  # for the signatures in the history, which have no room for certificates
        artifact_store.write_note(store, f"{CERTIFICATES_FOLDER}/{signer.key_id}.pem", certificates)
    return record


def _build_hashing() -> model_hashing.Config:
    """Return the settings with which all files are signed; by default, model-signing ignores git's files."""
    from model_signing import hashing as model_hashing

    return model_hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)


def _sign_folder(folder: Path, signer: Signer) -> Json:
    """Return the OpenSSF signature of a folder, which model-signing verifies: its own signer reads key files only."""
    envelope = signed_envelopes.sign_envelope(signer, _build_files_statement(folder), attestations.PAYLOAD_TYPE)
    if isinstance(signer, SigstoreSigner):  # it is a bundle
        return envelope
    return {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {**_build_verification_material(signer), "tlogEntries": []},
        "dsseEnvelope": envelope,
    }


def _build_files_statement(folder: Path) -> Json:
    """Hash the files of a folder, and return the statement about them in the format of model signing 1.0."""
    try:
        manifest = _build_hashing().hash(folder)
    except ValueError as error:  # a symbolic link
        raise _unsigned_error(folder, str(error).partition(". ")[0]) from None
    files = list(manifest.resource_descriptors())
    root = hashlib.sha256(b"".join(file.digest.digest_value for file in files)).hexdigest()
    return {
        "_type": attestations.STATEMENT_TYPE,
        "subject": [{"name": manifest.model_name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": manifest.serialization_type,
            "resources": [
                {"name": file.identifier, "algorithm": file.digest.algorithm, "digest": file.digest.digest_hex}
                for file in files
            ],
        },
    }


def _build_verification_material(key: SigningKey) -> Json:
    """Return the certificates of the key, or the digest of the public key that model-signing compares."""
    from cryptography.hazmat.primitives.serialization import Encoding

    if not key.certificates:
        return {"publicKey": {"hint": _digest(signing_keys.format_public_key(key.public_key))}}
    chain = [one.public_bytes(Encoding.DER) for one in signing_keys.load_certificates(key.certificates.encode())]
    return {"x509CertificateChain": {"certificates": [{"rawBytes": base64.b64encode(one).decode()} for one in chain]}}


def _unsigned_error(folder: Path, problem: str) -> SignatureInvalidError:
    return SignatureInvalidError(
        f"{folder} cannot be signed: {problem}",
        hint="Remove the files that the manifest does not list, and replace symbolic links with their files.",
    )


def load_records(store: Path, sha256: str, manifest_sha256: str = "") -> list[SignatureRecord]:
    """Return the records of artifacts with a content digest, of all keys. Unreadable records are left out.

    Args:
        manifest_sha256: digest of the manifest; "" for all manifests.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):  # such as a path in a tag that somebody edited
        return []
    names = artifact_store.list_notes(store, f"{FOLDER}/{sha256}")
    chosen = [name for name in names if manifest_sha256 in ("", name.partition(".")[0])]
    texts = (artifact_store.read_note(store, f"{FOLDER}/{sha256}/{name}") for name in chosen)
    return [record for text in texts if text and (record := parse_record(text))]


def load_own_records(store: Path, artifact: Artifact) -> list[SignatureRecord]:
    """Return the records of an artifact with its present manifest, of all keys."""
    text = (artifact.path / artifact_folder.MANIFEST_FILENAME).read_text(encoding="utf-8")
    return load_records(store, artifact.sha256, compute_manifest_sha256(text))


def parse_record(text: str) -> SignatureRecord | None:
    """Return a record; None if the text is not a record."""
    try:
        return SignatureRecord.model_validate_json(text)
    except ValidationError:
        return None


def list_certificates(store: Path) -> list[str]:
    """Return the certificates in PEM format of the keys that signed with certificates."""
    names = artifact_store.list_notes(store, CERTIFICATES_FOLDER)
    return [artifact_store.read_note(store, f"{CERTIFICATES_FOLDER}/{name}") or "" for name in names]


def check_record(record: SignatureRecord, trust: Trust) -> Manifest:
    """Return the manifest after verifying the signature of the files, the attestation and their agreement.

    The files themselves are not read; see `check_files`.

    Raises:
        SignatureInvalidError: a signature is not valid, its key is not trusted, or it is about another artifact.
    """
    if record.certificates:
        trust = trust.add_certificates([record.certificates])
    manifest = record.parse_manifest()
    manifest_sha256 = compute_manifest_sha256(record.manifest)
    statement = signed_envelopes.open_envelope(record.attestation, attestations.PAYLOAD_TYPE, trust)
    if not attestations.describes(statement, manifest, manifest_sha256):
        raise SignatureInvalidError("its attestation is for another artifact")
    is_bundle = sigstore_bundles.is_bundle(record.signature)
    envelope = record.signature if is_bundle else record.signature.get("dsseEnvelope", {})
    signed = _list_signed_files(
        signed_envelopes.open_envelope(envelope, attestations.PAYLOAD_TYPE, trust, record.key_id)
    )
    listed = {file.path: file.sha256 for file in manifest.files}
    if signed != {**listed, artifact_folder.MANIFEST_FILENAME: _digest(record.manifest)}:
        raise SignatureInvalidError("the signature of its files is for another artifact")
    if manifest.content_sha256 != manifest.compute_payload_sha256():
        raise SignatureInvalidError("its manifest does not match its own content_sha256")
    for name, text in record.statements.items():
        if listed.get(name) != _digest(text):
            raise SignatureInvalidError(f"{name} in its record differs from the signed file")
    return manifest


def describe_signer(record: SignatureRecord, pinned: Trust, chains: Sequence[str]) -> SignerDescription:
    """Return who signed a record that verifies.

    Args:
        pinned: the trust without the keys that its authorities vouch for.
        chains: further certificates of keys in PEM format. Only those that an authority vouches for name a signer.
    """
    if sigstore_bundles.is_bundle(record.attestation):
        identity = sigstore_bundles.read_identity(record.attestation)
        return SignerDescription(kind="sigstore", identity=identity.identity, issuer=identity.issuer)
    certificate = pinned.find_certificate(record.key_id, [record.certificates, *chains])
    if record.key_id in pinned.keys or certificate is None:
        return SignerDescription(kind="key")
    subject, issuer = certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string()
    return SignerDescription(kind="certificate", identity=subject, issuer=issuer)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _list_signed_files(statement: Json) -> dict[str, str]:
    """Return the digests by path that a signature covers; empty if some paths were ignored."""
    try:
        predicate = statement["predicate"]
        is_complete = (
            statement["predicateType"] == PREDICATE_TYPE
            and predicate["serialization"]["method"] == "files"
            and not predicate["serialization"].get("ignore_paths")
            and all(one["algorithm"] == "sha256" for one in predicate["resources"])
        )
        return {one["name"]: one["digest"] for one in predicate["resources"]} if is_complete else {}
    except (KeyError, TypeError):
        return {}


def check_files(record: SignatureRecord, folder: Path, trust: Trust) -> None:
    """Hash all files of an artifact and compare them with the signature.

    Raises:
        SignatureInvalidError: a file was changed, added or removed, or the key is not trusted.
        EngineMissingError: the packages of the extra signing are not installed.
    """
    signing_keys.require_packages("signing")
    from model_signing import verifying

    trusted = trust.add_certificates([record.certificates]) if record.certificates else trust
    with tempfile.TemporaryDirectory() as temporary, _translated_errors():
        config, path = verifying.Config(), Path(temporary) / "signature.json"
        path.write_text(json.dumps(record.signature), encoding="utf-8")
        root = Path(temporary) / "root"
        if sigstore_bundles.is_bundle(record.signature):
            pinned = trust.get_identity(sigstore_bundles.read_identity(record.signature))
            root.write_text(pinned.trust_config, encoding="utf-8")
            identity, issuer = pinned.identity.identity, pinned.identity.issuer
            config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer, trust_config=root)
        elif "publicKey" in record.signature.get("verificationMaterial", {}):
            root.write_text(signing_keys.format_public_key(trusted.get_key(record.key_id)), encoding="ascii")
            config.use_elliptic_key_verifier(public_key=root)
        else:
            root.write_text(trust_root.format_authorities(trust), encoding="ascii")
            config.use_certificate_verifier(certificate_chain=[root])
        config.set_hashing_config(_build_hashing()).verify(folder, path)


@contextmanager
def _translated_errors() -> Iterator[None]:
    from cryptography.exceptions import InvalidSignature
    from OpenSSL.crypto import X509StoreContextError
    from sigstore.errors import Error

    try:
        yield
    except ValueError as error:
        raise SignatureInvalidError(f"its files do not match its signature: {error}") from None
    except (InvalidSignature, X509StoreContextError, Error, KeyError):
        raise SignatureInvalidError("the signature of its files is forged or damaged") from None
