"""Who may promote: a policy that names approvers, and how many of them it takes. Approvals are entries of the history."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.common.errors import ConfigurationError, RegistryError
from components.model_registry import history, moving
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history import DONE, Entry


class ApprovalNeededError(RegistryError):
    """The policy asks for the approval of more people, or of others."""

    kind = "approval_needed"


class Policy(BaseModel):
    """Who approves a promotion; nobody named: anyone who may write to the registry."""

    model_config = ConfigDict(extra="forbid")

    approvers: list[str] = Field([], description="Names that may be given with --by.")
    approvals_required: int = Field(1, ge=1, le=2, description="How many of them have to approve a promotion.")

    @model_validator(mode="after")
    def _enough(self) -> Policy:
        if self.approvals_required > max(len(set(self.approvers)), 1):
            raise ValueError(f"approvals_required is {self.approvals_required}, and approvers names {len(set(self.approvers))}")
        return self


def read(path: Path) -> Policy:
    """The policy in a YAML file. Raises ConfigurationError for a file that says something else."""
    import yaml

    try:
        return Policy.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Name a file like mlflow/promotion-policy.yaml.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(
            f"{path}: {where + ': ' if where else ''}{first['msg']}", hint="See mlflow/promotion-policy.yaml."
        ) from None


def of(config: ModelRegistryConfig) -> Policy | None:
    """The policy of a configuration; None where it names nobody."""
    return Policy(approvers=config.approvers, approvals_required=config.approvals_required) if config.approvers else None


def in_force(entries: Iterable[Entry], configured: Policy | None = None) -> Policy:
    """The policy that the history holds last; without one, that of the configuration."""
    written = [entry for entry in entries if entry.kind == "policy" and entry.state == DONE]
    try:
        return Policy.model_validate_json(written[-1].reason) if written else configured or Policy()
    except ValidationError:
        raise RegistryError(
            f"the policy in entry {written[-1].number} of the history is none any more: it was changed by hand",
            hint="tuneline registry audit says what was changed; write the tag tuneline.reason back as it was.",
        ) from None


def write(client: Any, model: str, policy: Policy, by: str) -> Entry:
    """Put a policy in force from now on. Where the one in force names approvers, only one of them may.

    Raises RegistryError for one that is too long to keep.
    """
    text = json.dumps(policy.model_dump())
    if len(text) > history.LONGEST:
        raise RegistryError(f"the policy has {len(text)} characters, and {history.LONGEST} are kept", hint="Name fewer approvers.")

    def by_an_approver(_: Any, earlier: Iterable[Entry]) -> None:
        check_named(in_force(earlier), by)

    return moving.move(client, model, Entry(kind="policy", by=by, reason=text), by_an_approver)


def check_named(policy: Policy, by: str) -> None:
    """Raise ApprovalNeededError where the policy names approvers and `by` is none of them."""
    if policy.approvers and by not in policy.approvers:
        raise ApprovalNeededError(
            f"{by} is no approver", hint=f"The policy names {', '.join(policy.approvers)}; say who approves with --by NAME."
        )


def approvers_of(entries: Iterable[Entry], policy: Policy, intent: Entry) -> list[str]:
    """Who approved this move by the history and whose word is not used up, the mover last. Raises ApprovalNeededError for a stranger."""
    check_named(policy, intent.by)
    given = [entry.by for entry in _unused(entries, intent.alias) if _is_for(entry, intent) and entry.by in policy.approvers]
    return list(dict.fromkeys([*(by for by in given if by != intent.by), intent.by]))


def recheck(entries: Iterable[Entry], configured: Policy | None, intent: Entry, approved: Iterable[str]) -> None:
    """Raise ApprovalNeededError where those who approved are not enough, or not the right ones, by what the history says meanwhile."""
    there = list(entries)
    policy = in_force(there, configured)
    now = approvers_of(there, policy, intent)
    if len(now) < policy.approvals_required or not set(approved) <= set(now):
        raise ApprovalNeededError(
            f"the policy or the approvals changed meanwhile: version {intent.to} is now approved by {', '.join(now)}",
            hint="Run the same command again: it says whose approval is needed.",
        )


def collect(client: Any, model: str, entries: Iterable[Entry], policy: Policy, intent: Entry) -> list[str]:
    """Who approved this move, the one who makes it last. Raises ApprovalNeededError when more have to; this approval is then kept.

    An approval is for one version with one evaluation, in the place of one version in service, with or without force. The next move of
    the alias uses it up, wherever it went.
    """
    there = list(entries)
    approved = approvers_of(there, policy, intent)
    if len(approved) >= policy.approvals_required:
        return approved
    if not any(entry.by == intent.by and _is_for(entry, intent) for entry in _unused(there, intent.alias)):
        moving.move(client, model, intent.model_copy(update={"kind": "approval"}))
    missing = policy.approvals_required - len(approved)
    others = ", ".join(name for name in policy.approvers if name not in approved)
    raise ApprovalNeededError(
        f"version {intent.to} of {model} is approved by {', '.join(approved)}, and {missing} more approval is needed",
        hint=f"Another of {others} approves it with: tuneline promote {model} --version {intent.to} --by NAME",
    )


def _unused(entries: Iterable[Entry], alias: str) -> list[Entry]:
    """What was written since the alias moved last."""
    there = list(entries)
    moved = max((entry.number for entry in history.moves(there, alias)), default=0)
    return [entry for entry in there if entry.number > moved]


def _is_for(entry: Entry, intent: Entry) -> bool:
    if entry.kind != "approval" or entry.state != DONE:
        return False
    same = ("alias", "from_", "to", "digest", "evaluation")
    return all(getattr(entry, name) == getattr(intent, name) for name in same) and bool(entry.forced) == bool(intent.forced)
