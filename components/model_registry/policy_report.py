"""Reports on the release policy of a registered model: the policy in force, its history, and the test of a version."""

from __future__ import annotations

import json

from pydantic import BaseModel

from components.common.runtime.errors import RegistryError
from components.model_registry import model_versions, promotion_checks, promotion_policy, registry_history
from components.model_registry.policy_checks import PolicyInForce, RequirementResult
from components.model_registry.registry_history import Entry
from components.model_registry.release_policy import Policy


class PolicyChange(BaseModel):
    """An entry of the history that records a policy.

    Attributes:
        number: number of the entry.
        at: time of the entry in ISO 8601 format.
        by, account: name of the person who set the policy, and MLflow user of the process.
        changes: the changed keys with their values before and after.
        intact: whether the entry is as tuneline wrote it.
    """

    number: int
    at: str
    by: str
    account: str
    changes: list[str]
    intact: bool


class PolicyTest(BaseModel):
    """The comparison of a version with the policy.

    Attributes:
        entry: number of the policy's entry in the history; None if no policy is recorded.
        met: whether all requirements are met.
    """

    name: str
    version: str
    entry: int | None
    met: bool
    requirements: list[RequirementResult]


def read_policy_in_force(name: str) -> PolicyInForce:
    """Return the recorded policy of a model; an empty policy with the number 0 if none is recorded.

    Raises:
        RegistryError: the model does not exist, or the recorded policy was edited.
    """
    entries = _read_history(name)
    promotion_policy.check_unedited(entries)
    return promotion_policy.get_policy_in_force(entries)


def find_policy_in_force(name: str) -> PolicyInForce | None:
    """Return the recorded policy of a model, and check that this process can register a version.

    None if the registry does not exist, or records no policy for the model.

    Raises:
        RegistryError: the history is signed and this process has no key, or the recorded policy was edited.
    """
    if model_versions.is_registry_missing():
        return None
    with model_versions.registry_client() as client:
        entries = registry_history.read(client, name)
        registry_history.check_key(client, name, entries)
    if not promotion_policy.list_policies(entries):
        return None
    promotion_policy.check_unedited(entries)
    return promotion_policy.get_policy_in_force(entries)


def list_changes(name: str) -> list[PolicyChange]:
    """Return the recorded policies of a model, oldest first, each with its differences from its predecessor.

    Raises:
        RegistryError: the model does not exist.
    """
    entries = _read_history(name)
    edited = registry_history.list_edited(entries)
    changes, before = [], Policy()
    for entry in promotion_policy.list_policies(entries):
        try:
            policy = promotion_policy.parse_policy(entry)
            differences = _describe_differences(before, policy)
        except RegistryError as error:
            policy, differences = before, [error.message]
        changes.append(_build_change(entry, differences, intact=entry not in edited))
        before = policy
    return changes


def _build_change(entry: Entry, changes: list[str], *, intact: bool) -> PolicyChange:
    fields = entry.model_dump(include={"number", "at", "by", "account"})
    return PolicyChange(**fields, changes=changes, intact=intact)


def _describe_differences(before: Policy, after: Policy) -> list[str]:
    """Return `key: before → after` for each key whose value changed."""
    values = [policy.model_dump(mode="json", exclude_none=True) for policy in (before, after)]
    return [
        f"{key}: {' → '.join(json.dumps(value.get(key), ensure_ascii=False) for value in values)}"
        for key in Policy.model_fields
        if values[0].get(key) != values[1].get(key)
    ]


def check_version(name: str, number: str) -> PolicyTest:
    """Compare a version with every requirement of the recorded policy. Approvals are not part of the test.

    Raises:
        RegistryError: the model or version does not exist, the recorded policy was edited, or the version's files cannot
            be read.
    """
    in_force = read_policy_in_force(name)
    with model_versions.registry_client() as client:
        version = model_versions.get_version(client, name, number)
        results = promotion_checks.check_policy(version, in_force) if in_force.policy.has_requirements else []
    return PolicyTest(
        name=name,
        version=str(version.version),
        entry=in_force.number or None,
        met=all(result.met for result in results),
        requirements=results,
    )


def _read_history(name: str) -> list[Entry]:
    model_versions.require_store(name)
    with model_versions.registry_client() as client:
        model_versions.require_model(client, name)
        return registry_history.read(client, name)
