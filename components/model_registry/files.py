"""A model's files in MLflow: copied there, or a manifest and a pointer when they are large; and fetched from there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from components.common import artifacts, places, tracking
from components.common.artifacts import Artifact, Manifest
from components.common.errors import ArtifactDamagedError, RegistryError, of_the_machine
from components.model_registry import patience
from components.model_registry.versions import PREFIX

POINTER = "pointer.json"
UPLOADING = 86_400.0  # seconds: no upload takes longer
EVALUATED = f"{PREFIX}evaluation_sha256"  # tag of a logged model: the evaluation that lies beside its files
UPLOAD_BEGAN = "uploading"
EVALUATION = "evaluation"  # the folder beside the model's files that holds its evaluation


def log(client: Any, name: str, model: Artifact, evaluation: Artifact, copy_limit_mb: int) -> Any:
    """A finished logged model with the files of `model`; one that an interrupted registration had finished is used again.

    The files are uploaded as they are, the model is never loaded. Raises RegistryError when MLflow does not list them afterwards: it
    would register an empty model too.
    """
    experiment = tracking.home(client)
    earlier = client.search_logged_models([experiment], filter_string=f"tags.`{PREFIX}model_sha256` = '{model.sha256}'")
    finished = next((m for m in earlier if m.name == name and str(m.status) == "READY"), None)
    if finished:
        keep_evaluation(client, finished.model_id, evaluation)
        return finished
    _remove_unfinished(client, name, earlier)
    logged = _begin(client, experiment, name, model.sha256)
    whole = sum(file.bytes for file in model.manifest.files) <= copy_limit_mb * 10**6
    if whole:
        client.log_model_artifacts(logged.model_id, str(model.path))
    else:
        _log_pointer(client, logged.model_id, model)
    _check_upload(client, logged.model_id, model, whole)
    keep_evaluation(client, logged.model_id, evaluation)
    return client.finalize_logged_model(logged.model_id, "READY")


def keep_evaluation(client: Any, model_id: str, evaluation: Artifact) -> None:
    """Have this evaluation lie beside the files of a logged model, in the place of an earlier one.

    Raises RegistryError when MLflow does not list it afterwards.
    """
    if client.get_logged_model(model_id).tags.get(EVALUATED) == evaluation.sha256:
        return
    client.set_logged_model_tags(model_id, {EVALUATED: UPLOAD_BEGAN})  # a killed upload is begun anew, whichever evaluation comes next
    client.log_model_artifacts(model_id, str(evaluation.path), EVALUATION)
    listed = {Path(file.path).name for file in client.list_logged_model_artifacts(model_id, EVALUATION)}
    missing = sorted({artifacts.MANIFEST, *(Path(file.path).parts[0] for file in evaluation.manifest.files)} - listed)
    if missing:
        raise RegistryError(
            f"MLflow did not keep {', '.join(missing)} of the evaluation", hint="Check the server's artifact store and its log."
        )
    client.set_logged_model_tags(model_id, {EVALUATED: evaluation.sha256})


def _begin(client: Any, experiment: str, name: str, model_sha256: str) -> Any:
    """A new logged model without files. One that was made although its answer was lost is found by its token."""
    token = uuid.uuid4().hex
    tags = {f"{PREFIX}model_sha256": model_sha256, f"{PREFIX}token": token, **tracking.owner()}
    run = os.environ.get("MLFLOW_RUN_ID")

    def made() -> Any | None:
        found = client.search_logged_models([experiment], filter_string=f"tags.`{PREFIX}token` = '{token}'")
        return found[0] if found else None

    return patience.again(lambda: client.create_logged_model(experiment, name=name, source_run_id=run, tags=tags), made)


def _remove_unfinished(client: Any, name: str, earlier: Iterable[Any]) -> None:
    """Take away what registrations left that were killed in their upload. Younger ones may belong to a job that uploads now."""
    long_ago = (time.time() - UPLOADING) * 1000
    for logged in earlier:
        if logged.name == name and str(logged.status) != "READY" and logged.creation_timestamp < long_ago:
            client.delete_logged_model(logged.model_id)


def _check_upload(client: Any, model_id: str, model: Artifact, whole: bool) -> None:
    expected = {Path(file.path).parts[0] for file in model.manifest.files} if whole else {POINTER}
    listed = {Path(file.path).parts[0] for file in client.list_logged_model_artifacts(model_id)}
    missing = sorted((expected | {artifacts.MANIFEST}) - listed)
    if missing:
        raise RegistryError(f"MLflow did not keep {', '.join(missing)} of the model", hint="Check the server's artifact store and its log.")


def _log_pointer(client: Any, model_id: str, model: Artifact) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for file in (artifacts.MANIFEST, "report.html"):
            if (model.path / file).exists():
                shutil.copyfile(model.path / file, Path(folder) / file)
        pointer = {"content_sha256": model.sha256, "store_uri": places.uri(model)}
        (Path(folder) / POINTER).write_text(json.dumps(pointer, indent=2) + "\n", encoding="utf-8")
        client.log_model_artifacts(model_id, folder)


def fetch(name: str, version: str, sha256: str, store_uri: str, folder: Path) -> Artifact:
    """Lay a registered model out in `folder` and check every digest. Raises RegistryError when its files are neither in MLflow nor at
    their pointer, ArtifactDamagedError when they are not what was registered."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    _download(name, version, part)
    if (part / POINTER).exists():
        shutil.rmtree(part)
        shutil.copytree(_pointed(name, version, store_uri), part)
    shutil.rmtree(part / EVALUATION, ignore_errors=True)
    found = artifacts.read(part, "model")
    if found.sha256 != sha256:
        raise ArtifactDamagedError(
            f"{name} version {version} holds {found.sha256}, it was registered as {sha256}", hint="Register it again."
        )
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return Artifact(folder, found.manifest)


def fetch_kind(version: Any, kind: str, folder: Path) -> Artifact:
    """A version's model or evaluation from MLflow, every digest checked. Raises RegistryError for a package, which MLflow does not keep."""
    name, number, tags = version.name, str(version.version), version.tags
    if kind == "model":
        return fetch(name, number, tags[f"{PREFIX}model_sha256"], tags.get(f"{PREFIX}store_uri", ""), folder)
    if kind == EVALUATION:
        return artifacts.read(_download(name, number, folder, EVALUATION) / EVALUATION, kind)
    raise RegistryError(
        f"{tags.get(f'{PREFIX}{kind}_store_uri', 'the store')} is not on this machine",
        hint="Promote where the artifact store is mounted, or name its work folder with --workdir.",
    )


def kept(name: str, version: str) -> Manifest:
    """The manifest that MLflow keeps beside a registered model's files. Raises RegistryError when there is none."""
    mlflow = tracking.connect()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mlflow.artifacts.download_artifacts(artifact_uri=f"models:/{name}/{version}/{artifacts.MANIFEST}", dst_path=folder)
        except (OSError, mlflow.exceptions.MlflowException) as error:
            raise _lost(name, version, str(error)) from None
        return artifacts.read_manifest(Path(folder))


def _lost(name: str, version: str, why: str) -> RegistryError:
    return RegistryError(
        f"MLflow does not give the files of {name} version {version}: {why.splitlines()[0]}",
        hint="Check MLflow's artifact store, or restore it from a backup.",
    )


def _download(name: str, version: str, part: Path, within: str = "") -> Path:
    """Lay the files of a version out in `part`, those of one folder only where it is named. Returns `part`."""
    mlflow = tracking.connect()
    part.mkdir(parents=True)
    try:
        mlflow.artifacts.download_artifacts(artifact_uri=f"models:/{name}/{version}" + (f"/{within}" if within else ""), dst_path=str(part))
    except (OSError, mlflow.exceptions.MlflowException) as error:
        passing = patience.told(error) if patience.is_unanswered(error) else of_the_machine(error, [part])
        if passing:
            raise passing from None
        raise _lost(name, version, str(error)) from None
    if not (part / within / artifacts.MANIFEST).exists():
        raise _lost(name, version, f"it keeps no {artifacts.MANIFEST} of it")
    return part


def _pointed(name: str, version: str, store_uri: str) -> Path:
    path = places.folder_of(store_uri)
    if path is None or not (path / artifacts.MANIFEST).exists():
        raise RegistryError(
            f"the files of {name} version {version} are not in MLflow, and {store_uri} does not hold them",
            hint="Mount the artifact store it was registered from, or register it again with a higher model_registry.copy_limit_mb.",
        )
    return path
