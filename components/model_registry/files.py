"""A model's files in MLflow: copied in where they are small, described by manifest and pointer where they are not."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from components.common import artifacts, tracking
from components.common.artifacts import Artifact
from components.common.errors import RegistryError
from components.model_registry.config import ModelRegistryConfig

DESCRIPTION = ("manifest.json", "report.html")


def create_version(client: Any, config: ModelRegistryConfig, model: Artifact, evaluation: Artifact, tags: dict[str, str]) -> str:
    """Log the files as a logged model and register it: the files are uploaded as they are, the model is never loaded.

    MLflow accepts an empty logged model, so what was uploaded is counted before the version is made. The version is created with its
    tags, so a process killed at any point leaves either no version or one that its digest finds again.
    """
    from mlflow.exceptions import MlflowException

    run_id = os.environ.get("MLFLOW_RUN_ID")
    experiment = client.get_run(run_id).info.experiment_id if run_id else tracking.experiment_id(client)
    logged = client.create_logged_model(experiment, name=config.name, source_run_id=run_id, model_type="tuneline")
    names = _names(model, config.copy_limit_mb)
    with tempfile.TemporaryDirectory() as folder:
        _gather(model, names, Path(folder))
        shutil.copyfile(evaluation.path / "evaluation.json", Path(folder) / "evaluation.json")
        client.log_model_artifacts(logged.model_id, folder)
    uploaded = {Path(f.path).name for f in client.list_logged_model_artifacts(logged.model_id)}
    if not {Path(name).parts[0] for name in names} <= uploaded:
        raise RegistryError(f"MLflow kept {len(uploaded)} of {len(names)} files of the model", hint="Look at the server's artifact store.")
    client.finalize_logged_model(logged.model_id, "READY")
    try:
        client.create_registered_model(config.name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(
        config.name, logged.model_uri, run_id=run_id, tags=tags, model_id=logged.model_id, description=_described(evaluation)
    )
    return str(made.version)


def _names(model: Artifact, limit_mb: int) -> list[str]:
    """The files to copy: all of them up to the limit, otherwise only what describes them."""
    every = ["manifest.json", *(file.path for file in model.manifest.files)]
    if sum(file.bytes for file in model.manifest.files) <= limit_mb * 1_000_000:
        return every
    return [name for name in every if name in DESCRIPTION]


def _gather(model: Artifact, names: list[str], folder: Path) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.path / name, folder / name)


def _described(evaluation: Artifact) -> str:
    """The verdict in words, for whoever looks at the version in MLflow."""
    summary = evaluation.manifest.summary
    return f"{summary['verdict']}: " + " ".join(summary["reasons"])


def download(client: Any, name: str, version: str, folder: Path) -> Artifact:
    """The model artifact of a registered version, checked. Raises RegistryError where the registry holds only its description."""
    import mlflow

    source = client.get_model_version(name, version).source
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    got = Path(mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=str(folder / "download")))
    manifest = artifacts.read_manifest(got)
    if not all((got / file.path).exists() for file in manifest.files):
        raise RegistryError(
            f"{name} version {version} was too large to be copied into MLflow, and its files are not in this store",
            hint="Copy it into this store, or use the store it was made in (TUNELINE_STORE).",
        )
    (got / "evaluation.json").unlink(missing_ok=True)
    return artifacts.read(got, "model")
