"""Registration of evaluated models as versions in MLflow, with the digests of their origin; automatic promotion."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.runtime.errors import RegistryError, UsageError
from components.common.runtime.reporters import Reporter
from components.common.runtime.user_name import get_user_name
from components.common.workspace import artifact_store
from components.model_registry import (
    alias_moves,
    lineage_tags,
    mlflow_retry,
    model_files,
    model_versions,
    promotion_policy,
    registry_history,
    signature_checks,
    split_reuse,
)
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.model_versions import MODEL_SHA256_TAG, TAG_PREFIX
from components.model_registry.promotion import CHAMPION, Promotion, promote, rollback
from components.model_registry.registry_history import DONE, Entry

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

__all__ = [
    "Promotion",
    "RegisteredModel",
    "Registration",
    "auto_promote",
    "find_champion",
    "get_registered",
    "promote",
    "register",
    "rollback",
]
LOGGED_MODEL_PREFIX = "models:/"  # prefix of a version's source before the ID of a logged model
CANDIDATE, CHALLENGER = "candidate", "challenger"


class Registration(BaseModel):
    """A registered model version. `tags` contains the tags with the prefix "tuneline."."""

    name: str
    version: str
    aliases: list[str]
    tags: dict[str, str]


class RegisteredModel(BaseModel):
    """A registered model version, described by its tags.

    Attributes:
        incumbent_sha256: digest of the model with which the evaluation compared the version; None without incumbent.
        finetune_key: digest of the recipe; "" if the version has no such tag.
        store_uri: location of the files in the artifact store.
        registered_at: time of the registration, UTC in ISO 8601 format.
        tags: all tags of the version.
    """

    name: str
    version: str
    model_sha256: str
    incumbent_sha256: str | None
    finetune_key: str
    store_uri: str
    registered_at: str
    tags: dict[str, str]

    def fetch(self, folder: Path) -> Artifact:
        """Copy the model's files into `folder` and verify every digest.

        Raises:
            RegistryError: the files are no longer available.
            ArtifactDamagedError: the files differ from the registered files.
        """
        with model_versions.registry_client():
            return model_files.fetch_model(self.name, self.version, self.model_sha256, self.store_uri, folder)

    def fetch_evaluation(self, folder: Path) -> Artifact:
        """Copy the evaluation that MLflow stores with the model into the new folder `folder`, and verify every digest.

        Raises:
            RegistryError: MLflow does not store the evaluation.
            ArtifactDamagedError: the files differ from the manifest.
        """
        with model_versions.registry_client():
            return model_files.fetch_evaluation(self.name, self.version, folder)

    def read_manifest(self) -> Manifest:
        """Return the manifest of the model whose files MLflow stores for this version.

        Raises:
            RegistryError: MLflow does not store the manifest.
        """
        with model_versions.registry_client():
            return model_files.read_logged_manifest(self.name, self.version)

    def read_logged_sha256(self) -> str:
        """Return the digest of the model whose files MLflow stores.

        Raises:
            RegistryError: MLflow does not store the manifest.
        """
        return self.read_manifest().content_sha256


def register(
    model: Artifact,
    evaluation: Artifact,
    repository: Artifact | None,
    config: ModelRegistryConfig,
    *,
    reporter: Reporter,
    dataset_version: Mapping[str, object] | None = None,
    finetune_key: str = "",
    cost: str = "",
) -> Registration:
    """Register an evaluated model under `config.name`, or refresh the tags of the version with the same model digest.

    The version gets the alias `candidate`, and `challenger` if its evaluation was accepted. No alias moves if the
    version is the champion. If the verdict is `unchanged` (the model is equal to the champion), the tags do not change.
    If a registration is killed, the next registration of the same model completes it.

    Args:
        dataset_version: the dataset's revision as returned by data_versioning.
        finetune_key: digest of the recipe; "" for the key in the model's manifest.
        cost: text with the cost of the version's artifacts, for the tag `tuneline.cost`; "" if it is not known.

    Raises:
        UsageError: the evaluation or the package was built from another model, or the name is reserved for a history.
        RegistryError: the evaluation has no valid verdict, the evaluation or the package contradicts itself or the model,
            or MLflow does not list an upload or the new version.
    """
    if registry_history.is_history_name(config.name):
        raise UsageError(
            f"the model name {config.name} is reserved for a history",
            hint=f"Choose a name that does not end in {model_versions.HISTORY_SUFFIX}.",
        )
    lineage_tags.check_sources(model, evaluation, repository)
    tags = lineage_tags.build_version_tags(model, evaluation, repository, dataset_version, finetune_key)
    if cost:
        tags[model_versions.COST_TAG] = cost
    verdict = lineage_tags.read_verdict(evaluation)
    lineage_tags.check_evidence(model, evaluation, repository)
    signed = [model, evaluation, *([repository] if repository else [])]
    signature_checks.sign_version(signed, artifact_store.get_artifact_uri(model), reporter)
    with model_versions.registry_client() as client:
        version = _find_registered(client, config.name, model.sha256)
        if version:
            reporter.note(f"{config.name} version {version.version} already contains this model")
            if verdict != "unchanged":
                _refresh_version(client, version, tags, model, evaluation)
        else:
            reporter.step(f"registering {config.name}")
            version = _create_version(client, config, model, evaluation, tags)
        passed = split_reuse.record_candidate(client, version, evaluation, reporter)
        if CHAMPION not in version.aliases:
            by, fields = get_user_name(), {"digest": model.sha256, "evaluation": evaluation.sha256}
            moves = [
                Entry(kind="register", alias=alias, to=str(version.version), by=by, **fields)
                for alias in (CANDIDATE, *([CHALLENGER] if verdict == "accepted" and passed else []))
                if alias not in version.aliases
            ]
            if verdict == "refused" and CHALLENGER in version.aliases:
                moves.append(Entry(kind="register", alias=CHALLENGER, by=by, reason="its new evaluation refuses it"))
            for move in moves:
                alias_moves.move_alias(client, version.name, move)
        if verdict != "unchanged":
            _date_evaluation(client, version, evaluation)
        now = client.get_model_version(version.name, version.version)
    shown = {key: value for key, value in sorted(now.tags.items()) if key.startswith(TAG_PREFIX)}
    return Registration(name=now.name, version=str(now.version), aliases=sorted(now.aliases), tags=shown)


def _date_evaluation(client: MlflowClient, version: ModelVersion, evaluation: Artifact) -> None:
    """Record an evaluation that no entry of the history names, such as a new evaluation of the candidate."""
    entries = registry_history.read(client, version.name)
    if not any((entry.evaluation, entry.state) == (evaluation.sha256, DONE) for entry in entries):
        digest = version.tags.get(MODEL_SHA256_TAG, "")
        intent = Entry(kind="evaluation", to=str(version.version), digest=digest, evaluation=evaluation.sha256)
        alias_moves.move_alias(client, version.name, intent.model_copy(update={"by": get_user_name()}))


def _find_registered(client: MlflowClient, name: str, model_sha256: str) -> ModelVersion | None:
    """Return the version with this digest; delete duplicates from a lost response or a concurrent job."""
    versions = model_versions.search_versions(client, name, (MODEL_SHA256_TAG, model_sha256))
    for duplicate in versions[1:]:
        model_versions.delete_without_alias(client, duplicate)
    return client.get_model_version(name, versions[0].version) if versions else None


def _refresh_version(
    client: MlflowClient, version: ModelVersion, tags: Mapping[str, str], model: Artifact, evaluation: Artifact
) -> None:
    """Replace the evaluation and the tags, and add the MLmodel file that versions of earlier releases lack."""
    # The evaluation is uploaded before the tags that refer to it: a promotion elsewhere reads it from MLflow.
    if str(version.source).startswith(LOGGED_MODEL_PREFIX):
        model_id = str(version.source).removeprefix(LOGGED_MODEL_PREFIX)
        model_files.log_evaluation(client, model_id, evaluation)
        model_files.log_mlmodel(client, model_id, model)
    description = lineage_tags.format_description(tags)
    if version.description != description:
        client.update_model_version(version.name, version.version, description=description)
    superseded = dict.fromkeys(lineage_tags.list_superseded_tags(version.tags, tags), "")
    model_versions.set_tags(client, version, {**superseded, **tags})


def _create_version(
    client: MlflowClient, config: ModelRegistryConfig, model: Artifact, evaluation: Artifact, tags: Mapping[str, str]
) -> ModelVersion:
    """Upload the files, then create the version with all its tags, so that a killed job leaves no version."""
    logged = model_files.log_model(client, config.name, model, evaluation, config.copy_limit_mb)
    model_versions.ensure_model(client, config.name)
    mlflow_retry.retry(
        lambda: client.create_model_version(
            config.name,
            f"{LOGGED_MODEL_PREFIX}{logged.model_id}",
            run_id=logged.source_run_id or None,  # MLflow's authentication rejects an empty run ID for every user
            tags={f"{TAG_PREFIX}proof": lineage_tags.UNPACKAGED, **tags},
            description=lineage_tags.format_description(tags),
            model_id=logged.model_id,
        ),
        lambda: _find_registered(client, config.name, model.sha256),
    )
    version = _find_registered(client, config.name, model.sha256)
    if version is None:
        raise RegistryError(
            f"MLflow accepted a new version of {config.name}, but does not list it",
            hint="Check the MLflow server's log.",
        )
    return version


def auto_promote(
    config: ModelRegistryConfig, version: str, *, incumbent_sha256: str | None, reporter: Reporter
) -> Promotion | None:
    """Promote a version on behalf of the pipeline. Its evaluation must contain the regression suite.

    Returns:
        The promotion; None, after a note with the reason, if a person must approve the promotion, a rollback withdrew
        this version, or the version does not pass with the confidence that is left on its test split.

    Raises:
        RegistryError: the version must not be promoted, or the champion changed during this run.
    """
    with model_versions.registry_client() as client:
        moves = registry_history.list_completed_moves(registry_history.read(client, config.name), CHAMPION)
        result = model_versions.get_version(client, config.name, version).tags.get(split_reuse.RESULT_TAG)
    if result == split_reuse.FAILED:
        reporter.note(
            f"{config.name} version {version} is not promoted: earlier candidates failed on its test split, and this "
            "version does not pass with the remaining error probability. Add new test rows, or promote the version "
            "with --force --reason TEXT"
        )
        return None
    latest = next((move for move in reversed(moves) if version in (move.from_, move.to)), None)
    if latest and latest.kind == "rollback" and latest.from_ == version:
        reporter.note(
            f"{config.name} version {version} is not promoted: {latest.by} rolled the champion back from this "
            f"version ({latest.reason}). To promote the version anyway: tuneline promote {config.name} --version "
            f"{version}"
        )
        return None
    try:
        return promote(
            config.name,
            version,
            by="pipeline",
            incumbent_sha256=incumbent_sha256,
            policy=promotion_policy.build_policy(config),
            requires_suite=True,
            reporter=reporter,
        )
    except promotion_policy.ApprovalNeededError as needed:
        reporter.note(f"{config.name} version {version} is not promoted: {needed.message}. {needed.hint}")
        return None


def find_champion(name: str, alias: str = CHAMPION) -> RegisteredModel | None:
    """Return the version with the alias; None if the registry, the model or the alias does not exist yet.

    Raises:
        RegistryError: tuneline did not register the version, so its origin is unknown.
    """
    if model_versions.is_registry_missing():
        return None
    with model_versions.registry_client() as client:
        version = model_versions.get_alias_holder(client, name, alias)
    if version is None:
        return None
    if MODEL_SHA256_TAG not in version.tags:
        raise RegistryError(
            f"{name} version {version.version} is the {alias}, but was not registered by tuneline",
            hint=f"Remove the alias {alias}, or set another model_registry.name.",
        )
    return _build_registered_model(version)


def get_registered(name: str, which: str) -> RegisteredModel:
    """Return the version of a registered model with this number or alias.

    Raises:
        RegistryError: the model, version or alias does not exist, or tuneline did not register the version.
    """
    model_versions.require_store(name)
    with model_versions.registry_client() as client:
        find = model_versions.get_version if which.isdecimal() else model_versions.get_version_by_alias
        version = find(client, name, which)
    if MODEL_SHA256_TAG not in version.tags:
        raise RegistryError(
            f"{name} version {version.version} was not registered by tuneline, so its origin is unknown",
            hint="Register the model with `tuneline register` or `tuneline run`.",
        )
    return _build_registered_model(version)


def tag_version(name: str, version: str, tags: Mapping[str, str]) -> None:
    """Set tags of a version; their names get tuneline's prefix. Empty values delete tags.

    Raises:
        RegistryError: the model or version does not exist.
    """
    with model_versions.registry_client() as client:
        found = model_versions.get_version(client, name, version)
        model_versions.set_tags(client, found, {f"{model_versions.TAG_PREFIX}{key}": tags[key] for key in tags})


def find_by_digest(name: str, sha256: str) -> RegisteredModel | None:
    """Return the version of a registered model with this model digest, or None; an empty name searches all models."""
    with model_versions.registry_client() as client:
        tag = (MODEL_SHA256_TAG, sha256)
        version = _find_registered(client, name, sha256) if name else model_versions.find_version_by_tag(client, tag)
    return _build_registered_model(version) if version else None


def _build_registered_model(version: ModelVersion) -> RegisteredModel:
    tags = model_versions.get_tuneline_tags(version)
    return RegisteredModel(
        name=version.name,
        version=str(version.version),
        model_sha256=tags["model_sha256"],
        incumbent_sha256=tags.get("incumbent_sha256"),
        finetune_key=tags.get("finetune_key", ""),
        store_uri=tags.get("store_uri", ""),
        registered_at=datetime.fromtimestamp(version.creation_timestamp // 1000, UTC).isoformat(),
        tags=dict(version.tags),
    )
