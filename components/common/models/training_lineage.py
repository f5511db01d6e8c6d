"""The datasets that a model and the models that it was tuned from were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.models import model_loading
from components.common.runtime.errors import TEMPORARY_ERRORS, TunelineError
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir

UNTUNED_PREFIXES = ("embedded:", "hf://")  # of the sources of base models that tuneline did not tune
ANCESTOR_KINDS = ("model", "base_model", "initial_adapter", "rewarding_model", "teacher")


@dataclass(frozen=True)
class TrainingLineage:
    """The training datasets of a model's lineage by digest, and a clause for each artifact of the lineage that no store has."""

    datasets: dict[str, Artifact]
    missing: list[str]


def collect_datasets(models: Sequence[Manifest], store_uri: str = "") -> TrainingLineage:
    """Return the datasets on which the models, their tuned base models, initial adapters and reward models were trained.

    Args:
        models: manifests of the models.
        store_uri: URI of a model in its artifact store, which also has the datasets; "" for the store of the workdir.

    Raises:
        EngineMissingError, DiskFullError, NotWritableError: an artifact store is not available.
    """
    lineage = TrainingLineage({}, [])
    pending, seen = [*models], {model.content_sha256 for model in models}
    while pending:
        for source in pending.pop().inputs:
            if source.content_sha256 in seen or source.kind not in ("dataset", *ANCESTOR_KINDS):
                continue
            seen.add(source.content_sha256)
            folder = find_folder(source, store_uri)
            if folder is not None and source.kind == "dataset":
                try:
                    lineage.datasets[source.content_sha256] = artifact_folder.read(folder, "dataset")
                except TunelineError as error:
                    lineage.missing.append(f"a dataset of its lineage cannot be verified ({error.message})")
            elif folder is not None:
                pending.append(artifact_folder.read_manifest(folder))
            elif source.kind not in ("base_model", "teacher") or not _is_untuned(source):
                lineage.missing.append(_describe_missing(source))
    return lineage


def _describe_missing(source: ArtifactInput) -> str:
    name, is_folder = source.kind.replace("_", " "), source.kind == "base_model" and ":" not in source.uri
    location = f"in {source.uri} or in the artifact store" if is_folder else "in the artifact store"
    return (
        f"the {name} {source.content_sha256[:12]} of its lineage is not {location}, so its "
        "evaluated rows cannot be compared with all training rows"
    )


def _is_untuned(source: ArtifactInput) -> bool:
    """Return whether a base model that is not an artifact was not tuned by tuneline: its training rows are unknown."""
    if source.uri.startswith(UNTUNED_PREFIXES):
        return True
    if ":" in source.uri or not source.uri or (Path(source.uri) / artifact_folder.MANIFEST_FILENAME).exists():
        return False
    try:
        return model_loading.resolve_base_model(source.uri).sha256 == source.content_sha256
    except TEMPORARY_ERRORS:
        raise
    except TunelineError:
        return False


def find_folder(source: ArtifactInput, store_uri: str) -> Path | None:
    """Return the folder of an input: beside the model, in the workdir's store, or at the recorded path.

    Raises:
        EngineMissingError, DiskFullError, NotWritableError: a store is not available, and no other has the input.
    """
    sibling = artifact_store.build_sibling_uri(store_uri, source.content_sha256)
    default = artifact_store.build_artifact_uri(Workdir.from_environment().store, source.content_sha256)
    unavailable: TunelineError | None = None
    for uri in filter(None, (sibling, default, "" if ":" in source.uri else source.uri)):
        try:
            folder = artifact_store.resolve_artifact_uri(uri) if "://" in uri else Path(uri).absolute()
            if folder is None or not (folder / artifact_folder.MANIFEST_FILENAME).exists():
                continue
            if artifact_folder.read_manifest(folder).content_sha256 == source.content_sha256:
                return folder
        except TEMPORARY_ERRORS as error:
            unavailable = unavailable or error
        except (TunelineError, OSError):
            continue
    if unavailable:
        raise unavailable
    return None
