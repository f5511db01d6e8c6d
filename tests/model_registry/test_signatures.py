"""Signatures of artifacts, attestations and the history: attacks end in a refusal with the reason.

Tests that register or promote more versions are long; the attacks are fast.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.runtime.errors import ConfigurationError, RegistryError
from components.common.runtime.reporters import SilentReporter
from components.data_curation.quality_scoring import perplexity
from components.fine_tuning import reward_sources
from components.model_registry import (
    alias_moves,
    checkpoints,
    history_signatures,
    promotion_policy,
    provenance_bundle,
    registry_history,
    servable_versions,
    signature_checks,
    signing_keys,
    trust_root,
)
from components.model_registry.artifact_signatures import SignatureRecord, load_records
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import audit
from components.model_registry.model_versions import TAG_PREFIX
from components.model_registry.registry_history import Entry
from components.model_registry.release_policy import Policy
from components.model_registry.stage import promote, register, rollback
from components.model_registry.trust_root import SignatureInvalidError
from pipelines.cli import verification
from pipelines.config.customization_config import Customization as CustomizationConfig
from pipelines.steps import policy_preflight
from tests.model_registry.conftest import NAME, Customization, build, kill_before_write
from tests.model_registry.evidence_builder import build_dataset
from tests.model_registry.signed_registry import QUIET, SignedRegistry, set_signing

pytestmark = pytest.mark.mlflow
HISTORY = f"{NAME}.history"


def list_findings() -> list[str]:
    return [finding.what for finding in audit(NAME, reporter=QUIET).findings]


def list_history_findings() -> list[str]:
    """Return the findings of an audit apart from those about the versions' files."""
    kinds = ("edited", "gap", "signature", "moved")
    return [finding.what for finding in audit(NAME, reporter=QUIET).findings if finding.kind in kinds]


def edit_record(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def corrupt(envelope: dict[str, Any]) -> None:
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    signature[-1] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()


def reseal(signed: SignedRegistry, number: int, **changes: str) -> None:
    """Edit an entry, and compute all seals from it on again, as an attacker with the database but without a key can."""
    entries = registry_history.read(signed.client, NAME)
    before = entries[number - 2].seal if number > 1 else ""
    for entry in entries[number - 1 :]:
        edited = entry.model_copy(update=changes) if entry.number == number else entry
        before = registry_history.compute_seal(edited, before)
        for key, value in {**(changes if entry.number == number else {}), "seal": before}.items():
            signed.client.set_model_version_tag(HISTORY, str(entry.number), f"{TAG_PREFIX}{key}", value)


def find_entry(signed: SignedRegistry, kind: str) -> Entry:
    return [entry for entry in registry_history.read(signed.client, NAME) if entry.kind == kind][-1]


def test_signed_version_verifies_with_its_public_key(signed: SignedRegistry) -> None:
    result = signed.verify()
    assert result.objections == []
    assert {(one.kind, one.hashed) for one in result.artifacts} == {
        (kind, True) for kind in ("model", "evaluation", "repository", "dataset")
    }
    assert [leaf.kind for leaf in result.leaves] == ["base_model", "incumbent"]
    assert result.checkpoint == result.entries
    assert list_findings() == []


@pytest.mark.parametrize(
    ("kind", "uri", "is_attested"),
    [
        (perplexity.MODEL_KIND, "embedded:smollm2-135m-instruct", False),  # a base model that nobody signs
        (reward_sources.REWARD_INPUT, "/models/reward", True),
    ],
)
def test_reward_model_is_attested_and_perplexity_model_is_not(kind: str, uri: str, is_attested: bool) -> None:
    source = ArtifactInput(kind=kind, content_sha256="ab" * 32, uri=uri)
    assert signature_checks._is_attested(source) is is_attested


def test_private_key_is_in_no_record(signed: SignedRegistry) -> None:
    secret = (signed.folder / "keys" / "signing.key").read_text().splitlines()[1].encode()
    files = [path for path in signed.folder.rglob("*") if path.is_file() and path.parent.name != "keys"]
    assert len(files) > 20
    assert not [path for path in files if secret in path.read_bytes()]


def test_attestation_has_the_inputs_of_the_step(signed: SignedRegistry) -> None:
    record = json.loads(signed.find_record("model").read_text())
    statement = json.loads(base64.b64decode(record["attestation"]["payload"]))
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"] == [{"name": "model", "digest": {"sha256": signed.get_digest("model")}}]
    definition = statement["predicate"]["buildDefinition"]
    assert [one["name"] for one in definition["resolvedDependencies"]][:2] == ["dataset", "base_model"]
    assert "packages" in definition["internalParameters"]["environment"]


def _forge_files(signed: SignedRegistry) -> None:
    edit_record(signed.find_record("model", "1"), lambda record: corrupt(record["signature"]["dsseEnvelope"]))


def _forge_attestation(signed: SignedRegistry) -> None:
    edit_record(signed.find_record("model", "1"), lambda record: corrupt(record["attestation"]))


def _copy_signature(signed: SignedRegistry) -> None:
    other = json.loads(signed.find_record("model", "2").read_text())
    edit_record(signed.find_record("model", "1"), lambda record: record.update(signature=other["signature"]))


def _copy_attestation(signed: SignedRegistry) -> None:
    other = json.loads(signed.find_record("model", "2").read_text())
    edit_record(signed.find_record("model", "1"), lambda record: record.update(attestation=other["attestation"]))


def _copy_record(signed: SignedRegistry) -> None:
    shutil.copyfile(signed.find_record("model", "2"), signed.find_record("model", "1"))


def _change_byte(signed: SignedRegistry) -> None:
    path = signed.store / signed.get_digest("model", "1") / "weights" / "payload.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"#")


def _change_report(signed: SignedRegistry) -> None:
    (signed.store / signed.get_digest("model", "1") / "report.html").write_text("<p>better</p>")


def _add_file(signed: SignedRegistry, name: str = "tokenizer_config.json") -> None:
    (signed.store / signed.get_digest("model", "1") / name).write_text("{}")


def _remove_record(signed: SignedRegistry, kind: str = "model") -> None:
    signed.find_record(kind, "1").unlink()


ARTIFACT_ATTACKS = {
    "forged signature": (_forge_files, "its signature was not made by key"),
    "forged attestation": (_forge_attestation, "its signature was not made by key"),
    "signature of another artifact": (_copy_signature, "the signature of its files is for another artifact"),
    "attestation of another artifact": (_copy_attestation, "its attestation is for another artifact"),
    "record of another artifact": (_copy_record, "its signature is for a"),
    "changed byte": (_change_byte, "weights/payload.bin of the model"),
    "changed report": (_change_report, "report.html of the model"),
    "extra file": (_add_file, "Extra files found in model"),
    "extra file of git": (lambda signed: _add_file(signed, ".gitattributes"), "Extra files found in model"),
    "missing signature": (_remove_record, "it has no signature"),
    "missing attestation of an ancestor": (
        lambda signed: _remove_record(signed, "dataset"),
        "its dataset .* it has no sig",
    ),
}


@pytest.mark.parametrize("attack", ARTIFACT_ATTACKS)
def test_attack_on_an_artifact_is_refused_by_verify_rollback_and_deployment(
    signed: SignedRegistry, attack: str
) -> None:
    change, reason = ARTIFACT_ATTACKS[attack]
    change(signed)
    [objection] = signed.verify("1").objections
    assert re.search(reason, objection)
    with pytest.raises(RegistryError, match=f"cannot be rolled back to version 1 of helper: .*{reason}"):
        rollback(NAME, reporter=QUIET)
    assert re.search(reason, " and ".join(list_serving_objections("1")))


def list_serving_objections(version: str = "2") -> list[str]:
    return servable_versions.list_serving_objections(NAME, version, "champion")


@pytest.mark.long
def test_intact_signed_version_is_promoted_rolled_back_and_served(signed: SignedRegistry) -> None:
    assert list_serving_objections() == []
    assert rollback(NAME, reporter=QUIET).to == "1"
    assert promote(NAME, "2", force=True, reason="again", reporter=QUIET).to == "2"
    assert signed.verify().objections == []


@pytest.mark.parametrize("revoked", [False, True])
def test_other_and_revoked_keys_are_refused(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch, revoked: bool
) -> None:
    _, _, own = signing_keys.generate_key_pair(signed.folder / "other")
    key_id = signed.verify().artifacts[0].key_id
    trust = signed.folder / "trust.yaml"
    keys = ["keys/signing.pub", "other/signing.pub"] if revoked else ["other/signing.pub"]
    trust.write_text(f"public_keys: {json.dumps(keys)}\nrevoked: [{key_id if revoked else own}]\n")
    monkeypatch.setenv("TUNELINE_TRUST", str(trust))
    reason = f"signed with the revoked key {key_id[:12]}" if revoked else f"key {key_id[:12]}, which is not trusted"
    bundle = provenance_bundle.collect(NAME, "champion")
    objections = provenance_bundle.verify(bundle, trust_root.load_configured_trust()).objections
    assert any("its model" in objection and reason in objection for objection in objections)
    assert any("entry 1 of the history" in objection and reason in objection for objection in objections)
    with pytest.raises(RegistryError, match=f"entry 1 of the history does not verify: .*{reason}"):
        rollback(NAME, reporter=QUIET)
    assert any(reason in objection for objection in list_serving_objections())


def test_key_that_the_policy_does_not_list_is_refused(signed: SignedRegistry) -> None:
    policy = Policy(signatures="required", trusted_keys=["ab" * 32])
    promotion_policy.set_policy(signed.client, NAME, policy, "ann")
    with pytest.raises(RegistryError, match="which the policy does not list"):
        rollback(NAME, reporter=QUIET)


def test_policy_without_a_trusted_key_on_this_machine_refuses(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUNELINE_TRUST")
    with pytest.raises(RegistryError, match="requires signatures; no trusted key is set in TUNELINE_TRUST"):
        rollback(NAME, reporter=QUIET)


@pytest.mark.long
def test_retired_key_verifies_and_the_next_registration_signs_with_the_new_one(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch, customize: Customization
) -> None:
    signing_keys.generate_key_pair(signed.folder / "new")
    old, new = signed.public_key, signed.folder / "new" / "signing.pub"
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(signed.folder / "new" / "signing.key"))
    monkeypatch.setenv("TUNELINE_TRUST", f"{old}{os.pathsep}{new}")
    made = customize("three", incumbent=signed.get_digest("model"))
    register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=QUIET)
    assert promote(NAME, "3", reporter=QUIET).to == "3"
    result = provenance_bundle.verify(provenance_bundle.collect(NAME, "champion"), trust_root.load_configured_trust())
    assert result.objections == []
    new_key = signing_keys.load_signing_key()
    assert new_key is not None
    # The dataset was signed with version 1.
    assert {one.key_id for one in result.artifacts if one.kind != "dataset"} == {new_key.key_id}


@pytest.mark.long
def test_unsigned_version_of_a_signed_history_is_refused(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch, customize: Customization
) -> None:
    made = customize("three", incumbent=signed.get_digest("model"))
    with monkeypatch.context() as patch:
        patch.setattr(signature_checks, "sign_version", lambda *_: None)
        register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=QUIET)
    with pytest.raises(RegistryError, match=r"its model .* does not verify: it has no signature") as refusal:
        promote(NAME, "3", reporter=QUIET)
    assert "Register the version again" in refusal.value.hint
    register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=QUIET)
    assert promote(NAME, "3", reporter=QUIET).to == "3"


def test_process_without_a_key_cannot_write_to_a_signed_history(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = registry_history.read(signed.client, NAME)
    monkeypatch.delenv("TUNELINE_SIGNING_KEY_FILE")
    with pytest.raises(RegistryError, match="the history of helper is signed, and this process has no signing key"):
        rollback(NAME, reporter=QUIET)
    assert registry_history.read(signed.client, NAME) == before


def test_truncated_history_is_found(signed: SignedRegistry) -> None:
    newest = registry_history.read(signed.client, NAME)[-1]
    signed.client.delete_model_version(HISTORY, str(newest.number))
    reason = f"the history lacks entry {newest.number}, which its checkpoint records: the history was truncated"
    assert reason in list_findings()
    assert reason in signed.verify().objections
    with pytest.raises(RegistryError, match=reason):
        promote(NAME, "1", force=True, reason="truncated", reporter=QUIET)
    audit(NAME, repair=True, by="ann", reporter=QUIET)
    assert [what for what in list_findings() if "truncated" in what] == []


def promote_bare_versions(client: Any) -> None:
    """Create two versions without files, and promote both."""
    client.create_registered_model(NAME)
    for number in ("1", "2"):
        client.create_model_version(NAME, "elsewhere:/x", tags={"tuneline.model_sha256": number * 64})
        promote(NAME, number, force=True, reason="a test", reporter=QUIET)


def test_truncated_and_resealed_histories_are_found_without_keys(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_CHECKPOINTS", str(tmp_path / "checkpoints"))
    promote_bare_versions(registry)
    entries = registry_history.read(registry, NAME)
    assert list_history_findings() == []
    reseal(SignedRegistry(tmp_path, registry), entries[-1].number, by="mallory")
    with pytest.raises(RegistryError, match=f"entry {entries[-1].number} .* differs from its checkpoint: .* rewritten"):
        rollback(NAME, reporter=QUIET)
    registry.delete_model_version(HISTORY, str(entries[-1].number))
    with pytest.raises(RegistryError, match=f"the history lacks entry {entries[-1].number}"):
        promote(NAME, "1", force=True, reason="mine", reporter=QUIET)


def test_resealed_history_is_found_without_its_checkpoint(signed: SignedRegistry) -> None:
    reseal(signed, find_entry(signed, "promote").number, by="mallory")
    shutil.rmtree(signed.store / "checkpoints")
    assert all("edited" not in finding for finding in list_findings())  # the seals are consistent
    with pytest.raises(RegistryError, match="its signature is for other content"):
        rollback(NAME, reporter=QUIET)
    assert any("its signature is for other content" in one for one in signed.verify().objections)
    assert any("its signature is for other content" in one for one in list_serving_objections())


def test_missing_checkpoint_is_refused_until_the_audit_writes_one(signed: SignedRegistry) -> None:
    """Otherwise an attacker removes the checkpoint with the newest entries, such as a rollback."""
    shutil.rmtree(signed.store / "checkpoints")
    newest = registry_history.read(signed.client, NAME)[-1]
    signed.client.delete_model_version(HISTORY, str(newest.number))
    with pytest.raises(RegistryError, match=r"requires signatures; the checkpoint .*helper.json does not exist"):
        rollback(NAME, reporter=QUIET)
    assert any("has no checkpoint" in note for note in audit(NAME, reporter=QUIET).notes)
    assert any("does not exist" in objection for objection in list_serving_objections("1"))
    assert "the history has no checkpoint outside of the database" in signed.verify("1").objections
    audit(NAME, repair=True, by="ann", reporter=QUIET)
    checkpoint = checkpoints.read(NAME)
    assert checkpoint is not None
    assert checkpoint.entries == registry_history.read(signed.client, NAME)[-1].number


def test_history_without_its_signatures_is_found_by_its_checkpoint(signed: SignedRegistry) -> None:
    for entry in registry_history.read(signed.client, NAME):
        signed.client.delete_model_version_tag(HISTORY, str(entry.number), "tuneline.signature")
    reseal(signed, 1, by="mallory")
    assert "the history is not signed" in signed.verify().objections
    with pytest.raises(RegistryError, match="differs from its checkpoint"):
        rollback(NAME, reporter=QUIET)


@pytest.mark.parametrize("resealed", [False, True])
def test_weaker_policy_in_the_history_is_refused(signed: SignedRegistry, resealed: bool) -> None:
    strict = Policy(approvers=["ann", "bob"], approvals_required=2, signatures="required")
    entry = promotion_policy.set_policy(signed.client, NAME, strict, "ann")
    weaker = Policy(approvers=["mallory"]).model_dump_json(exclude_none=True)
    if resealed:
        reseal(signed, entry.number, reason=weaker)
        with pytest.raises(RegistryError, match=f"entry {entry.number} of the history does not verify"):
            promote(NAME, "1", by="mallory", force=True, reason="mine", reporter=QUIET)
    else:
        signed.client.set_model_version_tag(HISTORY, str(entry.number), "tuneline.reason", weaker)
    reason = f"entry {entry.number} of the history does not verify: its signature is for other content"
    assert any(reason in objection for objection in list_serving_objections())


@pytest.mark.parametrize("state", ["pending", "done"])
def test_forged_promotion_overrules_no_objection(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A forged entry claims to be a promotion that was forced despite the objections."""
    monkeypatch.setattr(servable_versions, "CLOSE_TIMEOUT_SECONDS", 0.0)
    edit_record(signed.find_record("model"), lambda record: corrupt(record["attestation"]))
    entries = registry_history.read(signed.client, NAME)
    [objection] = list_serving_objections()
    finding = f"entry {len(entries) + 1} of the history does not verify: it is not signed, unlike an earlier entry"
    forged = Entry(
        number=len(entries) + 1,
        kind="promote",
        alias="champion",
        to="2",
        digest=signed.get_digest("model"),
        evaluation=signed.get_digest("evaluation"),
        at=entries[-1].at,
        forced=registry_history.join_objections([objection, finding]),
        state=state,
    )
    seal = registry_history.compute_seal(forged, entries[-1].seal)
    fields = forged.model_copy(update={"seal": seal}).model_dump(by_alias=True, exclude={"number"})
    tags = {TAG_PREFIX + key: str(value) for key, value in fields.items() if value not in ("", None)}
    signed.client.create_model_version(HISTORY, "tuneline-history:/helper", tags=tags)
    assert list_serving_objections() == ([objection] if state == "pending" else [finding])


def test_policy_from_before_the_first_signature_is_covered_in_a_deployment(signed: SignedRegistry) -> None:
    """An attacker removes the signatures up to the policy, and edits the policy without computing the seals again."""
    policy = find_entry(signed, "policy")
    for number in range(1, policy.number + 1):
        signed.client.delete_model_version_tag(HISTORY, str(number), "tuneline.signature")
    signed.client.set_model_version_tag(HISTORY, str(policy.number), "tuneline.reason", "{}")
    assert f"entry {policy.number} of the history was edited" in list_serving_objections()


def test_deleted_policy_is_refused_by_a_deployment(signed: SignedRegistry) -> None:
    entry = find_entry(signed, "policy")
    signed.client.delete_model_version(HISTORY, str(entry.number))
    assert f"entry {entry.number} of the history was deleted" in list_serving_objections()


@pytest.mark.parametrize("before_signing", [False, True])
def test_edited_acknowledgement_acknowledges_nothing(signed: SignedRegistry, before_signing: bool) -> None:
    """An attacker edits an acknowledgement so that it names the finding about its own edit."""
    intent = Entry(kind="acknowledged", by="ann", reason="an old finding")
    entry = alias_moves.move_alias(signed.client, NAME, intent)
    number = 1 if before_signing else entry.number
    if before_signing:
        signed.client.delete_model_version_tag(HISTORY, "1", "tuneline.signature")
        signed.client.set_model_version_tag(HISTORY, "1", "tuneline.kind", "acknowledged")
    [finding] = [
        what
        for _, what in history_signatures.list_findings(
            [
                one.model_copy(update={"reason": "edited"}) if one.number == entry.number else one
                for one in registry_history.read(signed.client, NAME)
            ],
            NAME,
            trust_root.load_trust([signed.public_key]),
        )
    ]
    signed.client.set_model_version_tag(HISTORY, str(entry.number), "tuneline.by", "mallory")
    signed.client.set_model_version_tag(HISTORY, str(number), "tuneline.reason", finding)
    assert finding in list_findings()
    with pytest.raises(RegistryError, match="does not verify"):
        rollback(NAME, reporter=QUIET)


@pytest.mark.parametrize("kind", ["approval", "promote"])
def test_replayed_entry_of_another_version_is_refused(signed: SignedRegistry, kind: str) -> None:
    """The seal is computed again for the copy, as an attacker with the database can; the signature is the original's."""
    entries = registry_history.read(signed.client, NAME)
    first = next(entry for entry in entries if entry.kind == "promote")
    copied = first.model_copy(update={"number": len(entries) + 1, "kind": kind, "to": "2"})
    sealed = copied.model_copy(update={"seal": registry_history.compute_seal(copied, entries[-1].seal)})
    fields = sealed.model_dump(by_alias=True, exclude={"number"})
    tags = {TAG_PREFIX + key: str(value) for key, value in fields.items() if value not in ("", None)}
    signed.client.create_model_version(HISTORY, "tuneline-history:/helper", tags=tags)
    number = len(entries) + 1
    with pytest.raises(RegistryError, match=f"entry {number} .* other content: entry {first.number} of helper"):
        rollback(NAME, reporter=QUIET)


def test_entry_dated_before_its_predecessor_is_found(signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    class PastTime(registry_history.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2001, 1, 1, tzinfo=tz)

    with monkeypatch.context() as patch:
        patch.setattr(registry_history, "datetime", PastTime)
        intent = Entry(kind="evaluation", to="2", by="mallory", evaluation="e" * 64)
        entry = alias_moves.move_alias(signed.client, NAME, intent)
    reason = f"entry {entry.number} of the history is dated 2001-01-01 00:00, before an earlier entry"
    assert any(finding.startswith(reason) for finding in list_findings())
    with pytest.raises(RegistryError, match=reason):
        rollback(NAME, reporter=QUIET)


def test_history_of_another_model_is_refused(signed: SignedRegistry) -> None:
    for name, suffix in ((NAME, ""), (HISTORY, ".history")):
        signed.client.rename_registered_model(name, f"renamed{suffix}")
    result = provenance_bundle.verify(
        provenance_bundle.collect("renamed", "champion"), trust_root.load_trust([signed.public_key])
    )
    assert any("other content: entry 1 of helper" in objection for objection in result.objections)
    with pytest.raises(RegistryError, match="other content: entry 1 of helper"):
        rollback("renamed", reporter=QUIET)


def test_alias_moved_to_another_signed_version_is_refused(signed: SignedRegistry) -> None:
    signed.client.set_registered_model_alias(NAME, "champion", "1")
    assert signed.verify().objections == ["champion is at version 2 in the history; the bundle is about version 1"]


@pytest.mark.parametrize("tag", ["model_sha256", "evaluation_sha256"])
def test_tag_with_the_digest_of_another_signed_artifact_is_refused(signed: SignedRegistry, tag: str) -> None:
    signed.client.set_model_version_tag(
        NAME, "2", f"tuneline.{tag}", signed.get_digest(tag.removesuffix("_sha256"), "1")
    )
    assert any("moved champion" in objection for objection in signed.verify().objections)


def test_bundle_that_states_another_version_is_refused(signed: SignedRegistry, tmp_path: Path) -> None:
    bundle = provenance_bundle.collect(NAME, "champion")
    provenance_bundle.write(bundle, tmp_path / "bundle")
    read = provenance_bundle.read(tmp_path / "bundle")
    assert read == bundle
    older = provenance_bundle.collect(NAME, "1").index.model_copy(update={"alias": "champion"})
    trust = trust_root.load_trust([signed.public_key])
    forged = read.model_copy(update={"index": older, "records": {**read.records, **_all_records(signed)}})
    assert provenance_bundle.verify(forged, trust).objections == [
        "champion is at version 2 in the history; the bundle is about version 1"
    ]


def test_statement_is_read_from_the_record_that_verifies(signed: SignedRegistry) -> None:
    bundle = provenance_bundle.collect(NAME, "champion")
    sha256 = bundle.index.artifacts["evaluation"]
    [record] = bundle.records[sha256]
    forged = record.model_copy(update={"statements": {"evaluation.json": "{}"}})
    trust = trust_root.load_trust([signed.public_key])
    first = bundle.model_copy(update={"records": {**bundle.records, sha256: [forged, record]}})
    assert provenance_bundle.verify(first, trust).objections == []
    alone = bundle.model_copy(update={"records": {**bundle.records, sha256: [forged]}})
    [objection] = provenance_bundle.verify(alone, trust).objections
    assert "evaluation.json in its record differs from the signed file" in objection


@pytest.mark.long
def test_forced_promotion_of_a_refused_version_is_noted(signed: SignedRegistry, customize: Customization) -> None:
    made = customize("three", "refused", packaged=False)
    register(made.model, made.evaluation, None, ModelRegistryConfig(name=NAME), reporter=QUIET)
    assert signed.verify("3").objections == ["its evaluation's verdict is refused"]
    promote(NAME, "3", force=True, reason="the gate is wrong", by="ann", reporter=QUIET)
    result = signed.verify()
    assert result.objections == []
    assert result.forced
    assert result.forced.overrules
    assert (result.forced.by, result.forced.reason) == ("ann", "the gate is wrong")
    assert "its evaluation's verdict is refused" in result.forced.objections
    lines = verification._format_verification(result)
    assert any(line.startswith("! PROMOTED BY FORCE by ann in entry ") for line in lines)
    assert "! reason of the forced promotion: the gate is wrong" in lines
    assert lines[-1].endswith(", promoted with --force")
    promote(NAME, "2", force=True, reason="back", reporter=QUIET)
    rollback(NAME, reporter=QUIET)  # restores what the forced promotion decided
    result = signed.verify()
    assert result.objections == []
    assert result.forced
    bundle = provenance_bundle.collect(NAME, "champion")
    trust = trust_root.load_trust([signed.public_key])
    for name, changes in FORCED_ENTRY_CHANGES.items():
        history = [
            entry.model_copy(update=changes) if entry.kind == "promote" and entry.to == "3" else entry
            for entry in bundle.history
        ]
        found = provenance_bundle.verify(bundle.model_copy(update={"history": history}), trust)
        assert not (found.forced and found.forced.overrules), name
        note = "! the forced promotion does not override the verdict: it has no valid signature, or refers to another evaluation"
        assert (note in verification._format_verification(found)) == bool(found.forced), name
        assert "its evaluation's verdict is refused" in found.objections, name
    signed_move = next(entry for entry in bundle.history if entry.kind == "promote" and entry.to == "3")
    other = signed_move.model_copy(update={"number": 0, "forced": "it has no Triton package", "token": ""})
    alias_moves.move_alias(signed.client, NAME, other)
    result = signed.verify()
    assert result.forced
    assert result.objections == ["its evaluation's verdict is refused"]


FORCED_ENTRY_CHANGES: dict[str, dict[str, str]] = {
    "unsigned": {"signature": ""},
    "other evaluation": {"evaluation": "e" * 64},
    "other version": {"to": "1"},
}


def _all_records(signed: SignedRegistry) -> dict[str, list[SignatureRecord]]:
    folders = (signed.store / "signatures").iterdir()
    return {
        folder.name: [SignatureRecord.model_validate_json(path.read_text()) for path in folder.iterdir()]
        for folder in folders
    }


def test_checkpoint_that_lags_behind_is_no_finding(signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # the process ends between the entry and its checkpoint
        patch.setattr(checkpoints, "is_writing", lambda: False)
        rollback(NAME, reporter=QUIET)
    assert list_findings() == []
    newest = registry_history.read(signed.client, NAME)[-1].number
    assert checkpoints.read(NAME).entries < newest  # type: ignore[union-attr]
    promote(NAME, "2", force=True, reason="again", reporter=QUIET)
    assert checkpoints.read(NAME).entries == newest + 1  # type: ignore[union-attr]
    checkpoints.write(NAME, newest, "late", "")  # a slower process
    assert checkpoints.read(NAME).entries == newest + 1  # type: ignore[union-attr]


def test_history_that_grows_during_the_check_is_no_finding(signed: SignedRegistry) -> None:
    earlier = registry_history.read(signed.client, NAME)
    rollback(NAME, reporter=QUIET)
    trust = trust_root.load_trust([signed.public_key])
    assert history_signatures.list_history_findings(signed.client, NAME, earlier, trust) == []


def test_recovered_entry_of_a_killed_process_is_signed(signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(registry_history, "close", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            rollback(NAME, reporter=QUIET)
    assert registry_history.read(signed.client, NAME)[-1].state == "pending"
    assert list_findings() == []
    audit(NAME, repair=True, by="ann", reporter=QUIET)
    newest = registry_history.read(signed.client, NAME)[-1]
    assert (newest.state, bool(newest.signature)) == ("done", True)
    assert signed.verify().objections == []


@pytest.mark.parametrize("replayed", [False, True])
def test_pending_entry_of_a_forger_is_not_signed(signed: SignedRegistry, replayed: bool) -> None:
    """Who can write to the database adds a promotion in another's name, moves the alias, and waits for the next move."""
    entries = registry_history.read(signed.client, NAME)
    now = signed.client.get_model_version_by_alias(NAME, "champion").version
    other = "1" if str(now) == "2" else "2"
    intents = [entry for entry in entries if entry.kind == "promote"]
    forged = Entry(kind="promote", alias="champion", to=other, by="ann", forced="any", token="0" * 32)
    forged = forged.model_copy(update={"owner": alias_moves.ABANDONED_OWNER})
    if replayed:
        forged = forged.model_copy(update={"intent": intents[-1].intent})
        assert forged.intent
    fields = forged.model_dump(by_alias=True, exclude={"number"})
    tags = {TAG_PREFIX + key: str(value) for key, value in fields.items() if value not in ("", None)}
    number = int(signed.client.create_model_version(HISTORY, "tuneline-history:/helper", tags=tags).version)
    signed.client.set_registered_model_alias(NAME, "champion", other)
    audit(NAME, repair=True, by="bob", reporter=QUIET)
    closed = registry_history.read_entry(signed.client, NAME, number)
    assert (closed.state, closed.note) == ("void", "no trusted signer signed this entry before its move")
    moves = registry_history.list_completed_moves(registry_history.read(signed.client, NAME), "champion")
    assert (moves[-1].kind, moves[-1].to) == ("foreign", other), "moved outside of tuneline"


@pytest.mark.long  # repeats a move for each of its writes
def test_move_killed_before_any_write_raises_no_false_alarm(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for write in range(40):
        current = signed.client.get_model_version_by_alias(NAME, "champion").version
        target = "1" if str(current) == "2" else "2"
        with kill_before_write(monkeypatch, write) as kills:
            promote(NAME, target, force=True, reason="kill", reporter=QUIET)
        assert [what for what in list_findings() if "champion is at" not in what] == []
        audit(NAME, repair=True, by="ann", reporter=QUIET)
        newest = registry_history.read(signed.client, NAME)[-1]
        assert newest.state == "pending" or newest.signature
        assert signed.verify().objections == []
        if not kills:
            break
    assert write > 5


@pytest.mark.long
def test_history_from_before_the_first_signed_entry_is_covered(
    registry: Any, signed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote_bare_versions(registry)
    unsigned = registry_history.read(registry, NAME)[-1]
    shutil.copytree(signed_run / "keys", tmp_path / "keys")
    set_signing(tmp_path, monkeypatch)
    promote(NAME, "1", force=True, reason="signed", reporter=QUIET)
    assert list_history_findings() == []
    reseal(SignedRegistry(tmp_path, registry), unsigned.number, by="mallory")
    assert any("its signature is for other content" in finding for finding in list_findings())


def test_dataset_is_signed_at_any_recorded_location(
    signed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(signed_run / "keys", tmp_path / "keys")
    set_signing(tmp_path, monkeypatch)
    dataset = build_dataset(tmp_path / "dataset")
    model = build(tmp_path / "model", "model", "a", [dataset.as_input(str(dataset.path))], {})
    evaluation = build(tmp_path / "evaluation", "evaluation", "b", [model.as_input(), dataset.as_input()], {})
    notes: list[str] = []
    reporter = SilentReporter()
    monkeypatch.setattr(reporter, "note", notes.append)
    signature_checks.sign_version([model, evaluation], "", reporter)
    trust = trust_root.load_trust([tmp_path / "keys" / "signing.pub"])
    for artifact in (dataset, model, evaluation):
        signature_checks.require_signature(artifact, trust)
    assert notes == []
    shutil.rmtree(dataset.path)
    signature_checks.sign_version([model, evaluation], "", reporter)
    assert [f"the dataset {dataset.sha256[:12]} is not available" in note for note in notes] == [True]


def test_run_without_a_key_reports_before_training_that_the_policy_refuses(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CustomizationConfig.model_validate({"model_registry": {"name": NAME}})
    assert policy_preflight.list_objections(config, None, []) == []
    with monkeypatch.context() as patch:
        patch.delenv("TUNELINE_SIGNING_KEY_FILE")
        patch.setattr(registry_history, "check_key", lambda *_: None)  # a policy before the first signature
        [objection] = policy_preflight.list_objections(config, None, [])
    assert objection.endswith(
        "requires signatures; neither TUNELINE_SIGNING_KEY_FILE nor TUNELINE_SIGNING_SIGSTORE_FILE is set"
    )
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(signed.folder / "missing.key"))
    with pytest.raises(ConfigurationError, match=r"missing\.key: found no readable file \(No such file or directory\)"):
        policy_preflight.list_objections(config, None, [])


@pytest.mark.parametrize("tagged", [True, False])
def test_run_without_a_key_is_refused_before_training_by_a_signed_history(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch, tagged: bool
) -> None:
    """Its registration would fail. The tag of the history alone is no protection: anyone can delete it."""
    if not tagged:
        signed.client.delete_registered_model_tag(HISTORY, registry_history.SIGNED_TAG)
    monkeypatch.delenv("TUNELINE_SIGNING_KEY_FILE")
    config = CustomizationConfig.model_validate({"model_registry": {"name": NAME}})
    with pytest.raises(RegistryError, match="the history of helper is signed, and this process has no signing key"):
        policy_preflight.check_policy(config, None, [], QUIET)


def test_unusable_key_ends_a_promotion_before_its_entry(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the alias would move, and the entry remain pending."""
    before = registry_history.read(signed.client, NAME)
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(signed.folder / "missing.key"))
    with pytest.raises(ConfigurationError, match=r"missing\.key: found no readable file"):
        rollback(NAME, reporter=QUIET)
    assert registry_history.read(signed.client, NAME) == before
    assert str(signed.client.get_model_version_by_alias(NAME, "champion").version) == "2"


def test_private_key_that_others_can_read_is_refused(signed: SignedRegistry) -> None:
    path = signed.folder / "keys" / "signing.key"
    for mode in (0o640, 0o604, 0o622):
        path.chmod(mode)
        with pytest.raises(ConfigurationError, match=f"signing.key has mode {mode:04o}, so other users") as error:
            signing_keys.load_signing_key()
        assert f"chmod 600 {path}" in error.value.hint
    path.chmod(0o400)
    assert signing_keys.load_signing_key()


def test_file_with_several_keys_is_refused(signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the first counts and the others are ignored without a word."""
    _, other, _ = signing_keys.generate_key_pair(signed.folder / "other")
    both = signed.folder / "both.pem"
    both.write_text(signed.public_key.read_text() + other.read_text())
    with pytest.raises(ConfigurationError, match=r"both.pem: found 2 keys in one file; expected an elliptic-curve key"):
        trust_root.load_trust([both])
    write_certificates(signed.folder / "site", "site-ca")
    both.write_text(signed.public_key.read_text() + (signed.folder / "site" / "ca.pem").read_text())
    with pytest.raises(ConfigurationError, match=r"found a key and certificates \(1\) in one file"):
        trust_root.load_trust([both])
    private = signed.folder / "keys" / "signing.key"
    with private.open("a") as file:
        file.write((signed.folder / "other" / "signing.key").read_text())
    with pytest.raises(ConfigurationError, match=r"signing.key: found 2 keys in one file"):
        signing_keys.load_signing_key()


def test_shared_artifact_keeps_the_record_of_a_retired_key(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rotation, the next registration signs the dataset again, which version 2 shares."""
    _, other, _ = signing_keys.generate_key_pair(signed.folder / "new")
    sha256 = signed.get_digest("dataset")
    dataset = signature_checks.find_artifact(sha256)
    assert dataset
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(signed.folder / "new" / "signing.key"))
    for _ in range(2):
        signature_checks.sign_version([dataset], "", QUIET)
        assert len(load_records(signed.store, sha256)) == 2
    for key in (signed.public_key, other):
        signature_checks.require_signature(dataset, trust_root.load_trust([key]))
    assert signed.verify().objections == []


def test_record_of_an_earlier_release_verifies(signed: SignedRegistry) -> None:
    """Its name is the digest of the manifest without the ID of the key."""
    record = signed.find_record("model")
    record.rename(record.with_name(f"{record.name.partition('.')[0]}.json"))
    assert signed.verify().objections == []
    assert list_serving_objections() == []


def test_key_of_another_kind_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "ed25519.key"
    content = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(content)
    path.chmod(0o600)
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(path))
    with pytest.raises(ConfigurationError, match="found another kind of key; expected an elliptic-curve key"):
        signing_keys.load_signing_key()
    path.write_text("no key")
    with pytest.raises(ConfigurationError, match="found no valid PEM file"):
        signing_keys.load_signing_key()
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"found no readable file \(No such file or directory\)"):
        signing_keys.load_signing_key()


def test_encrypted_key_needs_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_PASSWORD", "secret")
    private, _, key_id = signing_keys.generate_key_pair(tmp_path)
    assert private.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(private))
    key = signing_keys.load_signing_key()
    assert key is not None
    assert key.key_id == key_id
    assert "secret" not in repr(key)
    monkeypatch.delenv("TUNELINE_SIGNING_KEY_PASSWORD")
    with pytest.raises(ConfigurationError, match="found a key with another password"):
        signing_keys.load_signing_key()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("pkcs11:object=a", "has module-path=.; expected the absolute path of the module's shared library"),
        ("pkcs11:object=a?module-path=hsm.so", "has module-path=hsm.so; expected the absolute path"),
        ("pkcs11:token=t?module-path=/hsm.so", "has no object and no id; expected the label"),
        ("pkcs11:object=a;object=b?module-path=/hsm.so", "has the attribute 'object'; expected each of token"),
        ("pkcs11:object=a;slot-id=1?module-path=/hsm.so", "has the attribute 'slot-id'; expected each of token"),
        ("pkcs11:object=a;type=public?module-path=/hsm.so", "has type=public; expected type=private"),
        ("pkcs11:object=a?module-path=/hsm.so&pin-value=1234", "has the attribute pin-value; expected the PIN in"),
        *(
            (
                f"pkcs11:object=a?module-path=/hsm.so&pin-source={pin}",
                "has an unsupported pin-source; expected the absolute path",
            )
            for pin in ("|cat", "//host/pin", "//[pin", "/pin%00", "http:/pin")
        ),
        ("pkcs11:object=a?module-path=/missing/hsm.so", "the PKCS#11 module /missing/hsm.so does not exist"),
    ],
)
def test_unusable_pkcs11_uri_is_reported(uri: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/engines/test_hardware_keys.py has the tests with a token."""
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", uri)
    with pytest.raises(ConfigurationError, match=r"^TUNELINE_SIGNING_KEY_FILE: the ") as error:
        signing_keys.load_signing_key()
    assert problem in error.value.message
    assert "1234" not in error.value.message + error.value.hint


def test_certificate_of_a_trusted_authority_signs(
    signed: SignedRegistry, monkeypatch: pytest.MonkeyPatch, customize: Customization
) -> None:
    for name, authority in (("site", "site-ca"), ("other", "other-ca")):
        write_certificates(signed.folder / name, authority)
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", str(signed.folder / "site" / "leaf.key"))
    monkeypatch.setenv("TUNELINE_SIGNING_CERTIFICATES_FILE", str(signed.folder / "site" / "chain.pem"))
    authority = signed.folder / "site" / "ca.pem"
    monkeypatch.setenv("TUNELINE_TRUST", f"{signed.public_key}{os.pathsep}{authority}")
    made = customize("three", incumbent=signed.get_digest("model"))
    register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=QUIET)
    assert promote(NAME, "3", reporter=QUIET).to == "3"
    bundle = provenance_bundle.collect(NAME, "champion")
    verify = provenance_bundle.verify
    assert verify(bundle, trust_root.load_configured_trust()).objections == []
    write_certificates(signed.folder / "forger", "forged-ca", key=signed.folder / "site" / "leaf.key", subject="ann")
    for forged in ((signed.folder / "forger" / "chain.pem").read_text(), "no certificate"):
        for record in [record for records in bundle.records.values() for record in records if record.certificates]:
            record.certificates = forged  # which no signature covers
        result = verify(bundle, trust_root.load_configured_trust())
        assert result.objections == []  # the bundle has the certificates of all keys as well
        signers = {(one.signer.kind, one.signer.identity, one.signer.issuer) for one in result.artifacts}
        assert ("certificate", "CN=registry", "CN=site-ca") in signers
        assert not any("ann" in identity for _, identity, _ in signers)
    others = trust_root.load_trust([signed.public_key, signed.folder / "other" / "ca.pem"])
    objections = verify(bundle, others).objections
    assert any("its model" in one and "which is not trusted" in one for one in objections)
    (made.model.path / "extra.txt").write_text("")
    with pytest.raises(SignatureInvalidError, match="Extra files"):
        signature_checks.check_artifact(made.model, trust_root.load_configured_trust())


def write_certificates(
    folder: Path, authority_name: str, purpose: str = "", *, key: Path | None = None, subject: str = "registry"
) -> None:
    """Write an authority's certificate, and a key with a certificate that it signed.

    Args:
        purpose: object identifier of the certificate's extended key usage.
        key: file of an existing key to certify; None for a new one.
    """
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    def build(subject: str, public: Any, issuer: str, issuer_key: Any, *, ca: bool) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
        begin = datetime(2026, 1, 1, tzinfo=UTC)
        usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
        builder = x509.CertificateBuilder(names[1], names[0], public, x509.random_serial_number())
        builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=365))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        if purpose and not ca:
            extended = x509.ExtendedKeyUsage([x509.ObjectIdentifier(purpose)])
            builder = builder.add_extension(extended, critical=False)
        return builder.sign(issuer_key, SHA256())

    folder.mkdir()
    root = ec.generate_private_key(ec.SECP256R1())
    leaf: Any = load_pem_private_key(key.read_bytes(), None) if key else ec.generate_private_key(ec.SECP256R1())
    authority = build(authority_name, root.public_key(), authority_name, root, ca=True)
    certificate = build(subject, leaf.public_key(), authority_name, root, ca=False)
    (folder / "ca.pem").write_bytes(authority.public_bytes(Encoding.PEM))
    (folder / "chain.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    content = leaf.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "leaf.key").write_bytes(content)
    (folder / "leaf.key").chmod(0o600)


@pytest.mark.parametrize("unsigned", [False, True])
def test_closed_entry_that_was_made_pending_is_found(signed: SignedRegistry, unsigned: bool) -> None:
    """An attacker sets the policy's entry to pending, so that no policy is in force."""
    policy = find_entry(signed, "policy")
    if unsigned:
        for number in range(1, policy.number + 1):
            signed.client.delete_model_version_tag(HISTORY, str(number), "tuneline.signature")
    signed.client.set_model_version_tag(HISTORY, str(policy.number), "tuneline.state", "pending")
    reason = f"entry {policy.number} of the history was edited"
    assert reason in list_findings()
    assert reason in signed.verify().objections
    assert reason in list_serving_objections()


def test_ancestor_that_is_also_the_incumbent_needs_a_signature(tmp_path: Path) -> None:
    ancestor = build(tmp_path / "ancestor", "model", "a", [], {})
    source = ArtifactInput(kind="initial_adapter", content_sha256=ancestor.sha256, uri=f"store:{ancestor.sha256}")
    model = build(tmp_path / "model", "model", "b", [source], {})
    compared = source.model_copy(update={"kind": "incumbent"})
    evaluation = build(tmp_path / "evaluation", "evaluation", "c", [compared, model.as_input()], {})
    signing_keys.generate_key_pair(tmp_path / "keys")
    with pytest.MonkeyPatch.context() as patch:
        set_signing(tmp_path, patch)
        signature_checks.sign_version([model, evaluation], "", QUIET)
        trust = trust_root.load_configured_trust()
    store = tmp_path / "workdir" / "store"
    roots = {evaluation.sha256: "evaluation", model.sha256: "model"}
    objections = signature_checks.check_lineage(roots, partial(load_records, store), trust).objections
    assert objections == [f"its initial adapter {ancestor.sha256[:12]} does not verify: it has no signature"]


def test_bundle_with_an_artifact_of_another_kind_is_refused(signed: SignedRegistry) -> None:
    bundle = provenance_bundle.collect(NAME, "champion")
    artifacts = {**bundle.index.artifacts, "repository": bundle.index.artifacts["evaluation"]}
    forged = bundle.model_copy(update={"index": bundle.index.model_copy(update={"artifacts": artifacts})})
    trust = trust_root.load_trust([signed.public_key])
    assert "its repository is of another kind: evaluation" in provenance_bundle.verify(forged, trust).objections


def test_bundle_without_the_package_is_noted(signed: SignedRegistry) -> None:
    bundle = provenance_bundle.collect(NAME, "champion")
    bundle.index.artifacts.pop("repository")
    notes = provenance_bundle.verify(bundle, trust_root.load_trust([signed.public_key])).notes
    assert "the version has no Triton package" in notes


def test_number_of_another_version_is_refused(signed: SignedRegistry) -> None:
    """The bundle of version 1 claims to be version 2 without a promotion."""
    bundle = provenance_bundle.collect(NAME, "1")
    trust = trust_root.load_trust([signed.public_key])
    assert provenance_bundle.verify(bundle, trust).objections == []
    forged = bundle.model_copy(update={"index": bundle.index.model_copy(update={"version": "2"})})
    assert any("entry" in one and "version 2" in one for one in provenance_bundle.verify(forged, trust).objections)


def test_trust_without_a_key_is_an_error(tmp_path: Path) -> None:
    """Otherwise, a process with this trust would check no history."""
    (tmp_path / "trust.yaml").write_text(f"revoked: [{'ab' * 32}]\n")
    with pytest.raises(ConfigurationError, match=r"trust.yaml list no public key, certificate authority or identity"):
        trust_root.load_trust([tmp_path / "trust.yaml"])


@pytest.mark.parametrize("purpose", ["code signing", "server authentication"])
@pytest.mark.parametrize("revoked", [False, True])
def test_certificate_counts_for_its_purpose_unless_its_authority_is_revoked(
    tmp_path: Path, purpose: str, revoked: bool
) -> None:
    usage = {"code signing": "1.3.6.1.5.5.7.3.3", "server authentication": "1.3.6.1.5.5.7.3.1"}[purpose]
    write_certificates(tmp_path / "site", "site-ca", usage)
    chain, root = ((tmp_path / "site" / name).read_text() for name in ("chain.pem", "ca.pem"))
    trust = trust_root.load_trust([tmp_path / "site" / "ca.pem"])
    if revoked:
        [authority] = trust.authorities
        key_id = signing_keys.compute_key_id(authority.public_key())  # type: ignore[arg-type]
        trust = replace(trust, revoked=frozenset([key_id]))
    is_trusted = purpose == "code signing" and not revoked
    assert bool(trust.add_certificates([chain + root]).keys) == is_trusted


def test_digest_in_a_tag_is_no_path(signed: SignedRegistry) -> None:
    outside = signed.store.parent / "outside"
    shutil.copytree(signed.find_record("model").parent, outside)
    assert load_records(signed.store, "../../outside") == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_folder_with_an_unlisted_file_or_a_link_is_not_signed(
    signed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Otherwise, its signature would verify nowhere."""
    shutil.copytree(signed_run / "keys", tmp_path / "keys")
    set_signing(tmp_path, monkeypatch)
    model = build(tmp_path / "model", "model", "a", [], {})
    if kind == "file":
        (model.path / "notes.txt").write_text("")
    else:
        (model.path / "notes.txt").symlink_to("report.html")
    reason = "its manifest does not list notes.txt" if kind == "file" else "notes.txt' because it is a symlink"
    with pytest.raises(SignatureInvalidError, match=f"model cannot be signed: .*{reason}"):
        signature_checks.sign_version([model], "", QUIET)
    assert not (tmp_path / "workdir" / "store" / "signatures").exists()
