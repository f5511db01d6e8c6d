"""Release policies and approvals in the history of a registered model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from components.common.runtime.errors import RegistryError
from components.model_registry import alias_moves, registry_history
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.policy_checks import PolicyInForce
from components.model_registry.registry_history import DONE, Entry
from components.model_registry.release_policy import Policy

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


class ApprovalNeededError(RegistryError):
    """The policy requires more approvals, or another approver."""

    kind = "approval_needed"


def build_policy(config: ModelRegistryConfig) -> Policy | None:
    """Return the policy of a configuration; None if the configuration lists no approvers."""
    if not config.approvers:
        return None
    return Policy(approvers=config.approvers, approvals_required=config.approvals_required)


def list_policies(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that record a policy, oldest first."""
    return [entry for entry in entries if (entry.kind, entry.state) == ("policy", DONE)]


def parse_policy(entry: Entry) -> Policy:
    """Return the policy of an entry.

    Raises:
        RegistryError: the recorded policy is invalid.
    """
    try:
        return Policy.model_validate_json(entry.reason)
    except ValidationError:
        raise RegistryError(
            f"the policy in entry {entry.number} of the history is invalid, because the entry was edited",
            hint="Restore the entry's tag tuneline.reason; `tuneline registry audit` reports the change.",
        ) from None


def get_effective_policy(entries: Sequence[Entry], configured: Policy | None = None) -> Policy:
    """Return the last policy in the history, or else the configured policy.

    Raises:
        RegistryError: the recorded policy is invalid.
    """
    return get_policy_in_force(entries, configured).policy


def get_policy_in_force(entries: Sequence[Entry], configured: Policy | None = None) -> PolicyInForce:
    """Return the policy as `get_effective_policy` does, with its entry and the history.

    Raises:
        RegistryError: the recorded policy is invalid.
    """
    recorded = list_policies(entries)
    if not recorded:
        return PolicyInForce(configured or Policy(), 0, entries)
    return PolicyInForce(parse_policy(recorded[-1]), recorded[-1].number, entries)


def find_policy(entries: Sequence[Entry]) -> tuple[PolicyInForce | None, str]:
    """Return the recorded policy, or None; and the objection, as a clause, if its entry or an approval was edited."""
    try:
        check_unedited(entries)
        return (get_policy_in_force(entries), "") if list_policies(entries) else (None, "")
    except RegistryError as error:
        return None, error.message


def check_unchanged(entries: Sequence[Entry], in_force: PolicyInForce) -> None:
    """Raise RegistryError if another policy is in force than the one with which the version was checked."""
    number = max((entry.number for entry in list_policies(entries)), default=0)
    if number != in_force.number:
        raise RegistryError(
            f"the policy changed before the alias moved: entry {number} of the history is in force",
            hint="Run the same command again to check the version with the new policy.",
        )


def set_policy(client: MlflowClient, model: str, policy: Policy, by: str) -> Entry:
    """Set the policy. If the current policy lists approvers, `by` must be one of them.

    Raises:
        RegistryError: the policy is too long to store, or the current policy was edited without an acknowledgement.
        ApprovalNeededError: `by` is not an approver.
    """
    text = policy.model_dump_json(exclude_none=True)
    if len(text) > registry_history.MAX_TEXT_CHARACTERS:
        raise RegistryError(
            f"the policy has {len(text):,} characters; the limit is {registry_history.MAX_TEXT_CHARACTERS:,}",
            hint="List fewer approvers, tasks or rules.",
        )

    def check_authority(_: ModelVersion | None, earlier: Sequence[Entry]) -> None:
        policies = list_policies(earlier)
        if policies and policies[-1] in _list_unverified(earlier):
            # Anyone may replace a policy whose approvers are unknown; the acknowledgement records who accepted that.
            number = policies[-1].number
            findings = {registry_history.describe_edit(number), registry_history.describe_gap(number - 1)}
            if not findings & _list_acknowledged(earlier):
                raise _edited_error(policies[-1])
            return
        check_approver(get_effective_policy(earlier), by)

    return alias_moves.move_alias(client, model, Entry(kind="policy", by=by, reason=text), check_authority)


def check_approver(policy: Policy, by: str) -> None:
    """Raise ApprovalNeededError if the policy lists approvers and `by` is not one of them."""
    if policy.approvers and by not in policy.approvers:
        raise ApprovalNeededError(
            f"{by} is not an approver",
            hint=f"Pass --by NAME with one of: {', '.join(policy.approvers)}.",
        )


def check_unedited(entries: Sequence[Entry]) -> None:
    """Check that the policy in force and the approvals since it are as tuneline wrote them, and no entry was deleted.

    Raises:
        RegistryError: an entry was edited, or deleted without an acknowledgement.
    """
    acknowledged = _list_acknowledged(entries)
    for number in registry_history.list_gaps(entries):
        if registry_history.describe_gap(number) not in acknowledged:
            raise RegistryError(
                f"{registry_history.describe_gap(number)}; it may have contained a policy or a move",
                hint="Check the model with `tuneline registry audit`, set the policy again, and acknowledge the finding "
                "with --repair.",
            )
    in_force = max((entry.number for entry in list_policies(entries)), default=0)
    for entry in _list_unverified(entries):
        if entry.number >= in_force and entry.kind in ("policy", "approval"):
            raise _edited_error(entry)


def _list_acknowledged(entries: Sequence[Entry]) -> set[str]:
    """Return the findings that an audit has acknowledged in the history."""
    return {entry.reason for entry in entries if (entry.kind, entry.state) == ("acknowledged", DONE)}


def _list_unverified(entries: Sequence[Entry]) -> list[Entry]:
    """Return the completed entries with a wrong seal, and those whose seal cannot be checked after a deleted entry."""
    after_gap = {number + 1 for number in registry_history.list_gaps(entries)}
    edited = {entry.number for entry in registry_history.list_edited(entries)}
    return [entry for entry in entries if entry.number in edited | after_gap and entry.state == DONE]


def _edited_error(entry: Entry) -> RegistryError:
    title = "the policy" if entry.kind == "policy" else "an approval"
    return RegistryError(
        f"{title} in entry {entry.number} of the history is invalid, because the entry was edited",
        hint="Check the change with `tuneline registry audit`. Restore the entry's tags, or acknowledge the finding with "
        "--repair and set the policy again with `tuneline policy set NAME FILE`.",
    )


def count_approvals(entries: Sequence[Entry], policy: Policy, intent: Entry) -> list[str]:
    """Return the names of the people who have approved this move, as `collect_approvals` counts; `intent.by` is the last.

    Raises:
        ApprovalNeededError: `intent.by` is not an approver.
    """
    check_approver(policy, intent.by)
    given = [entry.by for entry in _list_approvals(entries, intent) if entry.by in policy.approvers]
    return list(dict.fromkeys([*(by for by in given if by != intent.by), intent.by]))


def recheck_approvals(
    entries: Sequence[Entry], configured: Policy | None, intent: Entry, approved: Sequence[str]
) -> None:
    """Raise ApprovalNeededError if, in the current history, the approvals no longer satisfy the policy."""
    policy = get_effective_policy(entries, configured)
    now = count_approvals(entries, policy, intent)
    if len(now) < policy.approvals_required or not set(approved) <= set(now):
        raise ApprovalNeededError(
            "the policy or the approvals changed during the promotion: current approvals of version "
            f"{intent.to}: {', '.join(now)}; required: {policy.approvals_required}",
            hint="Run the same command again to list the missing approvals.",
        )


def collect_approvals(
    client: MlflowClient, model: str, entries: Sequence[Entry], policy: Policy, intent: Entry
) -> list[str]:
    """Return the names of the people who have approved this move; `intent.by` is the last.

    An approval applies to one version with one evaluation, one replaced version, and one setting of `force`. It expires
    with the next move of the alias and with the next policy.

    Raises:
        ApprovalNeededError: more approvals are needed; the approval of `intent.by` is recorded.
    """
    approved = count_approvals(entries, policy, intent)
    if len(approved) >= policy.approvals_required:
        return approved
    if all(entry.by != intent.by for entry in _list_approvals(entries, intent)):
        alias_moves.move_alias(client, model, intent.model_copy(update={"kind": "approval"}))
    missing = policy.approvals_required - len(approved)
    needed = "1 more approval is" if missing == 1 else f"{missing} more approvals are"
    others = ", ".join(name for name in policy.approvers if name not in approved)
    raise ApprovalNeededError(
        f"version {intent.to} of {model} is approved by {', '.join(approved)}, and {needed} needed",
        hint=f"Have one of {others} run: tuneline promote {model} --version {intent.to} --by NAME",
    )


def _list_approvals(entries: Sequence[Entry], intent: Entry) -> list[Entry]:
    """Return the approvals of this move since the alias last moved and the policy was set."""
    ends = [*registry_history.list_completed_moves(entries, intent.alias), *list_policies(entries)]
    start = max((entry.number for entry in ends), default=0)

    def get_identity(entry: Entry) -> tuple[str | bool | None, ...]:
        return entry.alias, entry.from_, entry.to, entry.digest, entry.evaluation, bool(entry.forced)

    edited = {entry.number for entry in registry_history.list_edited(entries)}
    return [
        entry
        for entry in entries
        if entry.number > start
        and entry.number not in edited
        and (entry.kind, entry.state) == ("approval", DONE)
        and get_identity(entry) == get_identity(intent)
    ]
