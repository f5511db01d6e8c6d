"""Promotion policies: approvers and the number of required approvals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import ConfigurationError, RegistryError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import alias_moves, policy_checks, promotion_policy, registry_history, release_policy
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.promotion_policy import ApprovalNeededError
from components.model_registry.registry_history import Entry
from components.model_registry.release_policy import Policy
from components.model_registry.stage import auto_promote, find_champion, promote, register, rollback
from tests.model_registry.conftest import NAME, Customization
from tests.model_registry.evidence_builder import build_evaluation
from tests.pipelines.command import ROOT

TWO_APPROVALS = Policy(approvers=["ann", "bob", "cara"], approvals_required=2)


@pytest.mark.mlflow
def test_only_listed_approvers_promote_and_roll_back(versions: Any) -> None:
    policy = Policy(approvers=["ann"])
    with pytest.raises(ApprovalNeededError, match="mallory is not an approver") as error:
        promote(NAME, "1", by="mallory", policy=policy, reporter=SilentReporter())
    assert "ann" in error.value.hint
    promote(NAME, "1", by="ann", policy=policy, reporter=SilentReporter())
    promote(NAME, "2", by="ann", policy=policy, reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="mallory is not an approver"):
        rollback(NAME, by="mallory", policy=policy, reporter=SilentReporter())
    assert rollback(NAME, by="ann", policy=policy, reporter=SilentReporter()).to == "1"


@pytest.mark.mlflow
def test_two_required_approvals_must_come_from_different_users(versions: Any) -> None:
    for _ in range(2):
        with pytest.raises(ApprovalNeededError, match="approved by ann, and 1 more approval is needed") as error:
            promote(NAME, "1", by="ann", policy=TWO_APPROVALS, reporter=SilentReporter())
        assert "bob, cara" in error.value.hint
    assert find_champion(NAME) is None
    assert promote(NAME, "1", by="cara", policy=TWO_APPROVALS, reporter=SilentReporter()).to == "1"
    entries = registry_history.read(versions, NAME)
    assert [entry.by for entry in entries if entry.kind == "approval"] == ["ann"]
    assert entries[-1].by == "ann, cara"
    assert can_roll_back_with_one_approval(versions)


def can_roll_back_with_one_approval(versions: Any) -> bool:
    promote(NAME, "2", by="forced in", force=True, reason="the test", reporter=SilentReporter())
    return rollback(NAME, by="bob", policy=TWO_APPROVALS, reporter=SilentReporter()).to == "1"


@pytest.mark.mlflow
def test_approval_is_bound_to_force_flag_and_champion(versions: Any) -> None:
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "2", by="ann", force=True, reason="in a hurry", policy=TWO_APPROVALS, reporter=SilentReporter())
    promote(NAME, "1", by="ann", reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="approved by bob,"):
        promote(NAME, "2", by="bob", policy=TWO_APPROVALS, reporter=SilentReporter())
    assert promote(NAME, "2", by="cara", policy=TWO_APPROVALS, reporter=SilentReporter()).to == "2"


@pytest.mark.mlflow
def test_approval_is_bound_to_its_evaluation(registry: Any, customize: Customization) -> None:
    config = ModelRegistryConfig(name=NAME)
    artifacts = customize("one")
    register(artifacts.model, artifacts.evaluation, artifacts.repository, config, reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "1", by="ann", policy=TWO_APPROVALS, reporter=SilentReporter())
    dataset = artifact_folder.read(Path(artifacts.model.manifest.find_input("dataset").uri))
    folder = artifacts.model.path.parent / "again"
    new_evaluation = build_evaluation(folder, artifacts.model.manifest, dataset, min_items=3)
    register(artifacts.model, new_evaluation, artifacts.repository, config, reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="approved by bob,"):
        promote(NAME, "1", by="bob", policy=TWO_APPROVALS, reporter=SilentReporter())


@pytest.mark.mlflow
def test_approval_is_not_reusable_after_rollback(versions: Any) -> None:
    promote(NAME, "1", by="ann", reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "2", by="ann", policy=TWO_APPROVALS, reporter=SilentReporter())
    promote(NAME, "2", by="bob", policy=TWO_APPROVALS, reporter=SilentReporter())
    rollback(NAME, by="cara", policy=TWO_APPROVALS, reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="approved by bob, and 1 more approval is needed"):
        promote(NAME, "2", by="bob", policy=TWO_APPROVALS, reporter=SilentReporter())
    assert promote(NAME, "2", by="cara", policy=TWO_APPROVALS, reporter=SilentReporter()).to == "2"


@pytest.mark.mlflow
def test_recorded_policy_overrides_config_and_only_approvers_change_it(versions: Any) -> None:
    promotion_policy.set_policy(versions, NAME, Policy(approvers=["ann"]), "admin")
    with pytest.raises(ApprovalNeededError, match="mallory is not an approver"):
        promote(NAME, "1", by="mallory", policy=Policy(approvers=["mallory"]), reporter=SilentReporter())
    with pytest.raises(ApprovalNeededError, match="mallory is not an approver"):
        promotion_policy.set_policy(versions, NAME, Policy(), "mallory")
    promotion_policy.set_policy(versions, NAME, Policy(), "ann")
    assert promote(NAME, "1", by="mallory", reporter=SilentReporter()).to == "1"


@pytest.mark.mlflow
def test_pipeline_skips_promotion_when_approvers_are_configured(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_checks, "list_suite_objections", lambda content, source: [])
    notes: list[str] = []

    class NoteRecorder(SilentReporter):
        def note(self, text: str) -> None:
            notes.append(text)

    config = ModelRegistryConfig(name=NAME, approvers=["ann"])
    assert auto_promote(config, "1", incumbent_sha256=None, reporter=NoteRecorder()) is None
    assert notes[0].startswith(
        "helper version 1 is not promoted: pipeline is not an approver. Pass --by NAME with one of: ann"
    )
    assert auto_promote(ModelRegistryConfig(name=NAME), "1", incumbent_sha256=None, reporter=NoteRecorder()) is not None
    assert find_champion(NAME).version == "1"


@pytest.mark.mlflow
def test_pipeline_does_not_repromote_a_rolled_back_version(versions: Any) -> None:
    notes: list[str] = []

    class NoteRecorder(SilentReporter):
        def note(self, text: str) -> None:
            notes.append(text)

    config, first = ModelRegistryConfig(name=NAME), versions.get_model_version(NAME, "1").tags["tuneline.model_sha256"]
    promote(NAME, "1", by="ann", reporter=SilentReporter())
    promote(NAME, "2", force=True, reason="a try", by="ann", reporter=SilentReporter())
    rollback(NAME, by="bob", reason="it swears", reporter=SilentReporter())
    assert auto_promote(config, "2", incumbent_sha256=first, reporter=NoteRecorder()) is None
    assert notes == [
        f"{NAME} version 2 is not promoted: bob rolled the champion back from this version (it swears). "
        f"To promote the version anyway: tuneline promote {NAME} --version 2"
    ]
    assert find_champion(NAME).version == "1"


@pytest.mark.mlflow
def test_tampered_policy_is_reported_and_blocks_promotion(versions: Any) -> None:
    entry = promotion_policy.set_policy(versions, NAME, Policy(approvers=["ann"]), "admin")
    versions.set_model_version_tag(f"{NAME}.history", str(entry.number), "tuneline.reason", "{")
    with pytest.raises(RegistryError, match="because the entry was edited") as error:
        promote(NAME, "1", by="ann", reporter=SilentReporter())
    assert "registry audit" in error.value.hint


@pytest.mark.mlflow
@pytest.mark.parametrize(
    "new_policy", [Policy(approvers=["cara"]), Policy(approvers=["ann", "cara"], approvals_required=2)]
)
def test_policy_change_during_a_pending_promotion_applies(
    versions: Any, monkeypatch: pytest.MonkeyPatch, new_policy: Policy
) -> None:
    move_alias = alias_moves.move_alias

    def move_after_policy_change(client: Any, model: str, intent: Entry, *check: Any) -> Entry:
        if intent.kind in ("promote", "rollback"):
            move_alias(client, model, Entry(kind="policy", by="admin", reason=new_policy.model_dump_json()))
        return move_alias(client, model, intent, *check)

    monkeypatch.setattr(alias_moves, "move_alias", move_after_policy_change)
    with pytest.raises(ApprovalNeededError, match=r"ann is not an approver|changed during the promotion"):
        promote(NAME, "1", by="ann", reporter=SilentReporter())
    assert find_champion(NAME) is None


@pytest.mark.mlflow
def test_policy_change_during_a_pending_rollback_applies(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(NAME, "1", by="ann", reporter=SilentReporter())
    promote(NAME, "2", by="ann", reporter=SilentReporter())
    move_alias = alias_moves.move_alias

    def move_after_policy_change(client: Any, model: str, intent: Entry, *check: Any) -> Entry:
        move_alias(client, model, Entry(kind="policy", by="admin", reason=Policy(approvers=["cara"]).model_dump_json()))
        return move_alias(client, model, intent, *check)

    monkeypatch.setattr(alias_moves, "move_alias", move_after_policy_change)
    with pytest.raises(ApprovalNeededError, match="ann is not an approver"):
        rollback(NAME, by="ann", reporter=SilentReporter())
    assert find_champion(NAME).version == "2"


def test_policy_with_too_few_approvers_is_rejected() -> None:
    for policy_class in (Policy, ModelRegistryConfig):
        with pytest.raises(ValidationError, match="approvals_required is 2; expected at most 1"):
            policy_class(approvers=["ann", "ann"], approvals_required=2)


def test_shipped_policy_is_valid(tmp_path: Path) -> None:
    shipped = release_policy.read_policy(ROOT / "mlflow" / "promotion-policy.yaml")
    assert shipped.approvals_required <= len(shipped.approvers)


def test_policy_file_in_another_encoding_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_bytes("approvers: [Jürgen]".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        release_policy.read_policy(tmp_path / "policy.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("approver: [ann]", "approver: unknown key .did you mean approvers"),
        ("approvers: ann", "approvers: found 'ann'; expected a list"),
        ("a: [", "cannot be read"),
        ("approvers: [ann]\napprovals_required: 1\napprovers: [eve]", "line 3, column 1: duplicate key approvers"),
    ],
)
def test_invalid_policy_file_is_rejected_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as error:
        release_policy.read_policy(tmp_path / "policy.yaml")
    assert "policy.yaml" in error.value.message
