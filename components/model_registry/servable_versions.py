"""Versions that a deployment may serve: alias resolution, repeated promotion checks, and serving tags."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact
from components.common.runtime.errors import RegistryError
from components.model_registry import (
    history_signatures,
    mlflow_retry,
    model_versions,
    promotion_checks,
    promotion_policy,
    registry_history,
)
from components.model_registry.model_versions import MODEL_SHA256_TAG, TAG_PREFIX
from components.model_registry.promotion import CHAMPION
from components.model_registry.registry_history import DONE, PENDING, Entry

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

UNKNOWN_MODEL = "unknown"  # the caller serves no model yet; the history then determines the deployed model
POLL_TIMEOUT_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS, CLOSE_POLL_SECONDS = 10.0, 0.2  # for the entry of a move in progress
SERVING_TAG = f"{TAG_PREFIX}serving"
IN_SERVICE, REFUSED, RETIRED = "in service", "refused", "retired"


@dataclass(frozen=True)
class AliasTarget:
    """The version with an alias.

    Attributes:
        repository_sha256: digest of the version's package; "" if the version has no package.
        tags_sha256: digest of the version's tags; if they change, a refused version is checked again.
    """

    name: str
    version: str
    model_sha256: str
    repository_sha256: str
    tags_sha256: str = ""


def resolve_alias(name: str, alias: str) -> AliasTarget | None:
    """Return the version with the alias, or None. The registry timeout is POLL_TIMEOUT_SECONDS, because callers poll.

    Raises:
        RegistryError, EngineMissingError: as `model_versions.registry_client`.
    """
    model_versions.require_store(name)
    with mlflow_retry.limit_timeout(POLL_TIMEOUT_SECONDS), model_versions.registry_client() as client:
        version = model_versions.get_alias_holder(client, name, alias)
        if version is None:
            model_versions.require_model(client, name)
            return None
    digests = {key: str(version.tags.get(TAG_PREFIX + key, "")) for key in ("model_sha256", "repository_sha256")}
    stable = {
        key: value
        for key, value in version.tags.items()
        if key.startswith(TAG_PREFIX) and not key.startswith(SERVING_TAG)
    }
    return AliasTarget(name, str(version.version), **digests, tags_sha256=hashing.digest(stable))


def list_serving_objections(name: str, version: str, alias: str, in_service: str | None = UNKNOWN_MODEL) -> list[str]:
    """Return the reasons, as clauses, why a version with an alias must not be served.

    Repeats the checks of `promote`: the version is accepted and proven, and every file matches its registered digest.
    The comparison with the deployed model is checked only if the alias was moved outside of tuneline to a version that
    never had it. Otherwise `promote` has checked it, or a rollback does not require it. Objections that a forced
    promotion overruled are omitted.

    Args:
        in_service: digest of the deployed model; None if no model is deployed; UNKNOWN_MODEL to use the history.

    Raises:
        RegistryError: the model or version does not exist.
        EngineMissingError, DiskFullError, NotWritableError: as `promotion_checks.list_objections`.
    """
    with model_versions.registry_client() as client:
        target = model_versions.get_version(client, name, version)
        is_signed = bool(history_signatures.load_trust())
        history = _read_history(client, name, alias, str(target.version), waits=is_signed)
        # If the alias has moved and the entry is not closed yet, the move counts as completed. The entry has no seal yet.
        moves = [entry for entry in history if entry.is_move and entry.kind != "foreign" and entry.state == PENDING]
        unclosed = [entry for entry in moves if (entry.alias, entry.to) == (alias, str(target.version))]
        unclosed = [] if is_signed else unclosed  # anyone who can write to MLflow's database can add a pending entry
        completed = [entry for entry in history if entry.state == DONE or entry in unclosed]
        entries = [entry.model_copy(update={"state": DONE}) for entry in completed]
        incumbent = _get_expected_incumbent(client, target, alias, entries, in_service)
        policy, edited = promotion_policy.find_policy(history)
        requirements = promotion_checks.build_repeated_requirements(target, history, policy, unclosed)
        requirements = replace(requirements, incumbent_sha256=incumbent)
        objections = promotion_checks.list_objections(target, requirements)
        if edited and requirements.checks_age:  # `promote` did not check the version with the policy
            objections.append(edited)
        # No promotion overrides findings in the history: it may be forged itself.
        findings = history_signatures.list_open_findings(client, name, history)
    moves = registry_history.list_completed_moves(entries, alias)
    if not moves or moves[-1].kind == "foreign" or moves[-1].to != str(target.version):
        return [*objections, *findings]
    digest, model = moves[-1].digest, target.tags.get(MODEL_SHA256_TAG, "")
    if digest not in ("", model):
        objections.append(f"it was promoted with model {digest[:12]}, but now records model {model[:12]}")
    return [*registry_history.list_open_objections(entries, alias, str(target.version), objections), *findings]


def _read_history(client: MlflowClient, name: str, alias: str, version: str, *, waits: bool) -> list[Entry]:
    """Return the history; optionally wait for the end of a move of the alias to the version, which signs its entry."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
    while True:
        history = registry_history.read(client, name)
        is_moving = any((entry.alias, entry.to, entry.state) == (alias, version, PENDING) for entry in history)
        if not (waits and is_moving) or time.monotonic() > deadline:
            return history
        time.sleep(CLOSE_POLL_SECONDS)


def _get_expected_incumbent(
    client: MlflowClient, version: ModelVersion, alias: str, entries: Sequence[Entry], in_service: str | None
) -> str | None:
    """Return the digest of the model with which the evaluation must have compared the version."""
    moves = registry_history.list_completed_moves(entries, alias)
    earlier_holders = {entry.to for entry in moves if entry.kind != "foreign"} | {entry.from_ for entry in moves}
    if alias != CHAMPION or str(version.version) in earlier_holders:
        return promotion_checks.SKIP_COMPARISON
    if in_service != UNKNOWN_MODEL:
        return in_service
    holder = registry_history.get_recorded_holder(entries, alias)
    versions = {str(other.version): other for other in model_versions.list_versions(client, version.name)}
    return versions[holder].tags.get(MODEL_SHA256_TAG) if holder in versions else None


@contextmanager
def open_package(name: str, version: str) -> Iterator[Artifact]:
    """Yield the version's Triton package from its store, with every digest verified.

    Raises:
        RegistryError: the version has no package, or the package has another digest.
        ArtifactDamagedError: a file has changed.
    """
    with model_versions.registry_client() as client:
        target = model_versions.get_version(client, name, version)
    sha256 = target.tags.get(f"{TAG_PREFIX}repository_sha256")
    if target.tags.get(f"{TAG_PREFIX}kind") == REWARD_MODEL:
        raise RegistryError(
            f"{name} version {version} is a reward model, which is not served",
            hint="Use the model as a reward of the objective grpo, or choose another model.",
        )
    if not sha256:
        raise RegistryError(
            f"{name} version {version} has no Triton package", hint="Register the model again with its package."
        )
    with promotion_checks.open_artifact(target, "repository", sha256) as artifact:
        if artifact.sha256 != sha256:
            raise RegistryError(
                f"the package of {name} version {version} has the digest {artifact.sha256[:12]}; "
                f"the version records {sha256[:12]}",
                hint="Register the version again with its own package.",
            )
        yield artifact


def record_serving_state(name: str, version: str, state: str, reason: str = "") -> None:
    """Record in the version's tags whether the version is deployed, refused (with a reason) or retired.

    Args:
        state: IN_SERVICE, REFUSED or RETIRED.

    Raises:
        RegistryError: the model or version does not exist.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    tags = {SERVING_TAG: state, f"{SERVING_TAG}.at": at, f"{SERVING_TAG}.reason": reason[:4000]}
    with model_versions.registry_client() as client:
        model_versions.set_tags(client, model_versions.get_version(client, name, version), tags)
