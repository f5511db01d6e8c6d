"""A model's files in MLflow: upload (of a manifest and a pointer if the files are large) and download."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.reporting import mlflow_tracking
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError, RegistryError, translate_system_error
from components.common.workspace import artifact_store
from components.model_registry import lineage_tags, mlflow_retry, mlmodel_files
from components.model_registry.model_versions import MODEL_SHA256_TAG, TAG_PREFIX

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

POINTER_FILENAME = "pointer.json"
MAX_UPLOAD_SECONDS = 86_400.0  # an older unfinished upload is abandoned
EVALUATION_TAG = f"{TAG_PREFIX}evaluation_sha256"  # tag of a logged model: digest of its evaluation
MLMODEL_TAG = f"{TAG_PREFIX}mlmodel"  # tag of a logged model with MLmodel: location of the weights in MLmodel
UPLOAD_IN_PROGRESS = "uploading"
UNAVAILABLE = "is not on this machine"  # in the error for a package whose store is elsewhere
EVALUATION_FOLDER = "evaluation"  # folder of the evaluation within the logged model


def log_model(
    client: MlflowClient, name: str, model: Artifact, evaluation: Artifact, copy_limit_mb: int
) -> LoggedModel:
    """Upload a model as a logged model, or return the finished logged model of an interrupted registration.

    The files are uploaded unchanged, and the model is never loaded.

    Args:
        name: name of the registered model.
        copy_limit_mb: size in MB of 10^6 bytes; of a larger model, only the manifest and a pointer are uploaded.

    Raises:
        RegistryError: MLflow does not list the files after the upload; MLflow itself accepts an empty model.
    """
    experiment = mlflow_tracking.get_experiment_id(client)
    found = client.search_logged_models([experiment], filter_string=f"tags.`{MODEL_SHA256_TAG}` = '{model.sha256}'")
    earlier = [logged for logged in found if logged.name == name]
    finished = next((logged for logged in earlier if str(logged.status) == "READY"), None)
    if finished:
        log_evaluation(client, finished.model_id, evaluation)
        log_mlmodel(client, finished.model_id, model)
        return finished
    # Killed uploads leave unfinished models. A recent unfinished model may belong to an upload in progress.
    for unfinished in earlier:
        if unfinished.creation_timestamp < (time.time() - MAX_UPLOAD_SECONDS) * 1000:
            client.delete_logged_model(unfinished.model_id)
    logged = _create_logged_model(client, experiment, name, model)
    if sum(file.bytes for file in model.manifest.files) <= copy_limit_mb * 10**6:
        client.log_model_artifacts(logged.model_id, str(model.path))
        _check_upload(client, logged.model_id, [file.path for file in model.manifest.files], "model")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for file in (artifact_folder.MANIFEST_FILENAME, "report.html"):
                if (model.path / file).exists():
                    shutil.copyfile(model.path / file, Path(folder) / file)
            pointer = {"content_sha256": model.sha256, "store_uri": artifact_store.get_artifact_uri(model)}
            (Path(folder) / POINTER_FILENAME).write_text(json.dumps(pointer, indent=2) + "\n", encoding="utf-8")
            client.log_model_artifacts(logged.model_id, folder)
        _check_upload(client, logged.model_id, [POINTER_FILENAME], "model")
    log_evaluation(client, logged.model_id, evaluation)
    log_mlmodel(client, logged.model_id, model)
    return client.finalize_logged_model(logged.model_id, "READY")


def log_mlmodel(client: MlflowClient, model_id: str, model: Artifact) -> None:
    """Upload the files by which MLflow loads the model, unless the logged model has them for the same artifact store.

    MLflow loads models that answer prompts, so a reward model has no such files.

    Raises:
        RegistryError: MLflow does not list the files after the upload.
    """
    if model.manifest.kind == artifact_folder.REWARD_MODEL:
        return
    store_uri = artifact_store.get_artifact_uri(model)
    if client.get_logged_model(model_id).tags.get(MLMODEL_TAG) == store_uri:
        return
    names = {Path(file.path).name for file in client.list_logged_model_artifacts(model_id)}
    is_copied = POINTER_FILENAME not in names
    with tempfile.TemporaryDirectory() as folder:
        mlmodel_files.write_mlmodel_files(Path(folder), model, model_id, is_copied=is_copied)
        client.log_model_artifacts(model_id, folder)
    _check_upload(client, model_id, mlmodel_files.FILENAMES, "model")
    client.set_logged_model_tags(model_id, {MLMODEL_TAG: store_uri})


def log_evaluation(client: MlflowClient, model_id: str, evaluation: Artifact) -> None:
    """Upload the evaluation to a logged model, replacing an earlier evaluation.

    Raises:
        RegistryError: MLflow does not list the files after the upload.
    """
    if client.get_logged_model(model_id).tags.get(EVALUATION_TAG) == evaluation.sha256:
        return
    # If this upload is killed, the next upload is not skipped.
    client.set_logged_model_tags(model_id, {EVALUATION_TAG: UPLOAD_IN_PROGRESS})
    client.log_model_artifacts(model_id, str(evaluation.path), EVALUATION_FOLDER)
    files = [file.path for file in evaluation.manifest.files]
    _check_upload(client, model_id, files, "evaluation", EVALUATION_FOLDER)
    client.set_logged_model_tags(model_id, {EVALUATION_TAG: evaluation.sha256})


def _create_logged_model(client: MlflowClient, experiment: str, name: str, model: Artifact) -> LoggedModel:
    """Create a logged model without files. If the response is lost, a retry finds the model by its token."""
    token = uuid.uuid4().hex
    tags = {
        MODEL_SHA256_TAG: model.sha256,
        f"{TAG_PREFIX}token": token,
        **mlflow_tracking.build_owner_tags(),
        **mlflow_tracking.build_source_tags(),
    }
    params = mlflow_tracking.format_params(lineage_tags.list_recipe_params(model))

    def create() -> LoggedModel:
        run = os.environ.get("MLFLOW_RUN_ID")
        return client.create_logged_model(experiment, name=name, source_run_id=run, tags=tags, params=params)

    def find_created() -> LoggedModel | None:
        condition = f"tags.`{TAG_PREFIX}token` = '{token}'"
        return next(iter(client.search_logged_models([experiment], filter_string=condition)), None)

    return mlflow_retry.retry(create, find_created)


def _check_upload(
    client: MlflowClient, model_id: str, files: Iterable[str], kind: str, folder: str | None = None
) -> None:
    """Raise RegistryError if MLflow does not list the manifest, or a file's top-level folder, in `folder`."""
    listed = {Path(file.path).name for file in client.list_logged_model_artifacts(model_id, folder)}
    missing = sorted({artifact_folder.MANIFEST_FILENAME, *(Path(file).parts[0] for file in files)} - listed)
    if missing:
        raise RegistryError(
            f"MLflow does not list uploaded files of the {kind}: {', '.join(missing)}",
            hint="Check the artifact store and the log of the MLflow server.",
        )


def fetch_model(name: str, version: str, sha256: str, store_uri: str, folder: Path) -> Artifact:
    """Copy a registered model's files into `folder` and verify every digest.

    Args:
        sha256: digest of the model that the version records.
        store_uri: location of the model in the artifact store, for a model of which MLflow stores only a pointer.
        folder: folder to create or replace.

    Raises:
        RegistryError: the files are neither in MLflow nor at the pointer's location.
        ArtifactDamagedError: the files differ from the registered files.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    _download(name, version, part)
    if (part / POINTER_FILENAME).exists():
        filesystem.remove_tree(part)
        shutil.copytree(find_in_store(store_uri, f"{name} version {version}"), part, dirs_exist_ok=True)
    found = artifact_folder.read(part, "model")
    _remove_unlisted_entries(found)
    if found.sha256 != sha256:
        raise ArtifactDamagedError(
            f"the files of {name} version {version} have the digest {found.sha256}; the version records {sha256}",
            hint="Register the model again.",
        )
    shutil.rmtree(folder, ignore_errors=True)
    filesystem.rename(part, folder)
    return Artifact(folder, found.manifest)


def _remove_unlisted_entries(artifact: Artifact) -> None:
    """Remove what MLflow stores beside a model: its evaluation, MLmodel and the files that a download adds."""
    listed = {artifact_folder.MANIFEST_FILENAME, *(Path(file.path).parts[0] for file in artifact.manifest.files)}
    for path in artifact.path.iterdir():
        if path.name in listed:
            continue
        if path.is_dir():
            filesystem.remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def find_in_store(store_uri: str, described: str) -> Path:
    """Return the folder in the artifact store of a model of which MLflow stores only a pointer.

    Args:
        store_uri: location of the model in the artifact store.
        described: the model as the error names it.

    Raises:
        RegistryError: the model is not at this location.
    """
    path = artifact_store.resolve_artifact_uri(store_uri)
    if path is None or not (path / artifact_folder.MANIFEST_FILENAME).exists():
        raise RegistryError(
            f"the files of {described} are neither in MLflow nor at {store_uri or 'a recorded artifact store'}",
            hint="Mount the artifact store of the model, or restore the model in it.",
        )
    return path


def fetch_evaluation(name: str, version: str, folder: Path) -> Artifact:
    """Fetch the evaluation that MLflow stores with a version's model into a new folder, and verify every digest.

    Raises:
        RegistryError: MLflow does not store the evaluation.
        ArtifactDamagedError: the files differ from the manifest.
    """
    return artifact_folder.read(
        _download(name, version, folder, EVALUATION_FOLDER) / EVALUATION_FOLDER, EVALUATION_FOLDER
    )


def fetch_artifact(version: ModelVersion, kind: str, folder: Path) -> Artifact:
    """Fetch a version's model or evaluation from MLflow and verify every digest.

    Args:
        kind: model or evaluation.
        folder: new folder for the files.

    Raises:
        RegistryError: the files are missing, or the kind is a package, which MLflow does not store.
        ArtifactDamagedError: the files differ from the registered files.
    """
    name, number, tags = version.name, str(version.version), version.tags
    if kind == "model":
        return fetch_model(name, number, tags[MODEL_SHA256_TAG], tags.get(f"{TAG_PREFIX}store_uri", ""), folder)
    if kind == EVALUATION_FOLDER:
        return fetch_evaluation(name, number, folder)
    raise RegistryError(
        f"{tags.get(f'{TAG_PREFIX}{kind}_store_uri', 'the store')} {UNAVAILABLE}",
        hint="Run the command on a machine that mounts the artifact store, or set --workdir.",
    )


def read_logged_manifest(name: str, version: str) -> Manifest:
    """Return the manifest that MLflow stores with a model version's files.

    Raises:
        RegistryError: MLflow does not return the manifest.
    """
    mlflow = mlflow_tracking.connect()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mlflow.artifacts.download_artifacts(
                artifact_uri=f"models:/{name}/{version}/{artifact_folder.MANIFEST_FILENAME}", dst_path=folder
            )
        except (OSError, mlflow.exceptions.MlflowException) as error:
            raise _missing_files_error(name, version, str(error)) from None
        return artifact_folder.read_manifest(Path(folder))


def _missing_files_error(name: str, version: str, reason: str) -> RegistryError:
    first_line = reason.partition("\n")[0] or "no reason is given"
    return RegistryError(
        f"MLflow does not return the files of {name} version {version}: {first_line}",
        hint="Restore MLflow's artifact store from a backup.",
    )


def _download(name: str, version: str, part: Path, within: str = "") -> Path:
    """Download the files of a version, or of its folder `within`, into `part`, and return `part`."""
    mlflow = mlflow_tracking.connect()
    part.mkdir(parents=True, exist_ok=True)  # over NFS, a mkdir whose answer was lost is repeated
    try:
        mlflow.artifacts.download_artifacts(
            artifact_uri=f"models:/{name}/{version}" + (f"/{within}" if within else ""), dst_path=str(part)
        )
    except (OSError, mlflow.exceptions.MlflowException) as error:
        if mlflow_retry.is_unanswered(error):
            raise mlflow_retry.build_user_error(error) from None
        if system_error := translate_system_error(error, [part]):
            raise system_error from None
        raise _missing_files_error(name, version, str(error)) from None
    if not (part / within / artifact_folder.MANIFEST_FILENAME).exists():
        raise _missing_files_error(name, version, f"{artifact_folder.MANIFEST_FILENAME} is missing")
    return part
