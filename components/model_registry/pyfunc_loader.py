"""Loader of `mlflow.pyfunc` for registered models. MLmodel files of registered versions name this module.

The weights are in the downloaded folder or, for a large model, in the artifact store that MLmodel names. Every digest is
verified before the model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import answer_generation, model_loading
from components.common.models.model_loading import LoadableModel, LocalBaseModel
from components.common.runtime.environment import patched_environment
from components.common.runtime.errors import ArtifactDamagedError, InputError
from components.common.workspace import artifact_store
from components.model_registry import model_files
from components.model_registry.mlmodel_files import DEFAULT_MAX_NEW_TOKENS, METADATA_KEY, MLMODEL_FILENAME

if TYPE_CHECKING:
    import pandas

INPUT_HINT = (
    'Pass {"prompt": TEXT} or {"messages": [{"role": "user", "content": TEXT}]}, or a list or a table of these rows.'
)


class ChatModel:
    """A loaded model that answers prompts and conversations greedily, as `mlflow.pyfunc` calls it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def predict(self, model_input: pandas.DataFrame, params: Mapping[str, Any] | None = None) -> list[str]:
        """Return one answer per row.

        Args:
            model_input: rows with the column `prompt`, a text, or `messages`, a list of {"role", "content"}.
            params: {"max_new_tokens": maximum length of an answer in tokens}.

        Raises:
            InputError: a row has neither a prompt nor messages, or the chat template rejects the messages.
        """
        # MLflow drops columns that are not in the signature, and with them the rows.
        rows = model_input.to_dict("records") or [{}]
        conversations = [_build_conversation(row) for row in rows]
        limit = int((params or {}).get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS))
        return [
            answer_generation.generate_answer(self._model, self._tokenizer, messages, limit)
            for messages in conversations
        ]


def _build_conversation(row: Mapping[Any, Any]) -> list[dict[str, str]]:
    """Return the messages of an input row; a missing value is None or NaN."""
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is not None and not isinstance(messages, float) and len(messages):
        return [dict(message) for message in messages]
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    raise InputError("a row of the model's input has neither a prompt nor messages", hint=INPUT_HINT)


def _load_pyfunc(path: str) -> ChatModel:
    """Load the model of a downloaded version; `mlflow.pyfunc.load_model` calls this function.

    Raises:
        RegistryError: the weights are not in MLflow, and the artifact store is not reachable.
        ArtifactDamagedError: a file of the model or of its base model differs from its digest.
        ConfigurationError: the base model of an adapter is not available.
    """
    from mlflow.models import Model

    recorded = Model.load(str(Path(path) / MLMODEL_FILENAME)).metadata[METADATA_KEY]
    store_uri = str(recorded["store_uri"])
    artifact = _find_artifact(Path(path), str(recorded["model_sha256"]), store_uri)
    # A base model `store:<digest>` is in the store of the model, unless the environment sets another store.
    is_configured = os.environ.get("TUNELINE_STORE") or os.environ.get("TUNELINE_WORKDIR")
    store = "" if is_configured else artifact_store.get_store_address(store_uri)
    with patched_environment({"TUNELINE_STORE": store} if store else {}):
        loadable = _open_model(artifact)
        model = model_loading.load_model(loadable)
    return ChatModel(model, model_loading.load_tokenizer(loadable.tokenizer))


def _find_artifact(folder: Path, sha256: str, store_uri: str) -> Artifact:
    """Return the verified model in the downloaded folder, or in the artifact store if the folder has only a pointer."""
    if (folder / model_files.POINTER_FILENAME).exists():
        folder = model_files.find_in_store(store_uri, f"the model {sha256[:12]}")
    artifact = artifact_folder.read(folder, "model")
    if artifact.sha256 != sha256:
        raise ArtifactDamagedError(
            f"the model in {folder} has the digest {artifact.sha256}; MLmodel records {sha256}",
            hint="Register the model again.",
        )
    return artifact


def _open_model(artifact: Artifact) -> LoadableModel:
    """Return the model; only an adapter needs its base model."""
    if model_loading.is_adapter(artifact):
        return model_loading.open_model_artifact(artifact)
    return LoadableModel(
        artifact.sha256, LocalBaseModel(artifact.path, artifact.sha256, ""), artifact.path, None, artifact
    )
