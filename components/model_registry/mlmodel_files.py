"""Files beside a registered model by which MLflow loads it: MLmodel, requirements, an input example and the tokenizer.

They name `pyfunc_loader`, a module of the installed package: loading a version runs no code of the model folder.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_loading
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
CONFIG_FILENAME = "config.json"
TOKENIZER_FOLDER = "components/tokenizer"  # where mlflow.transformers reads the tokenizer
FILE_SCHEME = "file://"
METADATA_KEY = "tuneline"  # in the metadata of MLmodel: {"model_sha256", "store_uri"}
LOADING_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "accelerate", "safetensors", "gguf", "numpy")
DEFAULT_MAX_NEW_TOKENS = 256
EXAMPLE = {"messages": [{"role": "user", "content": "What is a checkpoint?"}]}


def write_mlmodel_files(folder: Path, model: Artifact, model_id: str, *, is_copied: bool) -> None:
    """Write MLmodel and the files that it refers to into a folder.

    Args:
        folder: an existing folder.
        model: the model that MLflow loads.
        model_id: ID of the logged model that receives the files.
        is_copied: whether the logged model has the weights, rather than a pointer to the artifact store.
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
    if flavor := build_transformers_flavor(model, is_copied=is_copied):
        mlmodel.add_flavor("transformers", **flavor)
        for name in (file.path for file in model.manifest.files):
            if model_loading.MODEL_FILE_PATTERN.fullmatch(name) and ".safetensors" not in name:
                target = folder / TOKENIZER_FOLDER / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(model.path / name, target)
    mlmodel.save(str(folder / MLMODEL_FILENAME))


def build_transformers_flavor(model: Artifact, *, is_copied: bool) -> dict[str, object] | None:
    """Return the settings by which `mlflow.transformers` loads full weights; None for a model that it cannot load.

    These are adapters, whose base model is elsewhere, models in a bucket of which MLflow has only a pointer, and classes
    that transformers lacks: MLflow would run the code of their folder. Without transformers, the class is not known.
    """
    config, is_readable = model.path / CONFIG_FILENAME, artifact_store.get_artifact_uri(model).startswith(FILE_SCHEME)
    if model_loading.is_adapter(model) or not config.exists() or not (is_copied or is_readable):
        return None
    if not importlib.util.find_spec("transformers"):
        return None
    import transformers

    [name, *_] = json.loads(config.read_text(encoding="utf-8")).get("architectures") or [""]
    if name not in dir(transformers):  # unlike hasattr, this does not import torch
        return None
    location = {"model_binary": "."} if is_copied else {"local_base_model_path": str(model.path)}
    return {
        "transformers_version": transformers.__version__,
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": name,
        "source_model_name": str(model.path),
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        **location,
    }


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
