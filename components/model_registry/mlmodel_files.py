"""Files beside a registered model by which MLflow loads it: MLmodel, requirements and an input example.

They name `pyfunc_loader`, a module of the installed package: loading a version runs no code of the model folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.workspace import artifact_store

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

LOADER_MODULE = "components.model_registry.pyfunc_loader"  # registered versions contain this name
MLMODEL_FILENAME = "MLmodel"
REQUIREMENTS_FILENAME = "requirements.txt"
ENVIRONMENT_FILENAME = "python_env.yaml"
EXAMPLE_FILENAME = "input_example.json"
SERVING_EXAMPLE_FILENAME = "serving_input_example.json"
FILENAMES = (MLMODEL_FILENAME, REQUIREMENTS_FILENAME, ENVIRONMENT_FILENAME, EXAMPLE_FILENAME, SERVING_EXAMPLE_FILENAME)
METADATA_KEY = "tuneline"  # in the metadata of MLmodel: {"model_sha256", "store_uri"}
LOADING_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "accelerate", "safetensors", "gguf", "numpy")
DEFAULT_MAX_NEW_TOKENS = 256
EXAMPLE = {"messages": [{"role": "user", "content": "What is a checkpoint?"}]}


def write_mlmodel_files(folder: Path, model: Artifact, model_id: str) -> None:
    """Write MLmodel and the files that it refers to into a folder.

    Args:
        folder: an existing folder.
        model: the model that MLflow loads.
        model_id: ID of the logged model that receives the files.
    """
    import mlflow.pyfunc
    from mlflow.models import Model

    produced_by = model.manifest.produced_by
    requirements = list_requirements(model)
    (folder / REQUIREMENTS_FILENAME).write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    environment = {"python": produced_by.get("python"), "dependencies": [f"-r {REQUIREMENTS_FILENAME}"]}
    (folder / ENVIRONMENT_FILENAME).write_text(yaml.safe_dump(environment), encoding="utf-8")
    (folder / EXAMPLE_FILENAME).write_text(json.dumps(EXAMPLE) + "\n", encoding="utf-8")
    (folder / SERVING_EXAMPLE_FILENAME).write_text(json.dumps({"inputs": EXAMPLE}) + "\n", encoding="utf-8")
    mlmodel = Model(
        model_id=model_id,
        signature=_build_signature(),
        saved_input_example_info={
            "artifact_path": EXAMPLE_FILENAME,
            "serving_input_path": SERVING_EXAMPLE_FILENAME,
            "type": "json_object",
        },
        metadata={
            METADATA_KEY: {"model_sha256": model.sha256, "store_uri": artifact_store.get_artifact_uri(model)},
        },
        model_size_bytes=sum(file.bytes for file in model.manifest.files),
    )
    mlflow.pyfunc.add_to_model(mlmodel, loader_module=LOADER_MODULE, env={"virtualenv": ENVIRONMENT_FILENAME})
    mlmodel.save(str(folder / MLMODEL_FILENAME))


def list_requirements(model: Artifact) -> list[str]:
    """Return the pinned packages that load the model: those of the training, and the installed MLflow."""
    produced_by = model.manifest.produced_by
    packages, version = produced_by.get("packages") or {}, str(produced_by.get("tuneline") or "")
    mlflow_version = artifact_folder.collect_provenance()["packages"]["mlflow"]
    return [
        f"tuneline[models,tracking]=={version}" if version[:1].isdecimal() else "tuneline[models,tracking]",
        f"mlflow=={mlflow_version}",
        # A local version such as +cpu names the build of one package index.
        *(f"{name}=={packages[name].partition('+')[0]}" for name in LOADING_PACKAGES if name in packages),
    ]


def _build_signature() -> ModelSignature:
    """Return the signature: a prompt or chat messages as input, text as output, and the answer's maximum length."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import Array, Object, Property

    message = Object([Property("role", DataType.string), Property("content", DataType.string)])
    return ModelSignature(
        inputs=Schema(
            [
                ColSpec(DataType.string, "prompt", required=False),
                ColSpec(Array(message), "messages", required=False),
            ]
        ),
        outputs=Schema([ColSpec(DataType.string)]),
        params=ParamSchema([ParamSpec("max_new_tokens", DataType.long, DEFAULT_MAX_NEW_TOKENS)]),
    )
