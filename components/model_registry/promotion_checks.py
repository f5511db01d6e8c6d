"""Checks before a promotion: the version is accepted over the current champion, proven, and undamaged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import TEMPORARY_ERRORS, RegistryError, TunelineError
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.model_registry import (
    checkpoints,
    evidence,
    history_signatures,
    lineage_tags,
    model_files,
    policy_checks,
    registry_history,
    signature_checks,
    split_reuse,
    training_rows,
    trust_root,
)
from components.model_registry.lineage_tags import PROVEN
from components.model_registry.model_versions import TAG_PREFIX
from components.model_registry.policy_checks import PolicyInForce, RequirementResult
from components.model_registry.registry_history import DONE, Entry

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

SKIP_COMPARISON = "not compared"  # aliases other than champion accept any incumbent


@dataclass(frozen=True)
class Requirements:
    """What a version must satisfy in addition to an accepted, consistent evaluation and a proven package.

    Attributes:
        incumbent_sha256: digest of the deployed model, with which the evaluation must have compared the version; None
            if no model is deployed; SKIP_COMPARISON to accept any incumbent.
        rules: the rules that the gate must have applied, as in `evaluation.gate`; stricter rules are accepted.
        min_items: `evaluation.min_items` of these rules; None for the default.
        tasks: the tasks of these rules by name, as in `evidence.check_rules`.
        was_promoted: whether the history records a promotion of the same model with the same evaluation. The
            evaluated rows are then not compared with the training rows again, and evidence of earlier versions of
            tuneline is accepted.
        policy: the policy in force; None for no policy.
        checks_age: whether the policy's maximum age of an evaluation applies.
        requires_suite: whether the evaluation must contain the regression suite.
    """

    incumbent_sha256: str | None = SKIP_COMPARISON
    rules: Sequence[dict[str, Any]] = ()
    min_items: int | None = None
    was_promoted: bool = False
    tasks: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    policy: PolicyInForce | None = None
    checks_age: bool = True
    requires_suite: bool = False


def list_objections(version: ModelVersion, requirements: Requirements) -> list[str]:
    """Return the reasons, as clauses, why a version must not be promoted. Reads and verifies every file.

    Raises:
        EngineMissingError, DiskFullError, NotWritableError: the files cannot be read at the moment; this is not an
            objection to the version.
    """
    verdict = _get_tag(version, "verdict")
    objections = [] if verdict == "accepted" else [f"{evidence.VERDICT_OBJECTION} {verdict or 'missing'}"]
    with ExitStack() as stack:
        artifacts, unreadable = _open_artifacts(version, stack)
        model = artifacts.get("model")
        if model is None or model.manifest.kind != artifact_folder.REWARD_MODEL:  # a reward model is not served
            objections += _check_package_tags(version)
        objections += _check_comparison(_get_tag(version, "incumbent_sha256"), requirements.incumbent_sha256)
        objections += unreadable
        if evaluation := artifacts.get("evaluation"):
            objections += _check_evaluation(version, evaluation, model, requirements)
        if requirements.policy and (result := _check_signatures(version.name, requirements.policy, artifacts)):
            objections += [result.reason] if result.reason else []
        if repository := artifacts.get("repository"):
            dataset = model.manifest.find_input("dataset") if model else None
            sha256, evaluated = _get_tag(version, "model_sha256") or "", artifacts.get("evaluation")
            objections += evidence.check_package(repository, sha256, dataset, evaluated)
    if requirements.was_promoted:
        earlier = (evidence.EARLIER_EVALUATION, evidence.EARLIER_PACKAGE)
        objections = [clause for clause in objections if clause not in earlier]
    return list(dict.fromkeys(objections))


def _check_package_tags(version: ModelVersion) -> list[str]:
    if not _get_tag(version, "repository_sha256"):
        return ["it has no Triton package"]
    return [] if _get_tag(version, "proof") == PROVEN else ["its Triton package is unproven"]


def build_repeated_requirements(
    version: ModelVersion, history: Sequence[Entry], policy: PolicyInForce | None, unclosed: Sequence[Entry] = ()
) -> Requirements:
    """Return the requirements for a version that has, or had, its alias: for rollback, deployment and audit.

    The maximum age of an evaluation applies to the decision, so a promoted version does not expire.
    """
    promoted = was_promoted(version, history, unclosed)
    decided = was_promoted(version, history, unclosed, counts_forced=True)
    return Requirements(was_promoted=promoted, policy=policy, checks_age=not decided)


def was_promoted(
    version: ModelVersion, history: Sequence[Entry], unclosed: Sequence[Entry] = (), *, counts_forced: bool = False
) -> bool:
    """Return whether the history records an unforced promotion of the version with its present model and evaluation.

    Args:
        history: all entries, as read.
        unclosed: pending entries of the history whose moves count as completed.
        counts_forced: count forced promotions too.
    """
    model, evaluation = _get_tag(version, "model_sha256"), _get_tag(version, "evaluation_sha256")
    edited = registry_history.list_edited(history)
    return any(
        (move.to, move.digest, move.evaluation) == (str(version.version), model, evaluation)
        for move in history
        if move.kind == "promote"
        and (counts_forced or not move.forced)
        and (move in unclosed or (move.state == DONE and move not in edited))
    )


def _get_tag(version: ModelVersion, name: str) -> str | None:
    return version.tags.get(TAG_PREFIX + name) or None


def _check_comparison(compared: str | None, incumbent: str | None) -> list[str]:
    if incumbent in (SKIP_COMPARISON, compared):
        return []
    names = [f"model {sha256[:12]}" if sha256 else "no model" for sha256 in (compared, incumbent)]
    return [f"its evaluation compared it with {names[0]}, and the champion is {names[1]}"]


def _open_artifacts(
    version: ModelVersion, stack: ExitStack, kinds: Sequence[str] = ("model", "evaluation", "repository")
) -> tuple[dict[str, Artifact], list[str]]:
    """Return the version's intact artifacts by kind, and the objections to the others, as clauses."""
    artifacts: dict[str, Artifact] = {}
    objections: list[str] = []
    for kind in kinds:
        sha256 = _get_tag(version, f"{kind}_sha256")
        if sha256 is None:  # `list_objections` reports the missing tag
            continue
        try:
            artifact = stack.enter_context(open_artifact(version, kind, sha256))
        except TEMPORARY_ERRORS:
            raise
        except TunelineError as error:
            objections.append(f"its {kind} cannot be verified ({error.message})")
            continue
        if artifact.sha256 == sha256:
            artifacts[kind] = artifact
        else:
            objections.append(f"its {kind} has the digest {artifact.sha256[:12]}; the version records {sha256[:12]}")
    return artifacts, objections


def check_policy(version: ModelVersion, in_force: PolicyInForce) -> list[RequirementResult]:
    """Compare a version with each requirement of the policy, as a promotion does.

    Raises:
        RegistryError: the evaluation or the model cannot be read.
    """
    with ExitStack() as stack:
        kinds = ("evaluation", "model", *(["repository"] if in_force.policy.signatures else []))
        artifacts, objections = _open_artifacts(version, stack, kinds)
        if "evaluation" in artifacts and "model" in artifacts:
            try:
                results = policy_checks.check_version(
                    in_force, artifacts["evaluation"], artifacts["model"], checks_age=True
                )
                signatures = _check_signatures(version.name, in_force, artifacts)
                return [*results, *([signatures] if signatures else [])]
            except evidence.list_content_errors() as error:
                objections.append(evidence.describe_content_error(error))
        problem = " and ".join(objections) or "it has no evaluation"
        raise RegistryError(
            f"version {version.version} of {version.name} cannot be tested: {problem}",
            hint="Mount the artifact store, or register the version again.",
        )


def _check_signatures(
    name: str, in_force: PolicyInForce, artifacts: Mapping[str, Artifact]
) -> RequirementResult | None:
    """Compare the signatures of a version with the policy; None if the policy does not require signatures."""
    if not in_force.policy.signatures:
        return None
    trust = history_signatures.load_trust()
    if allowed := in_force.policy.trusted_keys:
        trust = replace(trust, allowed=frozenset(allowed))
    if not trust:
        objections = [f"{in_force.title} requires signatures; no trusted key is set in {trust_root.TRUST_VARIABLE}"]
    else:
        objections = signature_checks.list_objections(artifacts, trust)
        if not any(entry.signature for entry in in_force.history):
            objections.append(f"{in_force.title} requires signatures; the history is not signed")
        if checkpoints.read(name) is None:
            location = checkpoints.describe_location(name)
            objections.append(f"{in_force.title} requires signatures; the checkpoint {location} does not exist")
    return RequirementResult(
        requirement="signatures of the version's lineage and history",
        met=not objections,
        reason=" and ".join(objections),
    )


@contextmanager
def open_artifact(version: ModelVersion, kind: str, sha256: str) -> Iterator[Artifact]:
    """Yield the artifact from the URI in the tags, the workdir's store or MLflow, with every digest verified.

    Args:
        kind: model, evaluation or repository.
        sha256: digest of the artifact, for its path in the workdir's store.

    Raises:
        ArtifactDamagedError: the only copies in the stores are damaged.
        RegistryError: no store has the artifact, and MLflow does not return the files.
    """
    recorded = _get_tag(version, "store_uri" if kind == "model" else f"{kind}_store_uri")
    default = artifact_store.build_artifact_uri(Workdir.from_environment().store, sha256)
    damage: TunelineError | None = None
    for uri in (recorded, default):
        try:
            folder = artifact_store.resolve_artifact_uri(uri) if uri else None
            if folder is None or not (folder / artifact_folder.MANIFEST_FILENAME).exists():
                continue
            artifact = artifact_folder.read(folder, kind)
        except TunelineError as error:
            damage = damage if isinstance(damage, TEMPORARY_ERRORS) else error
            continue
        yield artifact
        return
    if damage:
        raise damage
    with tempfile.TemporaryDirectory() as temporary:
        yield model_files.fetch_artifact(version, kind, Path(temporary) / kind)


def _check_evaluation(
    version: ModelVersion, evaluation: Artifact, model: Artifact | None, requirements: Requirements
) -> list[str]:
    """Return the objections in the evaluation itself, because its tags can be edited in MLflow's UI."""
    compared = evaluation.manifest.find_input("incumbent")
    try:
        verdict = lineage_tags.read_verdict(evaluation)
    except RegistryError as error:
        return [error.message]
    objections = [] if verdict == "accepted" else [f"{evidence.VERDICT_OBJECTION} {verdict}"]
    source = evaluation.manifest.find_input("model")
    if source is None or source.content_sha256 != _get_tag(version, "model_sha256"):
        objections.append("its evaluation measured another model")
    objections += _check_comparison(compared.content_sha256 if compared else None, requirements.incumbent_sha256)
    try:
        return [*objections, *_check_content(version, evaluation, model, requirements)]
    except evidence.list_content_errors() as error:
        return [*objections, evidence.describe_content_error(error)]


def _check_content(
    version: ModelVersion, evaluation: Artifact, model: Artifact | None, requirements: Requirements
) -> list[str]:
    """Return the objections to the files of an evaluation. The files are consistent after the first check."""
    if model is None:  # reported by `_open_artifacts`
        return []
    found = evidence.check_evaluation(evaluation, model.manifest)
    if found and found != [evidence.EARLIER_EVALUATION]:
        return found
    other = split_reuse.list_objections(version, evaluation)
    if policy := requirements.policy:
        results = policy_checks.check_version(policy, evaluation, model, checks_age=requirements.checks_age)
        other += [result.reason for result in results if not result.met]
    if requirements.requires_suite:
        other += policy_checks.list_suite_objections(evidence.read_content(evaluation), "automatic promotion")
    if found := found or evidence.check_dataset(evaluation, model.manifest):
        return [*other, *found]
    found = evidence.check_rules(evaluation, requirements.rules, requirements.min_items, requirements.tasks)
    if not requirements.was_promoted:
        found += training_rows.check_training_rows(evaluation, model.manifest, _get_tag(version, "store_uri") or "")
    return [*other, *found]
