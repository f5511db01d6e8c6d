"""Keyless signatures with a site's Sigstore: sigstore-python signs and verifies against the stand-in of `sigstore_site.py`.

The test of a whole registry is long: it registers and promotes versions in MLflow. Attacks are on one artifact.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ConfigurationError, EngineMissingError
from components.model_registry import (
    artifact_signatures,
    entry_signatures,
    provenance_bundle,
    registry_history,
    signature_checks,
    signers,
    sigstore_identities,
    trust_root,
)
from components.model_registry.stage import promote
from components.model_registry.trust_root import SignatureInvalidError, Trust
from pipelines.config.customization_config import Customization
from pipelines.steps import policy_preflight
from tests.model_registry.conftest import NAME, build
from tests.model_registry.signed_registry import QUIET, build_signed_registry, copy_signed_registry
from tests.model_registry.sigstore_site import ISSUER, SigstoreSite, encode, get_identity, new_key, running_site
from tests.model_registry.test_verify_command import machine, verify_on
from tests.pipelines.command import answer_in_process, run_in_process, tuneline

__all__ = ["machine"]  # a fixture

Json = dict[str, Any]
RELEASE = get_identity("team-a", "release")


@pytest.fixture(scope="module")
def services() -> Iterator[SigstoreSite]:
    with running_site() as running:
        yield running


@pytest.fixture
def site(services: SigstoreSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigstoreSite:
    """The site's Sigstore, with which this process signs; `tmp_path / "site"` has its configuration, token and trust."""
    services.certificate_age, services.failing, services.requests = timedelta(), "", []
    configure(services, tmp_path / "site", monkeypatch)
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "workdir"))
    return services


def configure(site: SigstoreSite, folder: Path, patch: pytest.MonkeyPatch) -> None:
    site.write(folder)
    patch.setenv("TUNELINE_SIGNING_SIGSTORE_FILE", str(folder / "sigstore.json"))
    patch.setenv("TUNELINE_SIGNING_TOKEN_FILE", str(folder / "token"))
    patch.setenv("TUNELINE_TRUST", str(folder / "trust.yaml"))


def sign_model(folder: Path, content: str = "a") -> tuple[Artifact, Path]:
    """Sign a small model, and return it with the file of its signature record."""
    model = build(folder / f"model-{content}", "model", content, [], {})
    signature_checks.sign_version([model], "", QUIET)
    [record] = (folder / "workdir" / "store" / "signatures" / model.sha256).iterdir()
    return model, record


def write_trust(folder: Path, **changes: str) -> Path:
    """Write a trust file with other fields of its identity."""
    trust = json.loads((folder / "trust.yaml").read_text())
    trust["identities"][0].update(changes)
    (folder / "changed.yaml").write_text(json.dumps(trust))
    return folder / "changed.yaml"


def test_identity_signs_files_and_attestation(site: SigstoreSite, tmp_path: Path) -> None:
    model, path = sign_model(tmp_path)
    trust = trust_root.load_configured_trust()
    signature_checks.require_signature(model, trust)
    record = artifact_signatures.parse_record(path.read_text())
    assert record
    described = artifact_signatures.describe_signer(record, trust, [])
    assert described.model_dump() == {"kind": "sigstore", "identity": RELEASE, "issuer": ISSUER}
    assert site.build_token().split(".")[0] not in path.read_text()
    requests = len(site.requests)
    signature_checks.sign_version([model], "", QUIET)  # the signature of this identity is kept
    assert site.requests[requests:] == ["/api/v2/signingCert"]
    (model.path / "report.html").write_text("edited")
    with pytest.raises(SignatureInvalidError, match="its files do not match its signature: Signature mismatch"):
        signature_checks.require_signature(model, trust)


def test_verification_needs_no_service(site: SigstoreSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = sign_model(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    signature_checks.require_signature(model, trust_root.load_configured_trust())


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": get_identity("team-b", "release")},
        {"identity": RELEASE[:-1]},
        {"issuer": "https://other.example"},
        {"issuer": f"{ISSUER}/"},
    ],
)
def test_other_identity_or_issuer_is_refused(site: SigstoreSite, tmp_path: Path, changes: dict[str, str]) -> None:
    model, _ = sign_model(tmp_path)
    trust = trust_root.load_trust([write_trust(tmp_path / "site", **changes)])
    reason = f"signed with identity {RELEASE} of {ISSUER}, which is not trusted"
    with pytest.raises(SignatureInvalidError, match=reason):
        signature_checks.require_signature(model, trust)


def test_certificate_of_another_sigstore_is_refused(site: SigstoreSite, tmp_path: Path) -> None:
    """It has the same identity, issuer and name of the authority."""
    model, _ = sign_model(tmp_path)
    (tmp_path / "site" / "other.json").write_text(
        json.dumps(replace(SigstoreSite(), url="http://other").build_trust_config())
    )
    trust = trust_root.load_trust([write_trust(tmp_path / "site", trust_config="other.json")])
    with pytest.raises(SignatureInvalidError, match="failed to build timestamp certificate chain"):
        signature_checks.require_signature(model, trust)


def test_certificate_of_an_identity_is_none_of_a_key(site: SigstoreSite, tmp_path: Path) -> None:
    """A site may run its Sigstore below the authority of its keys, and any workload gets such a certificate."""
    _, path = sign_model(tmp_path)
    material = json.loads(path.read_text())["attestation"]["verificationMaterial"]
    certificate = x509.load_der_x509_certificate(base64.b64decode(material["certificate"]["rawBytes"]))
    trust = Trust(authorities=(site.authority,))
    assert trust.add_certificates([certificate.public_bytes(Encoding.PEM).decode()]).keys == {}


def build_malformed_certificate() -> x509.Certificate:
    """Return a certificate whose alternative name is of a kind that cryptography does not read."""
    key, name, begin = new_key(), x509.Name([]), datetime(2026, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin + timedelta(days=1))
    names = x509.UnrecognizedExtension(x509.ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x02\xa3\x00")
    return builder.add_extension(names, critical=False).sign(key, SHA256())


def test_certificate_with_an_unreadable_extension_is_refused(site: SigstoreSite, tmp_path: Path) -> None:
    model, path = sign_model(tmp_path)
    record, certificate = json.loads(path.read_text()), build_malformed_certificate()
    edit_material(
        lambda material: material["certificate"].update(rawBytes=encode(certificate.public_bytes(Encoding.DER)))
    )(record)
    path.write_text(json.dumps(record))
    with pytest.raises(SignatureInvalidError, match="the certificate of its signature is unreadable"):
        signature_checks.require_signature(model, trust_root.load_configured_trust())
    trust = Trust(authorities=(site.authority,))
    assert trust.add_certificates([certificate.public_bytes(Encoding.PEM).decode()]).keys == {}


def edit_material(edit: Callable[[Json], object]) -> Callable[[Json], object]:
    """Return a change of the verification material of both signatures of a record."""

    def edit_record(record: Json) -> None:
        for name in ("signature", "attestation"):
            edit(record[name]["verificationMaterial"])

    return edit_record


def edit_payload(record: Json) -> None:
    envelope = record["attestation"]["dsseEnvelope"]
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["predicate"]["buildDefinition"]["externalParameters"]["seed"] = 2
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()


def shift_time(material: Json) -> None:
    [entry] = material["tlogEntries"]
    entry["integratedTime"] = str(int(entry["integratedTime"]) + 60)


ATTACKS = {
    "edited payload": (edit_payload, "DSSE: invalid signature"),
    "no inclusion proof": (
        edit_material(lambda material: material["tlogEntries"][0].pop("inclusionProof")),
        "failed to load bundle|inclusion proof",
    ),
    "inclusion proof of another root": (
        edit_material(lambda material: material["tlogEntries"][0]["inclusionProof"].update(rootHash="00" * 22)),
        "inclusion proof|invalid log entry",
    ),
    "no signed time": (
        edit_material(lambda material: material["tlogEntries"][0].pop("inclusionPromise")),
        "must contain an inclusion promise or signed timestamp",
    ),
    "edited time": (edit_material(shift_time), "inclusion promise"),
    "no log entry": (edit_material(lambda material: material.update(tlogEntries=[])), "exactly one log entry"),
    "damaged certificate": (
        edit_material(lambda material: material["certificate"].update(rawBytes="AAAA")),
        "the certificate of its signature is unreadable",
    ),
    "no certificate": (edit_material(lambda material: material.pop("certificate")), "not an envelope"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_edited_bundle_is_refused(site: SigstoreSite, tmp_path: Path, attack: str) -> None:
    model, path = sign_model(tmp_path)
    record = json.loads(path.read_text())
    edit, reason = ATTACKS[attack]
    edit(record)
    path.write_text(json.dumps(record))
    with pytest.raises(SignatureInvalidError, match=reason):
        signature_checks.require_signature(model, trust_root.load_configured_trust())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (("signature",), "the signature of its files is for another artifact"),
        (("attestation",), "its attestation is for another artifact"),
        (("signature", "attestation"), "its attestation is for another artifact"),
    ],
)
def test_bundle_of_another_artifact_is_refused(
    site: SigstoreSite, tmp_path: Path, fields: tuple[str, ...], reason: str
) -> None:
    model, path = sign_model(tmp_path)
    other = json.loads(sign_model(tmp_path, "b")[1].read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), **{name: other[name] for name in fields}}))
    with pytest.raises(SignatureInvalidError, match=reason):
        signature_checks.require_signature(model, trust_root.load_configured_trust())


def test_log_entry_of_another_artifact_is_refused(site: SigstoreSite, tmp_path: Path) -> None:
    """The same identity signed it, and the entry itself is valid."""
    model, path = sign_model(tmp_path)
    record, other = json.loads(path.read_text()), json.loads(sign_model(tmp_path, "b")[1].read_text())
    entries = other["attestation"]["verificationMaterial"]["tlogEntries"]
    record["attestation"]["verificationMaterial"]["tlogEntries"] = entries
    path.write_text(json.dumps(record))
    with pytest.raises(SignatureInvalidError, match="log entry payload hash does not match bundle"):
        signature_checks.require_signature(model, trust_root.load_configured_trust())


def test_signatures_of_two_identities_are_refused(
    site: SigstoreSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both identities are trusted."""
    model, path = sign_model(tmp_path)
    site.write(tmp_path / "other", "deputy")
    for name in ("sigstore.json", "trust.yaml"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "site" / f"deputy-{name}")
    trusts = [tmp_path / "site" / "trust.yaml", tmp_path / "site" / "deputy-trust.yaml"]
    monkeypatch.setenv("TUNELINE_TRUST", ":".join(map(str, trusts)))
    monkeypatch.setenv("TUNELINE_SIGNING_TOKEN_FILE", str(tmp_path / "other" / "token"))
    signature_checks.sign_version([model], "", QUIET)
    [deputy] = [file for file in path.parent.iterdir() if file != path]
    trust = trust_root.load_configured_trust()
    signature_checks.require_signature(model, trust)
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "signature": json.loads(deputy.read_text())["signature"]})
    )
    deputy.unlink()
    with pytest.raises(SignatureInvalidError, match="its signatures were made by two identities"):
        signature_checks.require_signature(model, trust)


def test_expired_certificate_does_not_sign(site: SigstoreSite, tmp_path: Path) -> None:
    """The log dates the entry after the end of the certificate."""
    site.certificate_age = timedelta(hours=1)
    with pytest.raises(EngineMissingError, match=r"cannot sign: (ExpiredCertificate|its answer does not verify)"):
        sign_model(tmp_path)


def test_signature_after_the_end_of_its_certificate_is_refused(
    site: SigstoreSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder of the short-lived key signs later, with a client that does not check the time."""
    site.certificate_age = timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr("sigstore.sign.Signer._signing_cert", keep_expired_certificate())
        patch.setattr("components.model_registry.sigstore_bundles.open_bundle", lambda *_: None)
        model, _ = sign_model(tmp_path)
    with pytest.raises(SignatureInvalidError, match="failed to build timestamp certificate chain"):
        signature_checks.require_signature(model, trust_root.load_configured_trust())


def keep_expired_certificate() -> Callable[[Any], Any]:
    """Return `Signer._signing_cert` without its check of the time."""
    from sigstore.sign import Signer

    request = Signer._signing_cert

    def get_certificate(signer: Any) -> Any:
        name = "_Signer__cached_signing_certificate"
        return getattr(signer, name) if getattr(signer, name, None) else request(signer)

    return get_certificate


def test_policy_and_revocation_name_an_identity_by_its_id(site: SigstoreSite, tmp_path: Path) -> None:
    model, _ = sign_model(tmp_path)
    own = sigstore_identities.Identity(RELEASE, ISSUER).id
    trust = trust_root.load_configured_trust()
    signature_checks.require_signature(model, replace(trust, allowed=frozenset([own])))
    with pytest.raises(SignatureInvalidError, match="which the policy does not list"):
        signature_checks.require_signature(model, replace(trust, allowed=frozenset(["ab" * 32])))
    with pytest.raises(SignatureInvalidError, match=f"signed with the revoked identity {RELEASE}"):
        signature_checks.require_signature(model, replace(trust, revoked=frozenset([own])))


def test_identity_signs_an_entry_of_the_history(site: SigstoreSite) -> None:
    signature = entry_signatures.sign_entry("helper", 3, "5ea1" * 16, "c0de" * 16)
    expected = {"model": "helper", "entry": 3, "seal": "5ea1" * 16, "content_sha256": "c0de" * 16}
    trust = trust_root.load_configured_trust()
    entry_signatures.check_entry(signature, expected, trust)
    with pytest.raises(SignatureInvalidError, match="its signature is for other content: entry 3 of helper"):
        entry_signatures.check_entry(signature, {**expected, "entry": 4}, trust)


def test_signature_of_an_artifact_is_none_of_an_entry(site: SigstoreSite, tmp_path: Path) -> None:
    _, path = sign_model(tmp_path)
    signature = json.dumps(json.loads(path.read_text())["attestation"])
    with pytest.raises(SignatureInvalidError, match=r"its signature is for content of type https://slsa\.dev"):
        entry_signatures.check_entry(signature, {"model": "helper"}, trust_root.load_configured_trust())


def check_before_training() -> None:
    policy_preflight.list_objections(Customization(), None, [])


TOKENS: dict[str, tuple[Callable[[SigstoreSite], str], str]] = {
    "expired": (
        lambda site: site.build_token(exp=1_700_000_000, iat=1_600_000_000, nbf=1_600_000_000),
        "Signature has expired",
    ),
    "other audience": (lambda site: site.build_token(aud=["https://kubernetes.default.svc"]), "Audience doesn't match"),
    "no token": (lambda _: "password", "Not enough segments"),
}


@pytest.mark.parametrize("token", TOKENS)
def test_unusable_token_is_reported_before_training(site: SigstoreSite, tmp_path: Path, token: str) -> None:
    build_token, reason = TOKENS[token]
    text = build_token(site)
    (tmp_path / "site" / "token").write_text(text)
    with pytest.raises(ConfigurationError, match=f"TUNELINE_SIGNING_TOKEN_FILE: .*{reason}") as error:
        check_before_training()
    assert text not in error.value.message
    assert site.requests == []


def test_missing_token_is_reported_before_training(
    site: SigstoreSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "token").unlink()
    with pytest.raises(ConfigurationError, match=r"TUNELINE_SIGNING_TOKEN_FILE: .*/token: the file cannot be read"):
        check_before_training()
    monkeypatch.delenv("TUNELINE_SIGNING_TOKEN_FILE")
    with pytest.raises(ConfigurationError, match="neither TUNELINE_SIGNING_TOKEN_FILE nor TUNELINE_SIGNING_TOKEN has"):
        check_before_training()
    monkeypatch.setenv("TUNELINE_SIGNING_TOKEN", site.build_token())
    check_before_training()


def test_token_of_another_account_is_reported_before_training(site: SigstoreSite, tmp_path: Path) -> None:
    (tmp_path / "site" / "token").write_text(site.build_token("intruder"))
    reason = f"TUNELINE_TRUST refuses the identity of this process: signed with identity {get_identity('team-a', 'intruder')}"
    with pytest.raises(ConfigurationError, match=reason):
        check_before_training()


def test_token_that_the_site_did_not_issue_is_reported(site: SigstoreSite, tmp_path: Path) -> None:
    (tmp_path / "site" / "token").write_text(SigstoreSite().build_token())
    with pytest.raises(
        EngineMissingError, match=r"cannot sign: status 401 from .*signingCert: .*the token is not valid"
    ):
        check_before_training()


def test_failing_services_are_reported(site: SigstoreSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.failing = "/api/v1/log/entries"
    with pytest.raises(EngineMissingError, match=r"cannot sign: status 500 from .*log/entries: .*out of order"):
        sign_model(tmp_path)
    site.failing = "/api/v2/signingCert"
    with pytest.raises(EngineMissingError, match=r"cannot sign: status 500 from .*signingCert"):
        check_before_training()
    config = tmp_path / "site" / "sigstore.json"
    config.write_text(config.read_text().replace(site.url, "http://127.0.0.1:1"))
    with pytest.raises(EngineMissingError, match="Connection refused"):
        check_before_training()


@pytest.mark.parametrize("content", ["", "[]", '{"trustedRoot": {}}', None])
def test_unusable_trust_configuration_is_reported(
    site: SigstoreSite, tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site" / "sigstore.json"
    path.unlink() if content is None else path.write_text(content)
    problem = "cannot be read: No such file" if content is None else "is not a Sigstore client trust configuration"
    with pytest.raises(ConfigurationError, match=f"TUNELINE_SIGNING_SIGSTORE_FILE: .*json {problem}"):
        check_before_training()
    with pytest.raises(ConfigurationError, match=f"trust.yaml: trust_config: .*json {problem}"):
        trust_root.load_configured_trust()


def test_key_and_identity_exclude_each_other(site: SigstoreSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", "signing.key")
    with pytest.raises(ConfigurationError, match="are both set; expected one of them"):
        signers.load_signer()


def test_identity_is_listed_once(site: SigstoreSite, tmp_path: Path) -> None:
    trust = tmp_path / "site" / "trust.yaml"
    with pytest.raises(ConfigurationError, match=f"the identity {RELEASE} of {ISSUER} is listed twice"):
        trust_root.load_trust([trust, trust])


def test_command_shows_the_identity(site: SigstoreSite, tmp_path: Path) -> None:
    names = {"SIGSTORE_FILE": "sigstore.json", "TOKEN_FILE": "token"}
    variables = {f"TUNELINE_SIGNING_{name}": str(tmp_path / "site" / file) for name, file in names.items()}
    shown = answer_in_process("signing", "show", cwd=tmp_path, **variables)
    identity = sigstore_identities.Identity(RELEASE, ISSUER)
    assert shown == {"key_id": identity.id, "public_key": None, "identity": RELEASE, "issuer": ISSUER}


@pytest.mark.long
@pytest.mark.mlflow
def test_version_signed_by_an_identity_verifies_from_its_bundle(
    services: SigstoreSite, machine: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registration, policy, promotion and history; then the bundle with the extra `verification` and without network."""
    services.certificate_age, services.failing = timedelta(), ""

    def sign_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("TUNELINE_WORKDIR", str(folder / "workdir"))
        configure(services, folder / "site", patch)

    kept = build_signed_registry(empty_store, tmp_path, sign_in)
    (tmp_path / "copy").mkdir()
    signed = copy_signed_registry(kept, tmp_path / "copy", monkeypatch)
    monkeypatch.delenv("TUNELINE_SIGNING_KEY_FILE")
    configure(services, signed.folder / "site", monkeypatch)
    trust = trust_root.load_trust([signed.folder / "site" / "trust.yaml"])
    bundle = provenance_bundle.collect(NAME, "champion")
    result = provenance_bundle.verify(bundle, trust, signature_checks.find_artifact)
    assert result.objections == []
    assert all(one.hashed and one.signer.identity == RELEASE for one in result.artifacts)
    assert all(entry.signature for entry in registry_history.read(signed.client, NAME))
    other = trust_root.load_trust([write_trust(signed.folder / "site", identity=get_identity("team-b", "release"))])
    objections = provenance_bundle.verify(bundle, other).objections
    assert any(one.startswith("its model") and "which is not trusted" in one for one in objections)
    assert any(one.startswith("entry 1 of the history") and "which is not trusted" in one for one in objections)
    entries = registry_history.read(signed.client, NAME)
    services.failing = "/api/v1/log/entries"  # the intent cannot be signed
    own = {key: value for key, value in os.environ.items() if key.startswith(("MLFLOW_TRACKING_", "TUNELINE_"))}
    failed = tuneline("rollback", NAME, "--json", cwd=tmp_path, **own)
    assert "cannot sign: status 500" in json.loads(failed.stdout)["error"]["message"]
    assert registry_history.read(signed.client, NAME) == entries
    services.failing = ""
    promote(NAME, "2", by="ann", reporter=QUIET)
    assert all(entry.signature for entry in registry_history.read(signed.client, NAME))
    bundle = provenance_bundle.collect(NAME, "champion")
    assert provenance_bundle.verify(bundle, trust).objections == []
    provenance_bundle.write(bundle, tmp_path / "bundle")
    site = shutil.copytree(signed.folder / "site", tmp_path / "elsewhere")
    shutil.rmtree(signed.folder)
    process = verify_on(machine, tmp_path, "bundle", "--trust", site / "trust.yaml")
    assert process.returncode == 0, process.stdout + process.stderr
    expected = {"kind": "sigstore", "identity": RELEASE, "issuer": ISSUER}
    assert [one["signer"] for one in json.loads(process.stdout)["artifacts"]] == [expected] * 4
    printed = run_in_process("verify", "bundle", "--trust", site / "trust.yaml", cwd=tmp_path).stdout
    assert printed.count(f", identity {RELEASE} of {ISSUER}, files not hashed") == 4
