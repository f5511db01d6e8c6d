"""Promotion of accepted and proven versions, and rollback. Every move of an alias is recorded in the history."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from components.common.runtime.errors import RegistryError
from components.common.runtime.reporters import Reporter
from components.common.runtime.user_name import get_user_name
from components.model_registry import (
    alias_moves,
    history_signatures,
    model_versions,
    promotion_checks,
    promotion_policy,
    registry_history,
)
from components.model_registry.model_versions import MODEL_SHA256_TAG, TAG_PREFIX
from components.model_registry.policy_checks import PolicyInForce
from components.model_registry.registry_history import Entry
from components.model_registry.release_policy import Policy

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.entities.model_registry import RegisteredModel as MlflowModel

CHAMPION = "champion"
# The remedies of objections, by a pattern of the clause; docs/reference/errors.md lists them.
REMEDIES = (
    ("and the champion is", "Evaluate the version again, against the current champion"),
    ("failed on its test split", "Add new test rows, and run again"),
    (
        "^the model was trained on",
        "Remove the rows from the evaluation set, or from the training data with data_curation.decontamination",
    ),
    ("of its lineage", "Mount the artifact store or the folder, or restore the artifact from a backup"),
    ("cannot be verified", "Promote where the artifact store is mounted, or restore the file"),
    ("^its evaluation used dataset", "Evaluate the model with its training dataset"),
    ("the regression suite", "Evaluate the model with evaluation.suite: default"),
    ("the configuration", "Evaluate the model again with this configuration"),
    (
        "allows evaluations of at most|limits the age",
        "Evaluate the model again with a higher evaluation.repetition, and register it",
    ),
    ("so the age of its evaluation", "Correct the clock, or check the history with `tuneline registry audit`"),
    (
        "has no checkpoint",
        "Check the history with `tuneline registry audit NAME`, and write a checkpoint with --repair",
    ),
    ("does not verify|requires signatures", "Register the version again with a trusted signing key"),
    ("allows the licences", "Tune a base model with an allowed licence"),
    ("policy entry", "Evaluate the model again with a configuration that meets the policy"),
    ("^its evaluation does not state|package does not cover", "Evaluate and package the model again"),
    (
        "^its evaluation (compared|measured|repeats|cannot)|(of|in|at) its evaluation",
        "Evaluate the model again",
    ),
)
ANY_INCUMBENT = "anything"  # the caller does not know with which model the version was compared


class AliasUnchangedError(Exception):
    """Another process has moved the alias to the same version."""


class Promotion(BaseModel):
    """The result of a promotion or rollback; `from` equals `to` if the version already had the alias."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    alias: str
    from_: str | None = Field(None, alias="from")
    to: str


def promote(
    name: str,
    version: str | int,
    *,
    alias: str = CHAMPION,
    by: str = "",
    force: bool = False,
    reason: str = "",
    incumbent_sha256: str | None = ANY_INCUMBENT,
    policy: Policy | None = None,
    rules: Sequence[dict[str, Any]] = (),
    min_items: int | None = None,
    tasks: Mapping[str, dict[str, Any]] | None = None,
    requires_suite: bool = False,
    reporter: Reporter,
) -> Promotion:
    """Move `alias` to an undamaged and proven version whose evaluation accepted it over the current champion.

    Args:
        by: name of the person who promotes; default: the user name of this process.
        force: promote despite failed checks; requires `reason`.
        incumbent_sha256: digest of the model that the version was evaluated against; None if no model was deployed. If
            another model has the alias now, the version is not promoted, not even with `force`.
        policy: default policy, used if the history contains no policy.
        rules: the rules that the evaluation's gate must have applied, as in `evaluation.gate`, or stricter ones.
        min_items: `evaluation.min_items` of these rules; None for the default.
        tasks: the tasks of these rules by name, as in `evidence.check_rules`.
        requires_suite: whether the evaluation must contain the regression suite, also without a policy that requires it.

    Raises:
        RegistryError: the model or version does not exist, a check fails, or the policy or an approval in the history
            was edited.
        ApprovalNeededError: the policy requires more approvals, or another approver.
    """
    with model_versions.registry_client() as client:
        target = model_versions.get_version(client, name, str(version))
        entries = alias_moves.close_abandoned(client, name)
        current = model_versions.get_alias_holder(client, name, alias)
        if current is not None and str(current.version) == str(target.version):
            return Promotion(name=name, alias=alias, from_=str(current.version), to=str(target.version))
        present = current.tags.get(MODEL_SHA256_TAG) if current else None
        if incumbent_sha256 not in (ANY_INCUMBENT, present):
            raise RegistryError(
                f"the {alias} of {name} changed during this run; now: "
                f"{f'version {current.version}' if current else 'no version'}",
                hint="Run the same command again to compare the model with the current version.",
            )
        reporter.step(f"checking {name} version {target.version}")
        compared = present if present or not current else f"of version {current.version}"
        compared = compared if alias == CHAMPION else promotion_checks.SKIP_COMPARISON
        promotion_policy.check_unedited(entries)
        history_signatures.check_history(client, name, entries)
        in_force = promotion_policy.get_policy_in_force(entries, policy)
        repeated = promotion_checks.was_promoted(target, entries)
        requirements = promotion_checks.Requirements(
            compared, rules, min_items, repeated, tasks or {}, in_force, requires_suite=requires_suite
        )
        objections = promotion_checks.list_objections(target, requirements)
        _check_objections(target, objections, force=force, reason=reason)
        intent = _move_entry("promote", alias, target, by=by, reason=reason, forced=objections)
        approval = intent.model_copy(update={"from_": str(current.version) if current else None})
        approved = promotion_policy.collect_approvals(client, name, entries, in_force.policy, approval)
        reporter.step(f"promoting {name} version {target.version}")

        def check_approvals(history: Sequence[Entry]) -> None:
            promotion_policy.recheck_approvals(history, policy, approval, approved)
            promotion_policy.check_unchanged(history, in_force)

        approved_intent = intent.model_copy(update={"by": ", ".join(approved)})
        moved = _move(client, target, approved_intent, current, check_approvals, force=force)
    for objection in objections:
        reporter.note(f"forced promotion despite: {objection}")
    return moved


def _move_entry(
    kind: registry_history.Kind, alias: str, to: ModelVersion, *, by: str, reason: str, forced: Sequence[str] = ()
) -> Entry:
    return Entry(
        kind=kind,
        alias=alias,
        to=str(to.version),
        by=by or get_user_name(),
        reason=reason,
        forced=registry_history.join_objections(forced),
        digest=to.tags.get(MODEL_SHA256_TAG, ""),
        evaluation=to.tags.get(f"{TAG_PREFIX}evaluation_sha256", ""),
    )


def _check_objections(version: ModelVersion, objections: list[str], *, force: bool, reason: str) -> None:
    if force and not reason.strip():
        raise RegistryError(
            "a forced promotion requires a reason, but the reason is empty",
            hint="Pass --reason TEXT; the text is recorded in the history.",
        )
    length, limit = len(registry_history.join_objections(objections)), registry_history.MAX_TEXT_CHARACTERS
    if force and length > limit:
        raise RegistryError(
            f"the history cannot record the objections that the promotion overrides: they have {length:,} "
            f"characters; the limit is {limit:,}",
            hint="Meet some of the requirements, or set a policy with fewer requirements.",
        )
    if objections and not force:
        raise RegistryError(
            f"version {version.version} of {version.name} cannot be promoted: {' and '.join(objections)}",
            hint=f"{_choose_remedy(objections)}, or force the promotion with --force --reason TEXT.",
        )


def _choose_remedy(objections: Sequence[str]) -> str:
    """Return the action that resolves the first objection with a known remedy."""
    remedies = (remedy for clause in objections for pattern, remedy in REMEDIES if re.search(pattern, clause))
    return next(remedies, "Promote an accepted and proven version")


def _move(
    client: MlflowClient,
    to: ModelVersion,
    intent: Entry,
    planned: ModelVersion | None,
    check_permission: Callable[[Sequence[Entry]], None],
    *,
    force: bool = False,
) -> Promotion:
    """Move the alias if the alias and the version are unchanged since the decision.

    Args:
        planned: the version that had the alias at the decision.
        check_permission: raises if the history up to the move does not permit it.
    """

    def check_unchanged(holder: ModelVersion | None, entries: Sequence[Entry]) -> None:
        number = str(holder.version) if holder else None
        if number == str(to.version):
            raise AliasUnchangedError(f"version {to.version} already has the alias")
        now = model_versions.get_version(client, to.name, str(to.version))
        for key in ("model_sha256", "evaluation_sha256", "verdict"):
            if now.tags.get(TAG_PREFIX + key) != to.tags.get(TAG_PREFIX + key):
                raise RegistryError(
                    f"the tag {TAG_PREFIX}{key} of {to.name} version {to.version} changed during the promotion: "
                    f"now {now.tags.get(TAG_PREFIX + key, 'unset')}, before {to.tags.get(TAG_PREFIX + key, 'unset')}",
                    hint="Check the version before you promote it again.",
                )
        if number != (str(planned.version) if planned else None) and not force:
            raise RegistryError(
                f"the {intent.alias} of {to.name} changed during the promotion; "
                f"now: {f'version {number}' if number else 'no version'}",
                hint="Evaluate the version against the current champion.",
            )
        check_permission(entries)
        # For readers of the version in MLflow; the history is authoritative.
        noted = {
            "by": intent.by,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "from": number or "",
            "reason": intent.reason,
            "forced": intent.forced,
        }
        tags = {f"{TAG_PREFIX}{intent.alias}.{key}": value for key, value in noted.items()}
        model_versions.set_tags(client, to, tags)

    try:
        previous = alias_moves.move_alias(client, to.name, intent, check_unchanged).from_
    except AliasUnchangedError:
        previous = intent.to
    return Promotion(name=to.name, alias=intent.alias, from_=previous, to=str(to.version))


def _find_rollback_target(
    client: MlflowClient,
    model: MlflowModel,
    entries: Sequence[Entry],
    current: ModelVersion,
    alias: str,
    reporter: Reporter,
) -> ModelVersion:
    """Return the version that had the alias before. Deleted versions are skipped, with a note.

    Raises:
        RegistryError: no such version exists.
    """
    name = model.name
    # Earlier versions of tuneline had no history and recorded the previous versions in a tag of the model.
    legacy = [str(number) for number in json.loads(model.tags.get(f"{TAG_PREFIX}{alias}.earlier", "[]"))]
    candidates = registry_history.list_rollback_candidates(entries, alias, legacy)
    recorded = registry_history.get_recorded_holder(entries, alias)
    if recorded:  # the previous version, if the alias was moved outside of tuneline
        candidates.append(recorded)
    existing = {str(version.version) for version in model_versions.list_versions(client, name)}
    usable = [version for version in candidates if version in existing and version != str(current.version)]
    if not usable:
        raise RegistryError(
            f"{name} has no version to roll back to: no existing version had the alias {alias} before version "
            f"{current.version}",
            hint="Promote another version.",
        )
    for version in candidates[candidates.index(usable[-1]) + 1 :]:
        if version not in existing:
            reporter.note(f"version {version} is skipped, because it was deleted")
    return model_versions.get_version(client, name, usable[-1])


def _check_rollback_target(
    version: ModelVersion, alias: str, entries: Sequence[Entry], in_force: PolicyInForce
) -> None:
    """Raise RegistryError if the version must not be deployed. Objections that its promotion overruled are ignored."""
    requirements = promotion_checks.build_repeated_requirements(version, entries, in_force)
    found = promotion_checks.list_objections(version, requirements)
    if objections := registry_history.list_open_objections(entries, alias, str(version.version), found):
        raise RegistryError(
            f"{alias} cannot be rolled back to version {version.version} of {version.name}: {' and '.join(objections)}",
            hint=f"Promote another version: tuneline promote {version.name} --version N",
        )


def rollback(
    name: str,
    *,
    alias: str = CHAMPION,
    by: str = "",
    reason: str = "",
    policy: Policy | None = None,
    reporter: Reporter,
) -> Promotion:
    """Move `alias` back to the version that had it before, according to the history.

    One approver is sufficient, even if the policy requires two, so that a rollback is quick.

    Args:
        by: name of the person who rolls back; default: the user name of this process.
        reason: text for the history; default: the version that is rolled back.
        policy: default policy, used if the history contains no policy.

    Raises:
        RegistryError: the model does not exist, no version has the alias, no earlier version exists, or the earlier
            version was refused, is not packaged, or its files do not match their digests.
        ApprovalNeededError: the policy lists approvers, and `by` is not one of them.
    """
    with model_versions.registry_client() as client:
        model = model_versions.require_model(client, name)
        entries = alias_moves.close_abandoned(client, name)
        current = model_versions.get_alias_holder(client, name, alias)
        if current is None:
            raise RegistryError(
                f"no version of {name} has the alias {alias}",
                hint=f"Promote a version: tuneline promote {name} --version N",
            )

        promotion_policy.check_unedited(entries)
        history_signatures.check_history(client, name, entries)
        in_force = promotion_policy.get_policy_in_force(entries, policy)
        promotion_policy.check_approver(in_force.policy, by or get_user_name())

        def check_permission(history: Sequence[Entry]) -> None:
            effective = promotion_policy.get_effective_policy(history, policy)
            promotion_policy.check_approver(effective, by or get_user_name())
            promotion_policy.check_unchanged(history, in_force)

        target = _find_rollback_target(client, model, entries, current, alias, reporter)
        reporter.step(f"checking {name} version {target.version}")
        _check_rollback_target(target, alias, entries, in_force)
        reporter.step(f"rolling {name} back to version {target.version}")
        reason = reason or f"rollback from version {current.version}"
        intent = _move_entry("rollback", alias, target, by=by, reason=reason)
        return _move(client, target, intent, current, check_permission)
