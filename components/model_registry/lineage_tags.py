"""Tags of a model version that describe its origin: the digests of all its inputs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from components.common.artifacts.artifact_folder import REWARD_MODEL, Artifact
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import RegistryError, UsageError
from components.common.workspace import artifact_store
from components.model_registry import evidence
from components.model_registry.model_versions import TAG_PREFIX

PROVEN, UNPROVEN, UNPACKAGED = "proven", "unproven", "unpackaged"
SCORE_PREFIX = "score."
MAX_SCORES = 60
# A new evaluation of the model replaces all tags with these prefixes.
EVALUATION_PREFIXES = tuple(
    TAG_PREFIX + name
    for name in (SCORE_PREFIX, "verdict", "reasons", "evaluation_sha256", "evaluation_store_uri", "incumbent_sha256")
)


def check_sources(model: Artifact, evaluation: Artifact, repository: Artifact | None) -> None:
    """Raise UsageError if the evaluation or the package was built from another model."""
    for artifact in filter(None, (evaluation, repository)):
        source = artifact.manifest.find_input("model")
        if source is None or source.content_sha256 != model.sha256:
            kind, other = artifact.manifest.kind, f"the model {source.content_sha256}" if source else "no tuned model"
            raise UsageError(
                f"the {kind} in {artifact.path} was built from {other}; expected the model {model.sha256}",
                hint=f"Build the {kind} from this model again.",
            )


def check_evidence(model: Artifact, evaluation: Artifact, repository: Artifact | None) -> None:
    """Raise RegistryError if the evaluation or the package contradicts itself or the model.

    Artifacts of earlier versions of tuneline do not state what they measured; they are registered, and not promoted.
    """
    objections = evidence.check_evaluation(evaluation, model.manifest) if evidence.states_subject(evaluation) else []
    if repository and evidence.covers_proof(repository):
        unproven = ["its Triton package is unproven"]  # the tags record it
        found = evidence.check_package(repository, model.sha256, model.manifest.find_input("dataset"), evaluation)
        objections += [each for each in found if each not in unproven]
    if objections:
        raise RegistryError(
            f"the model {model.sha256[:12]} cannot be registered: {' and '.join(objections)}",
            hint="Evaluate and package the model again with --overwrite.",
        )


def build_version_tags(
    model: Artifact,
    evaluation: Artifact,
    repository: Artifact | None,
    dataset_version: Mapping[str, object] | None,
    finetune_key: str,
) -> dict[str, str]:
    """Return the non-empty tags of a version: digests, locations, verdict, scores and proof of the package.

    Args:
        dataset_version: the dataset's revision in the data repository, with the keys "rev", "tag", "md5" and "uri".
        finetune_key: digest of the recipe; "" for the key in the model's manifest.

    Raises:
        RegistryError: the evaluation's verdict is missing, unknown or inconsistent.
    """
    produced_by, incumbent = model.manifest.produced_by, evaluation.manifest.find_input("incumbent")
    tags = {
        "model_sha256": model.sha256,
        "store_uri": artifact_store.get_artifact_uri(model),
        "finetune_key": finetune_key or str(produced_by.get("key", "")),
        "git_commit": str(produced_by.get("git_commit") or ""),
        "kfp_run": os.environ.get("KFP_RUN_ID", ""),
        "kind": REWARD_MODEL if model.manifest.kind == REWARD_MODEL else "",
    }
    for kind in ("dataset", "base_model"):
        if source := model.manifest.find_input(kind):
            tags |= {f"{kind}_sha256": source.content_sha256, f"{kind}_uri": source.uri}
    for name in ("rev", "tag", "md5", "uri"):
        if value := (dataset_version or {}).get(name):
            tags[f"dataset_{name}"] = str(value)
    tags |= {
        "verdict": read_verdict(evaluation),
        "reasons": " ".join(map(str, evaluation.manifest.summary.get("reasons", [])))[:4000],
        "evaluation_sha256": evaluation.sha256,
        "evaluation_store_uri": artifact_store.get_artifact_uri(evaluation),
        "incumbent_sha256": incumbent.content_sha256 if incumbent else "",
        **_build_score_tags(evaluation),
    }
    if repository:
        tags |= {
            "repository_sha256": repository.sha256,
            "repository_store_uri": artifact_store.get_artifact_uri(repository),
            "proof": PROVEN if repository.manifest.summary.get("proof") else UNPROVEN,
        }
    return {TAG_PREFIX + name: value for name, value in tags.items() if value}


def list_recipe_params(model: Artifact) -> dict[str, object]:
    """Return the completed recipe of a model by configuration key, with its seed and the digests of its inputs."""
    manifest = model.manifest
    inputs = {kind: manifest.find_input(kind) for kind in ("base_model", "dataset")}
    return {
        **mlflow_tracking.flatten(manifest.config, "fine_tuning."),
        "seed": manifest.seed,
        **{f"{kind}_sha256": found.content_sha256 for kind, found in inputs.items() if found},
    }


def _build_score_tags(evaluation: Artifact) -> dict[str, str]:
    """Return the candidate's scores in evaluation.json, keyed by `score.TASK.METRIC`."""
    content = evidence.read_content(evaluation)
    scores = {
        f"{SCORE_PREFIX}{task}.{metric}": values["candidate"]
        for task, metrics in content.get("metrics", {}).items()
        for metric, values in metrics.items()
        if isinstance(values, dict) and isinstance(values.get("candidate"), (int, float))
    }
    # MLflow restricts the characters and the length of a tag's name.
    return {re.sub(r"[^\w\-. /]", "_", name)[:200]: f"{value:.6g}" for name, value in list(scores.items())[:MAX_SCORES]}


def list_superseded_tags(present: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the names of the tags of an earlier evaluation that the new evaluation does not set."""
    return [key for key in present if key not in new and key.startswith(EVALUATION_PREFIXES)]


def read_verdict(evaluation: Artifact) -> str:
    """Return the verdict in evaluation.json: accepted, refused or unchanged.

    The digest covers evaluation.json, but not the manifest's summary.

    Raises:
        RegistryError: the verdict is missing or unknown, or the manifest's summary contains a different verdict.
    """
    verdict = str(evaluation.manifest.summary.get("verdict", ""))
    if any(file.path == "evaluation.json" for file in evaluation.manifest.files):
        recorded = evidence.read_content(evaluation).get("verdict")
        if recorded != verdict:
            raise RegistryError(
                f"{evaluation.path}: evaluation.json records "
                f"{f'the verdict {recorded}' if recorded else 'no verdict'}; "
                f"the manifest records {verdict or 'no verdict'}",
                hint="Evaluate the model again with --overwrite.",
            )
    if verdict not in ("accepted", "refused", "unchanged"):
        raise RegistryError(
            f"the verdict of the evaluation in {evaluation.path} is {verdict or 'missing'}; expected accepted, "
            "refused or unchanged",
            hint="Evaluate the model again with --overwrite.",
        )
    return verdict


def format_description(tags: Mapping[str, str]) -> str:
    """Return the verdict and its reasons as the version's description in MLflow."""
    return f"{tags[TAG_PREFIX + 'verdict']}: {tags.get(TAG_PREFIX + 'reasons', '')}".rstrip(": ")
