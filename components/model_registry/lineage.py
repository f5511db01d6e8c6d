"""What a model version says of its origin: the digests of all it came from, as tags."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from components.common import places
from components.common.artifacts import Artifact
from components.common.errors import RegistryError, UsageError
from components.model_registry.versions import PREFIX

PROVEN, UNPROVEN, UNPACKAGED = "proven", "unproven", "unpackaged"
# Replaced as a whole when the model is evaluated again: what the new evaluation lacks must not stay from the old one.
SCORE = "score."
MOST_SCORES = 60
OF_EVALUATION = ("verdict", "reasons", "evaluation_sha256", "evaluation_store_uri", "incumbent_sha256")


def check(model: Artifact, evaluation: Artifact, repository: Artifact | None) -> None:
    """Raise UsageError, with both digests, where evaluation or package were made from another model."""
    for made in (evaluation, repository):
        if made is None:
            continue
        source = made.manifest.input("model")
        if source is None or source.content_sha256 != model.sha256:
            other = source.content_sha256 if source else "no tuned model"
            raise UsageError(
                f"the {made.manifest.kind} in {made.path} was made from {other}, not from the model {model.sha256}",
                hint=f"Make the {made.manifest.kind} from this model, or register the model it was made from.",
            )


def tags(
    model: Artifact, evaluation: Artifact, repository: Artifact | None, dataset_version: Mapping[str, Any] | None, finetune_key: str
) -> dict[str, str]:
    """The tags of a version: every digest, where the files lie, the verdict, and whether the package was proven. None is empty."""
    named = {
        "model_sha256": model.sha256,
        "store_uri": places.uri(model),
        "finetune_key": finetune_key or str(model.manifest.produced_by.get("key", "")),
        "git_commit": str(model.manifest.produced_by.get("git_commit") or ""),
        "kfp_run": os.environ.get("KFP_RUN_ID", ""),
        **_inputs(model),
        **_version(dataset_version),
        **_evaluation(evaluation),
        **_package(repository),
    }
    return {PREFIX + name: value for name, value in named.items() if value}


def _inputs(model: Artifact) -> dict[str, str]:
    found = {kind: model.manifest.input(kind) for kind in ("dataset", "base_model")}
    digests = {f"{kind}_sha256": i.content_sha256 for kind, i in found.items() if i}
    return {**digests, **{f"{kind}_uri": i.uri for kind, i in found.items() if i}}


def _version(dataset_version: Mapping[str, Any] | None) -> dict[str, str]:
    """The dataset's revision in the data repository."""
    if not dataset_version:
        return {}
    kept = {f"dataset_{name}": str(dataset_version[name]) for name in ("rev", "tag", "md5") if dataset_version.get(name)}
    return {**kept, "dataset_uri": str(dataset_version["uri"])} if dataset_version.get("uri") else kept


def _evaluation(evaluation: Artifact) -> dict[str, str]:
    incumbent = evaluation.manifest.input("incumbent")
    return {
        "verdict": verdict(evaluation),
        "reasons": " ".join(map(str, evaluation.manifest.summary.get("reasons", [])))[:4000],
        "evaluation_sha256": evaluation.sha256,
        "evaluation_store_uri": places.uri(evaluation),
        "incumbent_sha256": incumbent.content_sha256 if incumbent else "",
        **_scores(evaluation),
    }


def _scores(evaluation: Artifact) -> dict[str, str]:
    """The candidate's scores, as `score.TASK.METRIC`: what the evaluation's own file says under "metrics"."""
    try:
        said = json.loads((evaluation.path / "evaluation.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {
        f"{SCORE}{task}.{metric}": values["candidate"]
        for task, metrics in said.get("metrics", {}).items()
        for metric, values in metrics.items()
        if isinstance(values, dict) and isinstance(values.get("candidate"), (int, float))
    }
    return {re.sub(r"[^\w\-. /]", "_", name)[:200]: f"{value:.6g}" for name, value in list(found.items())[:MOST_SCORES]}


def superseded(present: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The tags of an earlier evaluation that a new one does not have."""
    old = [key for key in present if key.removeprefix(PREFIX) in OF_EVALUATION or key.startswith(PREFIX + SCORE)]
    return [key for key in old if key not in new]


def verdict(evaluation: Artifact) -> str:
    """accepted, refused or unchanged: what the evaluation's own file says, which its digest covers; the manifest's summary it does not.

    Raises RegistryError where there is none, or where the two differ.
    """
    found = str(evaluation.manifest.summary.get("verdict", ""))
    if any(file.path == "evaluation.json" for file in evaluation.manifest.files):
        said = json.loads((evaluation.path / "evaluation.json").read_text(encoding="utf-8")).get("verdict")
        if said != found:
            raise RegistryError(
                f"the evaluation in {evaluation.path} says {said}, and its manifest says {found}",
                hint="Its manifest was changed. Evaluate the model again with --overwrite.",
            )
    if found not in ("accepted", "refused", "unchanged"):
        raise RegistryError(f"the evaluation in {evaluation.path} has no verdict", hint="Evaluate the model again with --overwrite.")
    return found


def described(tags: Mapping[str, str]) -> str:
    """The verdict in words, for whoever looks at the version in MLflow."""
    return f"{tags[PREFIX + 'verdict']}: {tags.get(PREFIX + 'reasons', '')}".rstrip(": ")


def _package(repository: Artifact | None) -> dict[str, str]:
    if repository is None:
        return {}
    return {
        "repository_sha256": repository.sha256,
        "repository_store_uri": places.uri(repository),
        "proof": PROVEN if repository.manifest.summary.get("proof") else UNPROVEN,
    }
