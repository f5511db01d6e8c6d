"""Release policies: requirements for a version, their enforcement by every move of an alias, and their history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common import regression_suite
from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.gate_rules import Rule
from components.common.runtime.errors import ConfigurationError, RegistryError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.model_registry import (
    alias_moves,
    policy_checks,
    policy_report,
    promotion_policy,
    registry_history,
    release_policy,
    servable_versions,
)
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import audit
from components.model_registry.policy_checks import PolicyInForce
from components.model_registry.promotion_policy import ApprovalNeededError
from components.model_registry.registry_history import Entry
from components.model_registry.release_policy import Policy
from components.model_registry.stage import auto_promote, find_champion, promote, register, rollback
from pipelines.config.customization_config import Customization
from pipelines.steps import policy_preflight
from tests.model_registry.conftest import NAME, build
from tests.model_registry.conftest import Customization as Customize
from tests.model_registry.evidence_builder import RULE, build_evaluation
from tests.pipelines.command import ROOT, answer_in_process, refusal, run_in_process

HISTORY = f"{NAME}.history"
QUIET = SilentReporter()
SLICE_RULE = {**RULE, "min_gain": None, "max_loss": 0.2, "slices": ["source"]}
SUITE_RULE = {**RULE, "metric": "suite_harmful.refused", "min_gain": None, "max_loss": 0.2}  # fixed: 44 items, 95%
CONTENT = {
    "tasks": {
        "held_out": {"items": 40, "items_sha256": "7" * 64},
        "gsm8k": {"items": 200, "items_sha256": "8" * 64},
        "judge": {"items": 50},
    },
    "calibration": {"judge": {"kappa_bound": 0.55}},
    "measured": {
        "tasks": {"held_out": "held_out", "gsm8k": "generation", "judge": "judge"},
        "task_files": {"gsm8k": ["a" * 64]},
        "settings": {"min_items": None, "gate": [{**RULE, "min_gain": 0.1}, SLICE_RULE, SUITE_RULE]},
    },
}
UNMEASURED = Policy.model_validate({"tasks": [{"name": "gsm8k"}]})
STRICT = Policy(confidence=0.99)


def check(**policy: Any) -> list[str]:
    """Return the objections to CONTENT."""
    in_force = PolicyInForce(Policy.model_validate(policy), 7)
    return [one.reason for one in policy_checks.check_content(in_force, CONTENT) if not one.met]


@pytest.mark.parametrize(
    "policy",
    [
        {"tasks": [{"name": "gsm8k", "kind": "generation", "items_sha256": "8" * 64, "files_sha256": ["a" * 64], "min_items": 200}]},
        {"rules": [{"min_gain": 0.05}]},
        {"rules": [{"max_loss": 0.3, "slices": ["source"]}]},
        {"tasks": [{"name": "judge", "min_kappa": 0.5}]},
        {"min_items": 40, "confidence": 0.95, "max_loss": {"held_out.loss": 0.2, "gsm8k.exact_match": 0.0}},
    ],
)  # fmt: skip
def test_stricter_evaluation_meets_the_policy(policy: dict[str, Any]) -> None:
    assert check(**policy) == []


@pytest.mark.parametrize(
    ("policy", "objection"),
    [
        (
            {"tasks": [{"name": "ifeval"}]},
            "policy entry 7 requires task ifeval; its evaluation does not include this task",
        ),
        (
            {"tasks": [{"name": "gsm8k", "kind": "lm_eval"}]},
            "policy entry 7 requires task gsm8k of kind lm_eval; its evaluation measured kind generation",
        ),
        (
            {"tasks": [{"name": "gsm8k", "items_sha256": "9" * 64}]},
            "policy entry 7 requires task gsm8k on items 999999999999; its evaluation measured 888888888888",
        ),
        (
            {"tasks": [{"name": "gsm8k", "files_sha256": ["a" * 64, "b" * 64]}]},
            "policy entry 7 requires task gsm8k on file bbbbbbbbbbbb; its evaluation did not read this file",
        ),
        (
            {"tasks": [{"name": "judge", "min_kappa": 0.6}]},
            "policy entry 7 requires a kappa_bound above 0.6 of the judge in task judge; its evaluation has 0.550",
        ),
        (
            {"tasks": [{"name": "gsm8k", "min_items": 201}]},
            "policy entry 7 requires 201 items of task gsm8k; its evaluation measured 200",
        ),
        (
            {"rules": [{"against": "incumbent", "min_gain": 0.0}]},
            "policy entry 7 requires a rule as strict as metric: held_out.loss, against: incumbent, min_gain: 0.0, "
            "confidence: 0.95; its evaluation does not include one",
        ),
        (
            {"rules": [{"max_loss": 0.3, "slices": ["source"]}], "slice_min_items": 20},
            "its evaluation judged slices of at least 10 items; policy entry 7 requires 20",
        ),
        ({"min_items": 50}, "policy entry 7 requires 50 items per task; its evaluation measured 40 of held_out"),
        (
            {"confidence": 0.99},
            "policy entry 7 requires a confidence of 0.99; its evaluation has 0.95 for held_out.loss",
        ),
        (
            {"max_loss": {"held_out.loss": 0.1}},
            "policy entry 7 allows a max_loss of 0.1 of held_out.loss; its evaluation has 0.2",
        ),
    ],
)
def test_unmet_requirement_names_the_policy_entry(policy: dict[str, Any], objection: str) -> None:
    assert check(**policy) == [objection]


def build_suite_content() -> dict[str, Any]:
    """Return the parts of evaluation.json that the default configuration determines."""
    return policy_preflight._predict_content(Customization(), [], Policy())


def check_suite(content: dict[str, Any]) -> list[str]:
    in_force = PolicyInForce(Policy(suite="default"), 7)
    return [one.reason for one in policy_checks.check_content(in_force, content) if not one.met]


def test_default_evaluation_contains_the_suite() -> None:
    assert check_suite(build_suite_content()) == []


def test_evaluation_without_the_suite_is_refused() -> None:
    assert check_suite(CONTENT) == [
        "the regression suite (policy entry 7) requires task suite_instructions; its evaluation does not include this "
        "task"
    ]


def test_evaluation_of_an_earlier_version_has_no_suite() -> None:
    (objection,) = policy_checks.list_suite_objections({"tasks": {}}, "automatic promotion")
    assert objection.endswith("requires task suite_instructions; its evaluation does not include this task")


def test_other_items_of_the_suite_are_refused() -> None:
    content = build_suite_content()
    content["measured"]["task_files"]["suite_harmful"] = ["b" * 64]
    assert check_suite(content) == [
        "its evaluation measured suite_harmful on other files than those of the regression suite (policy entry 7)"
    ]


@pytest.mark.parametrize("metric", regression_suite.LIMITS)
def test_suite_without_a_rule_or_with_a_weaker_one_is_refused(metric: str) -> None:
    limits = regression_suite.LIMITS[metric]
    weaker = {
        name: None if name == "control" else 0.5 for name in limits if "control" not in limits or name == "control"
    }
    for change in (weaker, {"confidence": 0.99 if "control" in limits else 0.51}, None):
        content = build_suite_content()
        settings, wanted = content["measured"]["settings"], {"metric": metric, "against": "base"}
        rule = next(rule for rule in settings["gate"] if wanted.items() <= rule.items())
        if change is None:
            settings["gate"].remove(rule)
        else:
            rule.update(change)  # a rule with control fails less often at a higher confidence
        (objection,) = check_suite(content)
        assert f"requires a rule as strict as metric: {metric}, against: base" in objection


def test_evaluation_of_an_earlier_release_meets_no_requirement() -> None:
    in_force = PolicyInForce(Policy.model_validate({"tasks": [{"name": "held_out"}], "rules": [{"min_gain": 0.0}]}), 2)
    assert [one.met for one in policy_checks.check_content(in_force, {"verdict": "accepted"})] == [False, False]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"approvers": ["ann"], "approvals_required": 2}, "approvals_required is 2; expected at most 1"),
        ({"approvers": [" "]}, "String should have at least 1 character"),
        ({"tasks": [{"name": "a"}, {"name": "a", "min_items": 4}]}, "tasks: duplicate name a"),
        ({"licences": []}, "at least 1 item"),
        ({"confidence": 1}, "less than 1"),
        ({"rules": [{"max_harmed_share": 0}]}, "greater than 0"),
        ({"rules": [{"min_gain": 0.0, "confidence": 1.0}]}, "less than 1"),
        ({"rules": [{"min_gain": 0.0, "max_loss": 0.1}]}, "expected exactly one of min_gain"),
        ({"rules": [{"min_gain": 0.0, "slices": ["source"]}]}, "too small to prove a gain"),
        ({"slice_min_items": 20, "rules": [{"min_gain": 0.0}]}, "slice_min_items is 20, but no rule has slices"),
        ({"max_loss": {"held_out.loss": -1}}, "greater than or equal to 0"),
        ({"max_loss": {"held_out": 0.1}}, "String should match pattern"),
        ({"max_evaluation_age_days": 0}, "greater than or equal to 1"),
        ({"max_evaluation_age_days": 10**12}, "less than or equal to 36500"),
        ({"min_items": 10**400}, "less than or equal to 1000000000"),
        ({"tasks": [{"name": "a", "items_sha256": "12"}]}, "String should match pattern"),
        ({"min_item": 3}, "Extra inputs are not permitted"),
    ],
)
def test_policy_that_no_version_can_meet_is_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Policy.model_validate(policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"tasks": [{"name": "a", "kind": "exam"}]}, r"tasks.0.kind: found 'exam'; expected one of .*held_out"),
        (
            {"tasks": [{"name": "held_out", "kind": "held_out", "files_sha256": ["a" * 64]}]},
            "tasks.0.files_sha256: found 'a{64}'; expected an empty list, because held_out reads the dataset",
        ),
        (
            {"tasks": [{"name": "gsm8k", "kind": "generation", "min_kappa": 0.5}]},
            "tasks.0.min_kappa: found '0.5'; expected null, or a task of kind judge",
        ),
        (
            {"tasks": [{"name": "g", "kind": "generation"}], "max_loss": {"g.f1_pass_at_2": 0.1}},
            "max_loss.g.f1_pass_at_2: found 'g.f1_pass_at_2'; expected a metric of generation",
        ),
        (
            {"tasks": [{"name": "a", "kind": "held_out"}], "rules": [{"metric": "a.lose", "min_gain": 0.0}]},
            r"rules.0.metric: found 'a.lose'; expected a metric of held_out: .*loss",
        ),
        ({"tasks": [{"name": "a", "kind": "held_out"}], "max_loss": {"a.lose": 1}}, r"max_loss.a.lose: found 'a.lose'"),
    ],
)
def test_policy_with_an_unknown_kind_or_metric_is_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"policy.yaml: {message}"):
        policy_preflight.check_metrics(Policy.model_validate(policy), "policy.yaml")


def test_default_configuration_meets_the_shipped_policy() -> None:
    shipped = release_policy.read_policy(ROOT / "mlflow" / "promotion-policy.yaml")
    policy_preflight.check_metrics(shipped, "promotion-policy.yaml")
    content = policy_preflight._predict_content(Customization(), [], shipped)
    results = policy_checks.check_content(PolicyInForce(shipped, 1), content)
    assert len(results) == 8
    assert [one.reason for one in results if not one.met] == []
    assert set(shipped.model_fields_set) == set(Policy.model_fields) - {"slice_min_items", "signatures", "trusted_keys"}


def test_policy_of_an_earlier_release_stays_valid() -> None:
    entry = Entry(number=1, kind="policy", state="done", reason='{"approvers": ["ann"], "approvals_required": 1}')
    assert promotion_policy.get_effective_policy([entry]) == Policy(approvers=["ann"])
    assert not promotion_policy.get_effective_policy([entry]).has_requirements


@pytest.mark.mlflow
def test_policy_is_enforced_by_promotion_rollback_deployment_and_audit(versions: Any) -> None:
    for version in ("1", "2"):
        promote(NAME, version, reporter=QUIET)
    number = promotion_policy.set_policy(versions, NAME, UNMEASURED, "admin").number
    objection = f"policy entry {number} requires task gsm8k; its evaluation does not include this task"
    with pytest.raises(RegistryError, match=objection) as refused:
        promote(NAME, "3", reporter=QUIET)
    assert refused.value.hint.startswith(
        "Evaluate the model again with a configuration that meets the policy, or force"
    )
    with pytest.raises(RegistryError, match=f"cannot be rolled back to version 1 of helper: {objection}"):
        rollback(NAME, reporter=QUIET)
    second = versions.get_model_version(NAME, "2").tags["tuneline.model_sha256"]
    config = ModelRegistryConfig(name=NAME)
    suite = r"the regression suite \(automatic promotion\) requires task suite_instructions; its evaluation does not include this task"
    with pytest.raises(RegistryError, match=f"{suite} and {objection}|{objection} and {suite}"):
        auto_promote(config, "3", incumbent_sha256=second, reporter=QUIET)
    assert servable_versions.list_serving_objections(NAME, "2", "champion") == [objection]
    assert [finding.what for finding in audit(NAME, reporter=QUIET).findings] == [
        f"version 2 must not be champion: {objection}"
    ]
    promote(NAME, "3", force=True, reason="the exam is not ready", reporter=QUIET)
    assert registry_history.read(versions, NAME)[-1].forced == objection
    promotion_policy.set_policy(versions, NAME, UNMEASURED.model_copy(update={"approvers": ["ann"]}), "admin")
    assert servable_versions.list_serving_objections(NAME, "3", "champion") == []


@pytest.mark.mlflow
def test_forced_promotion_whose_objections_the_history_cannot_record_is_refused(versions: Any) -> None:
    tasks = [{"name": f"task_{number}"} for number in range(90)]
    promotion_policy.set_policy(versions, NAME, Policy.model_validate({"tasks": tasks}), "admin")
    with pytest.raises(RegistryError, match=r"cannot record the objections that the promotion overrides"):
        promote(NAME, "3", force=True, reason="the exams are not ready", reporter=QUIET)


@pytest.mark.mlflow
def test_policy_after_a_deleted_entry_can_be_replaced_once_the_gap_is_acknowledged(versions: Any) -> None:
    promotion_policy.set_policy(versions, NAME, STRICT, "admin")
    second = promotion_policy.set_policy(versions, NAME, UNMEASURED, "admin")
    versions.delete_model_version(HISTORY, str(second.number - 1))
    with pytest.raises(RegistryError, match="entry was edited"):
        promotion_policy.set_policy(versions, NAME, STRICT, "admin")
    audit(NAME, repair=True, reporter=QUIET)
    third = promotion_policy.set_policy(versions, NAME, STRICT, "admin")
    assert promotion_policy.get_policy_in_force(registry_history.read(versions, NAME)).number == third.number


@pytest.mark.mlflow
def test_configuration_does_not_weaken_the_recorded_policy(versions: Any) -> None:
    promotion_policy.set_policy(versions, NAME, STRICT, "admin")
    with pytest.raises(RegistryError, match=r"requires a confidence of 0.99; its evaluation has 0.95"):
        promote(NAME, "1", policy=Policy(), rules=[RULE], min_items=2, reporter=QUIET)


@pytest.mark.mlflow
def test_policy_that_changes_before_the_move_is_applied(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    move_alias = alias_moves.move_alias

    def move_after_policy_change(client: Any, model: str, intent: Entry, *check: Any) -> Entry:
        if intent.kind == "promote":
            move_alias(client, model, Entry(kind="policy", by="admin", reason=STRICT.model_dump_json()))
        return move_alias(client, model, intent, *check)

    monkeypatch.setattr(alias_moves, "move_alias", move_after_policy_change)
    with pytest.raises(RegistryError, match=r"the policy changed before the alias moved: entry \d+ of the history"):
        promote(NAME, "1", reporter=QUIET)
    assert find_champion(NAME) is None


@pytest.mark.mlflow
def test_approval_of_an_earlier_policy_does_not_count(versions: Any) -> None:
    two = {"approvers": ["ann", "bob"], "approvals_required": 2}
    promotion_policy.set_policy(versions, NAME, Policy.model_validate(two), "admin")
    with pytest.raises(ApprovalNeededError, match="approved by ann,"):
        promote(NAME, "1", by="ann", reporter=QUIET)
    promotion_policy.set_policy(versions, NAME, Policy.model_validate({**two, "confidence": 0.9}), "ann")
    with pytest.raises(ApprovalNeededError, match="approved by bob, and 1 more approval"):
        promote(NAME, "1", by="bob", reporter=QUIET)
    assert promote(NAME, "1", by="ann", reporter=QUIET).to == "1"


@pytest.mark.mlflow
def test_replayed_approval_after_a_policy_change_is_refused(versions: Any) -> None:
    two = Policy(approvers=["ann", "bob"], approvals_required=2)
    promotion_policy.set_policy(versions, NAME, two, "admin")
    with pytest.raises(ApprovalNeededError):
        promote(NAME, "1", by="ann", reporter=QUIET)
    [approval] = [entry for entry in registry_history.read(versions, NAME) if entry.kind == "approval"]
    promotion_policy.set_policy(versions, NAME, two, "bob")
    tags = versions.get_model_version(HISTORY, str(approval.number)).tags
    versions.create_model_version(HISTORY, "tuneline-history:/helper", tags=tags)
    with pytest.raises(RegistryError, match=r"an approval in entry .* because the entry was edited"):
        promote(NAME, "1", by="bob", reporter=QUIET)


@pytest.mark.mlflow
def test_downgraded_policy_blocks_promotion_and_a_hand_moved_alias(versions: Any) -> None:
    promote(NAME, "1", reporter=QUIET)
    number = str(promotion_policy.set_policy(versions, NAME, STRICT, "admin").number)
    versions.set_model_version_tag(HISTORY, number, "tuneline.reason", Policy().model_dump_json())
    message = f"the policy in entry {number} of the history is invalid, because the entry was edited"
    with pytest.raises(RegistryError, match=message):
        promote(NAME, "2", reporter=QUIET)
    with pytest.raises(RegistryError, match=message):
        policy_report.check_version(NAME, "2")
    [change] = policy_report.list_changes(NAME)
    assert not change.intact
    assert servable_versions.list_serving_objections(NAME, "1", "champion") == []
    versions.set_registered_model_alias(NAME, "champion", "2")
    assert message in servable_versions.list_serving_objections(NAME, "2", "champion")


def set_time(monkeypatch: pytest.MonkeyPatch, **offset: float) -> None:
    """Set the clock of this process to an offset from the present time."""
    shifted = datetime.now(UTC) + timedelta(**offset)

    class ShiftedTime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return shifted.astimezone(tz)

    for module in (policy_checks, registry_history):
        monkeypatch.setattr(module, "datetime", ShiftedTime)


@pytest.mark.mlflow
def test_evaluation_expires_and_its_next_registration_does_not_renew_it(
    registry: Any, customize: Customize, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config = customize("one"), ModelRegistryConfig(name=NAME)
    register(made.model, made.evaluation, made.repository, config, reporter=QUIET)
    number = promotion_policy.set_policy(registry, NAME, Policy(max_evaluation_age_days=30), "admin").number
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    set_time(monkeypatch, days=29)
    assert policy_report.check_version(NAME, "1").met
    set_time(monkeypatch, days=31)
    registry.delete_model_version(NAME, "1")
    register(made.model, made.evaluation, made.repository, config, reporter=QUIET)
    objection = f"policy entry {number} allows evaluations of at most 30 days; its evaluation was registered on {date}"
    with pytest.raises(RegistryError, match=objection) as refused:
        promote(NAME, "2", reporter=QUIET)
    assert refused.value.hint.startswith("Evaluate the model again with a higher evaluation.repetition")
    dataset = artifact_folder.read(Path(made.model.manifest.find_input("dataset").uri))
    again = build_evaluation(made.model.path.parent / "again", made.model.manifest, dataset, min_items=3)
    register(made.model, again, made.repository, config, reporter=QUIET)
    assert registry_history.read(registry, NAME)[-1].kind == "evaluation"
    assert promote(NAME, "2", reporter=QUIET).to == "2"
    set_time(monkeypatch, days=90)
    assert servable_versions.list_serving_objections(NAME, "2", "champion") == []


@pytest.mark.mlflow
def test_clock_that_was_set_back_does_not_renew_an_evaluation(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    promotion_policy.set_policy(versions, NAME, Policy(max_evaluation_age_days=30), "admin")
    set_time(monkeypatch, days=50)
    promotion_policy.set_policy(versions, NAME, Policy(max_evaluation_age_days=20), "admin")
    set_time(monkeypatch, days=10)
    with pytest.raises(RegistryError, match=r"entry \d+ of the history is dated .* UTC, in the future") as refused:
        promote(NAME, "1", reporter=QUIET)
    assert refused.value.hint.startswith("Correct the clock")


@pytest.mark.mlflow
def test_edited_history_hides_the_age_of_an_evaluation(versions: Any) -> None:
    promotion_policy.set_policy(versions, NAME, Policy(max_evaluation_age_days=30), "admin")
    versions.set_model_version_tag(HISTORY, "1", "tuneline.at", "2199-01-01T00:00:00+00:00")
    with pytest.raises(
        RegistryError, match="entry 1 of the history was edited, so the age of its evaluation is unknown"
    ):
        promote(NAME, "1", reporter=QUIET)


def test_evaluation_without_an_entry_has_no_age() -> None:
    in_force = PolicyInForce(Policy(max_evaluation_age_days=3), 7)
    objection = "policy entry 7 limits the age of the evaluation; the history does not show its registration"
    assert policy_checks._check_age(in_force, "a" * 64) == objection


def build_model(folder: Path, card: str, base_sha256: str = "") -> Artifact:
    """Publish a model with a model card."""
    base = artifact_folder.ArtifactInput(kind="base_model", content_sha256=base_sha256 or "b" * 64, uri="a model")
    artifact_folder.claim_folder(folder, "model", overwrite=True)
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    (folder / "model.bin").write_text("weights")
    return artifact_folder.publish(
        folder, "model", payload=["model.bin"], inputs=[base], config={}, seed=1, key="model", summary={}
    )


@pytest.mark.parametrize(
    ("card", "objection"),
    [
        ("license: Apache-2.0", ""),
        ("license: llama3.1", "policy entry 7 allows the licences apache-2.0, mit; the base model has llama3.1"),
        (
            "library_name: peft",
            "policy entry 7 allows the licences apache-2.0, mit; the model states no licence of its base model",
        ),
    ],
)
def test_licence_of_the_base_model_must_be_allowed(tmp_path: Path, card: str, objection: str) -> None:
    in_force = PolicyInForce(Policy(licences=["apache-2.0", "mit"]), 7)
    found = policy_checks.list_base_licences(build_model(tmp_path / "model", card))
    assert policy_checks.check_licences(in_force, found).reason == objection


def test_licence_of_the_import_counts_beside_the_model_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_STORE", str(tmp_path / "store"))
    with artifact_store.job_folder(tmp_path / "store") as folder:
        base = build(folder / "base", "base_model", "base", [], {"licence": {"id": "llama3.1"}})
        artifact_store.add_artifact(tmp_path / "store", base)
    model = build_model(tmp_path / "model", "license: mit", base.sha256)
    assert policy_checks.list_base_licences(model) == ["llama3.1", "mit"]


def test_licence_of_the_import_counts_for_a_model_tuned_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_STORE", str(tmp_path / "store"))
    with artifact_store.job_folder(tmp_path / "store") as folder:
        base = build(folder / "base", "base_model", "base", [], {"licence": {"id": "llama3.1"}})
        base = artifact_store.add_artifact(tmp_path / "store", base)
        first = artifact_store.add_artifact(
            tmp_path / "store", build_model(folder / "one", "license: mit", base.sha256)
        )
    model = build_model(tmp_path / "model", "license: mit", first.sha256)
    assert policy_checks.list_base_licences(model) == ["llama3.1", "mit"]


@pytest.mark.parametrize("content", ["", "# approvers: [ann]\n", "{}"])
def test_policy_without_a_key_does_not_remove_the_requirements(tmp_path: Path, content: str) -> None:
    (tmp_path / "policy.yaml").write_text(content)
    with pytest.raises(ConfigurationError, match="has no key; expected a policy") as refused:
        release_policy.read_policy(tmp_path / "policy.yaml")
    assert refused.value.hint == "To remove all requirements, write approvers: []."


def test_overruled_objection_stays_overruled_under_another_entry_of_the_policy() -> None:
    clauses = ["policy entry 7 requires 15 items of task a", "it has no Triton package"]
    forced = registry_history.join_objections(clauses)
    move = Entry(kind="promote", alias="champion", to="2", forced=forced, state=registry_history.DONE, number=8)

    def list_open(objection: str) -> list[str]:
        return registry_history.list_open_objections([move], "champion", "2", [objection])

    assert list_open("policy entry 12 requires 15 items of task a") == list_open(clauses[1]) == []
    for other in ("policy entry 7 requires 1", "policy entry 7 requires 16 items of task a"):
        assert list_open(other) == [other]


@pytest.mark.mlflow
def test_commands_set_show_and_test_a_policy(versions: Any, tmp_path: Path) -> None:
    database = ("--tracking-uri", f"sqlite:///{tmp_path / 'mlflow.db'}")
    file = tmp_path / "policy.yaml"
    file.write_text("approvers: [ann]\ntasks: [{name: held_out, kind: held_out, min_items: 4}]\n")
    shown = answer_in_process("policy", "set", NAME, file, "--by", "admin", *database, cwd=tmp_path)
    assert (shown["approvers"], shown["tasks"][0]["min_items"], shown["licences"]) == (["ann"], 4, None)
    assert answer_in_process("policy", "show", NAME, *database, cwd=tmp_path) == shown
    result = answer_in_process("policy", "test", NAME, "--version", "1", *database, cwd=tmp_path)
    requirement = "task held_out of kind held_out with at least 4 items"
    assert result["requirements"] == [{"requirement": requirement, "met": True, "reason": ""}]
    file.write_text("approvers: [ann]\ntasks: [{name: held_out, min_items: 5}]\n")
    error = refusal(1, "policy", "set", NAME, file, "--by", "bob", *database, cwd=tmp_path)
    assert error["kind"] == "approval_needed"
    entry = answer_in_process("policy", "set", NAME, file, "--by", "ann", *database, cwd=tmp_path)["entry"]
    unmet = run_in_process("policy", "test", NAME, "--version", "1", *database, cwd=tmp_path)
    objection = f"policy entry {entry} requires 5 items of task held_out; its evaluation measured 4"
    assert f"✘ task held_out with at least 5 items: {objection}" in unmet.stdout
    assert (unmet.returncode, unmet.stderr) == (1, "")
    history = answer_in_process("policy", "show", NAME, "--history", *database, cwd=tmp_path)["entries"]
    assert [(each["by"], each["intact"]) for each in history] == [("admin", True), ("ann", True)]
    assert history[0]["changes"][0] == 'approvers: [] → ["ann"]'
    assert [change.partition(":")[0] for change in history[1]["changes"]] == ["tasks"]
    file.write_text("licences: []\n")
    assert "licences: found []; expected a list with 1 or more" in refusal(2, "policy", "set", NAME, file, *database, cwd=tmp_path)["message"]  # fmt: skip


@pytest.mark.mlflow
def test_model_without_a_policy_has_no_requirements(versions: Any, tmp_path: Path) -> None:
    database = ("--tracking-uri", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert answer_in_process("policy", "show", NAME, *database, cwd=tmp_path)["entry"] is None
    assert answer_in_process("policy", "test", NAME, "--version", "4", *database, cwd=tmp_path)["met"] is True
    shown = run_in_process("policy", "show", NAME, "--history", *database, cwd=tmp_path).stdout
    assert shown == f"{NAME} has no release policy\n"


@pytest.mark.mlflow
def test_version_without_its_files_cannot_be_tested(versions: Any, tmp_path: Path) -> None:
    promotion_policy.set_policy(versions, NAME, UNMEASURED, "admin")
    versions.delete_model_version_tag(NAME, "1", "tuneline.evaluation_sha256")
    with pytest.raises(RegistryError, match="version 1 of helper cannot be tested: it has no evaluation"):
        policy_report.check_version(NAME, "1")


@pytest.mark.mlflow
def test_run_reports_before_training_what_the_policy_refuses(versions: Any, tmp_path: Path) -> None:
    notes: list[str] = []

    class NoteRecorder(SilentReporter):
        def note(self, text: str) -> None:
            notes.append(text)

    config = Customization.model_validate({"model_registry": {"name": NAME}, "evaluation": {"max_items": 20}})
    policy_preflight.check_policy(config, None, [], NoteRecorder())
    assert notes == []
    rules = [Rule(metric="gsm8k.exact_match", max_loss=0.01)]
    tasks = [{"name": "held_out", "items_sha256": "a" * 64, "min_items": 30}]
    policy = Policy.model_validate({"tasks": tasks, "rules": rules, "confidence": 0.9})
    number = promotion_policy.set_policy(versions, NAME, policy, "admin").number
    policy_preflight.check_policy(config, None, [], NoteRecorder())
    assert notes == [
        f"the model will not be promoted: policy entry {number} requires 30 items of task held_out; its evaluation "
        "measured 20",
        f"the model will not be promoted: policy entry {number} requires a rule as strict as metric: gsm8k.exact_match, "
        "against: base, max_loss: 0.01, confidence: 0.95; its evaluation does not include one",
    ]
    config.model_registry.auto_promote = True
    with pytest.raises(
        ConfigurationError, match="auto_promote is true, but the model cannot be promoted: policy entry"
    ):
        policy_preflight.check_policy(config, None, [], NoteRecorder())


@pytest.mark.mlflow
def test_run_is_compared_with_the_calibration_that_the_policy_requires(versions: Any) -> None:
    tasks = [{"name": "judge", "kind": "judge", "min_kappa": 0.6}]
    promotion_policy.set_policy(versions, NAME, Policy.model_validate({"tasks": tasks}), "admin")
    judge = {"kind": "judge", "base_url": "https://judge.example/v1", "model": "j"}

    def check(**calibration: str) -> list[str]:
        evaluation = {"tasks": [{"kind": "held_out"}, {**judge, **calibration}]}
        config = Customization.model_validate({"model_registry": {"name": NAME}, "evaluation": evaluation})
        return policy_preflight.list_objections(config, None, [])

    (objection,) = check()
    assert objection.endswith("requires a kappa_bound above 0.6 of the judge in task judge; its evaluation has none")
    assert check(calibration=str(ROOT / "README.md")) == []  # what the judge reaches is unknown before the evaluation


def test_policy_may_require_pass_at_k() -> None:
    rules = [{"metric": "gsm8k.final_number_pass_at_5", "max_loss": 0.1}]
    policy = Policy.model_validate({"tasks": [{"name": "gsm8k", "kind": "generation"}], "rules": rules})
    policy_preflight.check_metrics(policy, "policy.yaml")


@pytest.mark.mlflow
def test_run_without_a_registry_is_not_compared_with_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'missing.db'}")
    assert policy_report.find_policy_in_force(NAME) is None
    assert not (tmp_path / "missing.db").exists()


@pytest.mark.mlflow
def test_licence_of_the_base_model_is_checked_before_training(versions: Any, tmp_path: Path) -> None:
    from components.common.models.model_loading import LocalBaseModel

    number = promotion_policy.set_policy(versions, NAME, Policy(licences=["mit"]), "admin").number
    config = Customization.model_validate({"model_registry": {"name": NAME}})
    base = LocalBaseModel(build_model(tmp_path / "base", "license: llama3.1").path, "b" * 64, "base")
    assert policy_preflight.list_objections(config, base, []) == [
        f"policy entry {number} allows the licences mit; the base model has llama3.1"
    ]
