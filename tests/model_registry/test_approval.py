"""Who may promote, and how many it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.errors import ConfigurationError, RegistryError
from components.common.progress import Silent
from components.model_registry import approval, history, moving
from components.model_registry.approval import ApprovalNeededError, Policy
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history import Entry
from components.model_registry.stage import champion, promote, promote_at_once, register, rollback
from tests.model_registry.conftest import NAME, Customization, build
from tests.pipelines.command import ROOT

TWO = Policy(approvers=["ann", "bob", "cara"], approvals_required=2)


@pytest.mark.mlflow
def test_only_a_named_approver_promotes_and_rolls_back(versions: Any) -> None:
    one = Policy(approvers=["ann"])
    with pytest.raises(ApprovalNeededError, match="mallory is no approver") as refused:
        promote(NAME, "1", by="mallory", policy=one, reporter=Silent())
    assert "ann" in refused.value.hint
    promote(NAME, "1", by="ann", policy=one, reporter=Silent())
    promote(NAME, "2", by="ann", policy=one, reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="mallory is no approver"):
        rollback(NAME, by="mallory", policy=one, reporter=Silent())
    assert rollback(NAME, by="ann", policy=one, reporter=Silent()).to == "1"


@pytest.mark.mlflow
def test_two_have_to_approve_where_the_policy_says_two_and_nobody_counts_twice(versions: Any) -> None:
    for _ in range(2):
        with pytest.raises(ApprovalNeededError, match="approved by ann, and 1 more approval is needed") as needed:
            promote(NAME, "1", by="ann", policy=TWO, reporter=Silent())
        assert "bob, cara" in needed.value.hint
    assert champion(NAME) is None
    assert promote(NAME, "1", by="cara", policy=TWO, reporter=Silent()).to == "1"
    entries = history.read(versions, NAME)
    assert [entry.by for entry in entries if entry.kind == "approval"] == ["ann"]
    assert entries[-1].by == "ann, cara"
    assert rollback_is_short(versions)


def rollback_is_short(versions: Any) -> bool:
    promote(NAME, "2", by="forced in", force=True, reason="the test", reporter=Silent())
    return rollback(NAME, by="bob", policy=TWO, reporter=Silent()).to == "1"


@pytest.mark.mlflow
def test_an_approval_with_force_does_not_count_without_nor_one_for_another_champion(versions: Any) -> None:
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "2", by="ann", force=True, reason="in a hurry", policy=TWO, reporter=Silent())
    promote(NAME, "1", by="ann", reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="approved by bob,"):
        promote(NAME, "2", by="bob", policy=TWO, reporter=Silent())
    assert promote(NAME, "2", by="cara", policy=TWO, reporter=Silent()).to == "2"


@pytest.mark.mlflow
def test_an_approval_does_not_count_for_another_evaluation(registry: Any, customize: Customization) -> None:
    config = ModelRegistryConfig(name=NAME)
    made = customize("one")
    register(made.model, made.evaluation, made.repository, config, reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "1", by="ann", policy=TWO, reporter=Silent())
    reasons = ["It was measured on more rows."]
    inputs = made.evaluation.manifest.inputs
    again = build(made.model.path.parent / "again", "evaluation", "more", inputs, {"verdict": "accepted", "reasons": reasons})
    register(made.model, again, made.repository, config, reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="approved by bob,"):
        promote(NAME, "1", by="bob", policy=TWO, reporter=Silent())


@pytest.mark.mlflow
def test_an_approval_is_used_up_by_the_promotion_that_a_rollback_takes_back(versions: Any) -> None:
    promote(NAME, "1", by="ann", reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "2", by="ann", policy=TWO, reporter=Silent())
    promote(NAME, "2", by="bob", policy=TWO, reporter=Silent())
    rollback(NAME, by="cara", policy=TWO, reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="approved by bob, and 1 more approval is needed"):
        promote(NAME, "2", by="bob", policy=TWO, reporter=Silent())
    assert promote(NAME, "2", by="cara", policy=TWO, reporter=Silent()).to == "2"


@pytest.mark.mlflow
def test_a_policy_in_the_history_counts_before_the_configuration_and_only_an_approver_changes_it(versions: Any) -> None:
    approval.write(versions, NAME, Policy(approvers=["ann"]), "admin")
    with pytest.raises(ApprovalNeededError, match="mallory is no approver"):
        promote(NAME, "1", by="mallory", policy=Policy(approvers=["mallory"]), reporter=Silent())
    with pytest.raises(ApprovalNeededError, match="mallory is no approver"):
        approval.write(versions, NAME, Policy(), "mallory")
    approval.write(versions, NAME, Policy(), "ann")
    assert promote(NAME, "1", by="mallory", reporter=Silent()).to == "1"


@pytest.mark.mlflow
def test_the_pipeline_does_not_promote_where_people_have_to_and_does_not_fail_for_it(versions: Any) -> None:
    notes: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    config = ModelRegistryConfig(name=NAME, approvers=["ann"])
    assert promote_at_once(config, "1", compared_with=None, reporter=Noting()) is None
    assert notes[0].startswith("helper version 1 is not promoted: pipeline is no approver. The policy names ann")
    assert promote_at_once(ModelRegistryConfig(name=NAME), "1", compared_with=None, reporter=Noting()) is not None
    assert champion(NAME).version == "1"


@pytest.mark.mlflow
def test_the_pipeline_does_not_bring_back_what_people_rolled_back(versions: Any) -> None:
    notes: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    config, first = ModelRegistryConfig(name=NAME), versions.get_model_version(NAME, "1").tags["tuneline.model_sha256"]
    promote(NAME, "1", by="ann", reporter=Silent())
    promote(NAME, "2", force=True, reason="a try", by="ann", reporter=Silent())
    rollback(NAME, by="bob", reason="it swears", reporter=Silent())
    assert promote_at_once(config, "2", compared_with=first, reporter=Noting()) is None
    assert notes == [
        f"{NAME} version 2 is not promoted: bob rolled the champion back from it (it swears). "
        f"tuneline promote {NAME} --version 2 does it all the same."
    ]
    assert champion(NAME).version == "1"


@pytest.mark.mlflow
def test_a_policy_that_was_changed_by_hand_is_told_and_permits_nothing(versions: Any) -> None:
    written = approval.write(versions, NAME, Policy(approvers=["ann"]), "admin")
    versions.set_model_version_tag(f"{NAME}.history", str(written.number), "tuneline.reason", "{")
    with pytest.raises(RegistryError, match="was changed by hand") as refused:
        promote(NAME, "1", by="ann", reporter=Silent())
    assert "registry audit" in refused.value.hint


@pytest.mark.mlflow
@pytest.mark.parametrize("meanwhile", [Policy(approvers=["cara"]), Policy(approvers=["ann", "cara"], approvals_required=2)])
def test_a_policy_put_in_force_while_a_move_waits_for_its_turn_counts(
    versions: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: Policy
) -> None:
    real = moving.move

    def late(client: Any, model: str, intent: Entry, *check: Any) -> Entry:
        if intent.kind in ("promote", "rollback"):
            real(client, model, Entry(kind="policy", by="admin", reason=meanwhile.model_dump_json()))
        return real(client, model, intent, *check)

    monkeypatch.setattr(moving, "move", late)
    with pytest.raises(ApprovalNeededError, match=r"ann is no approver|changed meanwhile"):
        promote(NAME, "1", by="ann", reporter=Silent())
    assert champion(NAME) is None


@pytest.mark.mlflow
def test_a_policy_put_in_force_while_a_rollback_waits_counts(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(NAME, "1", by="ann", reporter=Silent())
    promote(NAME, "2", by="ann", reporter=Silent())
    real = moving.move

    def late(client: Any, model: str, intent: Entry, *check: Any) -> Entry:
        real(client, model, Entry(kind="policy", by="admin", reason=Policy(approvers=["cara"]).model_dump_json()))
        return real(client, model, intent, *check)

    monkeypatch.setattr(moving, "move", late)
    with pytest.raises(ApprovalNeededError, match="ann is no approver"):
        rollback(NAME, by="ann", reporter=Silent())
    assert champion(NAME).version == "2"


def test_a_policy_that_cannot_be_met_is_refused() -> None:
    for make in (Policy, ModelRegistryConfig):
        with pytest.raises(ValidationError, match="approvals_required is 2, and approvers names 1"):
            make(approvers=["ann", "ann"], approvals_required=2)


def test_the_policy_that_is_shipped_is_one(tmp_path: Path) -> None:
    shipped = approval.read(ROOT / "mlflow" / "promotion-policy.yaml")
    assert shipped.approvals_required <= len(shipped.approvers)


def test_a_policy_file_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_bytes("approvers: [Jürgen]".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        approval.read(tmp_path / "policy.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("approver: [ann]", "approver: Extra inputs"),
        ("approvers: ann", "approvers: Input should be a valid list"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_policy_file_that_says_something_else_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=why) as refused:
        approval.read(tmp_path / "policy.yaml")
    assert "policy.yaml" in refused.value.message
