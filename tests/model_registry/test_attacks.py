"""Attacks on the registry itself: edited tags, aliases and history entries end in a refusal or a finding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import RegistryError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import promotion_policy, registry_history, servable_versions
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import audit
from components.model_registry.promotion_policy import ApprovalNeededError
from components.model_registry.release_policy import Policy
from components.model_registry.stage import find_champion, promote, register, rollback
from tests.model_registry.conftest import NAME, Customization

pytestmark = pytest.mark.mlflow
HISTORY = f"{NAME}.history"
QUIET = SilentReporter()
TWO_APPROVALS = Policy(approvers=["ann", "bob"], approvals_required=2)


def list_findings() -> list[str]:
    return [finding.what for finding in audit(NAME, reporter=QUIET).findings]


@pytest.mark.parametrize(
    ("version", "objection"), [("4", "its evaluation's verdict is refused"), ("6", "it has no Triton package")]
)
def test_rollback_to_a_hand_moved_version_without_approval_is_refused(
    versions: Any, version: str, objection: str
) -> None:
    promote(NAME, "1", reporter=QUIET)
    versions.set_registered_model_alias(NAME, "champion", version)
    promote(NAME, "2", force=True, reason="repair", reporter=QUIET)
    with pytest.raises(RegistryError, match=f"cannot be rolled back to version {version} of helper: .*{objection}"):
        rollback(NAME, reporter=QUIET)
    assert find_champion(NAME).version == "2"


def test_rollback_to_a_version_that_was_refused_after_its_promotion_is_refused(
    registry: Any, customize: Customization
) -> None:
    one, config = customize("one"), ModelRegistryConfig(name=NAME)
    two = customize("two", incumbent=one.model.sha256)
    for made in (one, two):
        register(made.model, made.evaluation, made.repository, config, reporter=QUIET)
    for version in ("1", "2"):
        promote(NAME, version, reporter=QUIET)
    refused = customize("one", "refused", packaged=False)
    register(refused.model, refused.evaluation, one.repository, config, reporter=QUIET)
    with pytest.raises(RegistryError, match="its evaluation's verdict is refused"):
        rollback(NAME, reporter=QUIET)


@pytest.mark.parametrize("kind", ["model", "repository"])
def test_rollback_to_changed_bytes_is_refused(registry: Any, customize: Customization, kind: str) -> None:
    one = customize("one")
    two = customize("two", incumbent=one.model.sha256)
    for made in (one, two):
        register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=QUIET)
    for version in ("1", "2"):
        promote(NAME, version, reporter=QUIET)
    shutil.rmtree(Path(one.model.manifest.find_input("dataset").uri))  # a rollback does not need the training rows
    (getattr(one, kind).path / "weights" / "payload.bin").write_text("something else")
    with pytest.raises(RegistryError, match=rf"its {kind} cannot be verified \(weights/payload.bin"):
        rollback(NAME, reporter=QUIET)
    assert find_champion(NAME).version == "2"


def test_model_relabelled_as_a_reward_model_needs_its_package(registry: Any, customize: Customization) -> None:
    """The digest covers the weights, and not the kind in the manifest; reward models are promoted without a package."""
    made = customize("one", packaged=False)
    path = made.model.path / artifact_folder.MANIFEST_FILENAME
    fields = json.loads(path.read_text())
    fields["schema"] = fields["schema"].replace("/model/", "/reward_model/")
    path.write_text(json.dumps({**fields, "manifest_sha256": artifact_folder.compute_manifest_sha256(fields)}))
    relabelled = artifact_folder.read(made.model.path)
    assert (relabelled.manifest.kind, relabelled.sha256) == (artifact_folder.REWARD_MODEL, made.model.sha256)
    with pytest.raises(
        RegistryError, match="the kind in its model's manifest, reward_model, differs from that at its eval"
    ):
        register(relabelled, made.evaluation, None, ModelRegistryConfig(name=NAME), reporter=QUIET)


def test_rollback_to_a_forced_version_is_allowed_and_servable(versions: Any) -> None:
    promote(NAME, "4", force=True, reason="the gate's data is wrong", reporter=QUIET)
    promote(NAME, "2", force=True, reason="back to the gate", reporter=QUIET)
    assert rollback(NAME, reporter=QUIET).to == "4"
    assert servable_versions.list_serving_objections(NAME, "4", "champion") == []


def test_alias_set_by_hand_before_the_first_promotion_stays_a_finding(versions: Any) -> None:
    versions.set_registered_model_alias(NAME, "champion", "1")
    assert list_findings() == ["champion is at version 1; the history records no version"]
    promote(NAME, "2", reporter=QUIET)
    [finding] = list_findings()
    assert finding.startswith("champion was moved from none to 1 outside tuneline")


def test_audit_shows_a_hand_moved_champion_without_evidence(versions: Any) -> None:
    promote(NAME, "1", reporter=QUIET)
    versions.set_registered_model_alias(NAME, "champion", "5")
    assert list_findings() == [
        "champion is at version 5; the history records version 1",
        "version 5 must not be champion: its Triton package is unproven",
    ]
    audit(NAME, repair=True, by="ann", reporter=QUIET)
    assert list_findings() == ["version 5 must not be champion: its Triton package is unproven"]
    assert rollback(NAME, reporter=QUIET).to == "1"
    assert list_findings() == []


def test_edited_policy_blocks_promotion_and_rollback(versions: Any) -> None:
    promote(NAME, "1", reporter=QUIET)
    entry = promotion_policy.set_policy(versions, NAME, TWO_APPROVALS, "admin")
    weaker = Policy(approvers=["mallory"]).model_dump_json()
    versions.set_model_version_tag(HISTORY, str(entry.number), "tuneline.reason", weaker)
    for attempt in (
        lambda: promote(NAME, "2", by="mallory", reporter=QUIET),
        lambda: rollback(NAME, by="mallory", reporter=QUIET),
    ):
        with pytest.raises(RegistryError, match=f"the policy in entry {entry.number} of the history is invalid"):
            attempt()
    with pytest.raises(RegistryError, match="because the entry was edited"):
        promotion_policy.set_policy(versions, NAME, Policy(), "mallory")  # the edited policy names mallory
    audit(NAME, repair=True, by="ann", reporter=QUIET)
    promotion_policy.set_policy(versions, NAME, TWO_APPROVALS, "admin")
    with pytest.raises(ApprovalNeededError, match="mallory is not an approver"):
        promote(NAME, "2", by="mallory", reporter=QUIET)


def test_deleted_policy_blocks_promotion_until_it_is_acknowledged(versions: Any) -> None:
    entry = promotion_policy.set_policy(versions, NAME, TWO_APPROVALS, "admin")
    promotion_policy.set_policy(versions, NAME, TWO_APPROVALS, "ann")
    versions.delete_model_version(HISTORY, str(entry.number))
    with pytest.raises(RegistryError, match=f"entry {entry.number} of the history was deleted"):
        promote(NAME, "1", by="ann", reporter=QUIET)


def test_replayed_approval_does_not_count(versions: Any) -> None:
    promotion_policy.set_policy(versions, NAME, TWO_APPROVALS, "admin")
    with pytest.raises(ApprovalNeededError):
        promote(NAME, "1", by="ann", reporter=QUIET)
    promote(NAME, "1", by="bob", reporter=QUIET)
    with pytest.raises(ApprovalNeededError):
        promote(NAME, "2", by="ann", reporter=QUIET)
    promote(NAME, "2", by="bob", reporter=QUIET)
    rollback(NAME, by="ann", reporter=QUIET)
    approvals = [entry for entry in registry_history.read(versions, NAME) if entry.kind == "approval"]
    copied = versions.get_model_version(HISTORY, str(approvals[-1].number)).tags
    versions.create_model_version(HISTORY, "tuneline-history:/helper", tags=copied)
    with pytest.raises(RegistryError, match=r"an approval in entry .* because the entry was edited"):
        promote(NAME, "2", by="bob", reporter=QUIET)


def test_clock_of_the_past_does_not_revive_an_approval(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class PastTime(registry_history.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2001, 1, 1, tzinfo=tz)

    promotion_policy.set_policy(versions, NAME, TWO_APPROVALS, "admin")
    with pytest.raises(ApprovalNeededError):
        promote(NAME, "1", by="ann", reporter=QUIET)
    monkeypatch.setattr(registry_history, "datetime", PastTime)
    promote(NAME, "1", by="bob", reporter=QUIET)
    with pytest.raises(ApprovalNeededError, match="approved by bob, and 1 more approval is needed"):
        promote(NAME, "2", by="bob", reporter=QUIET)


def test_forged_entry_of_an_earlier_promotion_does_not_skip_the_training_rows(
    registry: Any, customize: Customization
) -> None:
    made = customize("one")
    register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=QUIET)
    shutil.rmtree(Path(made.model.manifest.find_input("dataset").uri))
    claim = {"kind": "promote", "alias": "other", "to": "1", "state": "done", "seal": "0" * 64}
    claim |= {"digest": made.model.sha256, "evaluation": made.evaluation.sha256}
    tags = {f"tuneline.{name}": value for name, value in claim.items()}
    registry.create_model_version(HISTORY, "tuneline-history:/helper", tags=tags)
    with pytest.raises(RegistryError, match="of its lineage is not in the artifact store"):
        promote(NAME, "1", reporter=QUIET)


def test_version_renamed_to_another_model_is_refused(versions: Any) -> None:
    tags = versions.get_model_version(NAME, "1").tags
    source = versions.get_model_version(NAME, "4").source
    versions.create_registered_model("renamed")
    refused = versions.get_model_version(NAME, "4").tags
    mixed = {**tags, **{key: refused[key] for key in ("tuneline.model_sha256", "tuneline.store_uri")}}
    versions.create_model_version("renamed", source, tags=mixed)
    with pytest.raises(RegistryError, match=r"its evaluation measured another model .*built from another model"):
        promote("renamed", "1", reporter=QUIET)


def test_tag_inserted_by_another_process_is_set_again(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import BAD_REQUEST, MlflowException

    message = "(sqlite3.IntegrityError) UNIQUE constraint failed: model_version_tags.key, model_version_tags.name"
    set_tag, failures = type(versions).set_model_version_tag, [MlflowException(message, error_code=BAD_REQUEST)]

    def set_or_fail(self: Any, *arguments: Any) -> None:
        set_tag(self, *arguments)
        if failures and arguments[2] == "tuneline.seal":
            raise failures.pop()

    monkeypatch.setattr(type(versions), "set_model_version_tag", set_or_fail)
    assert promote(NAME, "1", reporter=QUIET).to == "1"
    assert not failures
    assert audit(NAME, reporter=QUIET).clean
