"""Checks before a promotion: the version is accepted over the current champion, proven, and undamaged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import (
    DiskFullError,
    EngineMissingError,
    NotWritableError,
    RegistryError,
    TunelineError,
)
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.model_registry import lineage_tags, model_files, split_reuse
from components.model_registry.lineage_tags import PROVEN
from components.model_registry.model_versions import TAG_PREFIX

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

VERDICT_OBJECTION = "its evaluation's verdict is"
SKIP_COMPARISON = "not compared"  # aliases other than champion accept any incumbent


def list_objections(version: ModelVersion, incumbent_sha256: str | None) -> list[str]:
    """Return the reasons, as clauses, why a version must not be promoted. Reads and verifies every file.

    Args:
        incumbent_sha256: digest of the deployed model, with which the evaluation must have compared the version; None
            if no model is deployed; SKIP_COMPARISON to accept any incumbent.

    Raises:
        EngineMissingError, DiskFullError, NotWritableError: the files cannot be read at the moment; this is not an
            objection to the version.
    """
    verdict = _get_tag(version, "verdict")
    objections = [] if verdict == "accepted" else [f"{VERDICT_OBJECTION} {verdict or 'missing'}"]
    if not _get_tag(version, "repository_sha256"):
        objections.append("it has no Triton package")
    elif _get_tag(version, "proof") != PROVEN:
        objections.append("its Triton package is unproven")
    objections += _check_comparison(_get_tag(version, "incumbent_sha256"), incumbent_sha256)
    objections += _check_artifacts(version, incumbent_sha256)
    return list(dict.fromkeys(objections))


def _get_tag(version: ModelVersion, name: str) -> str | None:
    return version.tags.get(TAG_PREFIX + name) or None


def _check_comparison(compared: str | None, incumbent: str | None) -> list[str]:
    if incumbent in (SKIP_COMPARISON, compared):
        return []
    names = [f"model {sha256[:12]}" if sha256 else "no model" for sha256 in (compared, incumbent)]
    return [f"its evaluation compared it with {names[0]}, and the champion is {names[1]}"]


def _check_artifacts(version: ModelVersion, incumbent_sha256: str | None) -> list[str]:
    """Return the objections to a version's files, as clauses."""
    objections: list[str] = []
    for kind in ("model", "evaluation", "repository"):
        sha256 = _get_tag(version, f"{kind}_sha256")
        if sha256 is None:  # `list_objections` reports the missing tag
            continue
        try:
            with open_artifact(version, kind, sha256) as artifact:
                if artifact.sha256 != sha256:
                    objections.append(
                        f"its {kind} has the digest {artifact.sha256[:12]}; the version records {sha256[:12]}"
                    )
                elif kind == "evaluation":
                    objections += _check_evaluation(version, artifact, incumbent_sha256)
                elif kind == "repository":
                    if not artifact.manifest.summary.get("proof"):
                        objections.append("its Triton package is unproven")
                    if not _is_built_from_model(artifact, version):
                        objections.append("its Triton package was built from another model")
        except (EngineMissingError, DiskFullError, NotWritableError):
            raise
        except TunelineError as error:
            objections.append(f"its {kind} cannot be verified ({error.message})")
    return objections


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
            damage = error
            continue
        yield artifact
        return
    if damage:
        raise damage
    with tempfile.TemporaryDirectory() as temporary:
        yield model_files.fetch_artifact(version, kind, Path(temporary) / kind)


def _check_evaluation(version: ModelVersion, evaluation: Artifact, incumbent: str | None) -> list[str]:
    """Return the objections in the evaluation itself, because its tags can be edited in MLflow's UI."""
    compared = evaluation.manifest.find_input("incumbent")
    try:
        verdict = lineage_tags.read_verdict(evaluation)
    except RegistryError as error:
        return [error.message]
    objections = [] if verdict == "accepted" else [f"{VERDICT_OBJECTION} {verdict}"]
    if not _is_built_from_model(evaluation, version):
        objections.append("its evaluation evaluated another model")
    objections += split_reuse.list_objections(version, evaluation)
    return [*objections, *_check_comparison(compared.content_sha256 if compared else None, incumbent)]


def _is_built_from_model(artifact: Artifact, version: ModelVersion) -> bool:
    """Return whether the version's model is an input of the artifact."""
    model = artifact.manifest.find_input("model")
    return model is not None and model.content_sha256 == _get_tag(version, "model_sha256")
