"""The model whose embeddings represent prompts: that of the captured answers, or one named by the user."""

from __future__ import annotations

from pathlib import Path

from components.common.models import model_loading, text_embeddings
from components.common.models.text_embeddings import TextEmbedder
from components.common.runtime.errors import ConfigurationError, InputError, UsageError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store

INPUT, HIDDEN_STATES = "input", "hidden_states"


def build_embedder(folder: Path, kind: str) -> TextEmbedder:
    """Return the embedder of a model's folder.

    Args:
        folder: folder with safetensors and tokenizer.json.
        kind: INPUT, the mean of the tokens' input embeddings, or HIDDEN_STATES, the mean of the last hidden states.

    Raises:
        UsageError: the kind is unknown.
        ConfigurationError: the model cannot embed texts.
    """
    if kind not in (INPUT, HIDDEN_STATES):
        raise UsageError(
            f"--embeddings is {kind!r}; expected {INPUT} or {HIDDEN_STATES}", hint=f"Example: --embeddings {INPUT}"
        )
    return text_embeddings.build_mean_embedder(folder) if kind == INPUT else text_embeddings.build_encoder(folder)


def find_folder(source: str, reporter: Reporter) -> Path:
    """Return the folder of weights and tokenizer of a model source, a tuned model, or a package.

    Raises:
        ConfigurationError: the source is invalid or not on this machine.
    """
    folder = Path(source)
    if folder.is_dir():
        # A package has the weights below its model folder. The input embeddings of an adapter's base are not tuned.
        candidates = [folder, *sorted(path.parent for path in folder.rglob("tokenizer.json"))]
        for each in candidates:
            is_complete = (each / "tokenizer.json").is_file() and any(each.glob("*.safetensors"))
            if is_complete and not (each / model_loading.ADAPTER_CONFIG).exists():
                return each
        if not (folder / "manifest.json").is_file():
            raise ConfigurationError(
                f"{folder} contains no model with safetensors files and tokenizer.json",
                hint="Set --embedding-model to the folder of a model or package, or to a model source.",
            )
    return model_loading.open_model(source, reporter).weights


def find_answering_model(store: Path, model_sha256: str, reporter: Reporter) -> Path:
    """Return the folder of the weights of the model that gave captured answers. An adapter has those of its base.

    Raises:
        InputError: the model's digest was not captured, or the model is not in the store.
    """
    hint = "Set --embedding-model to the folder of the model or its package."
    if not model_sha256:
        raise InputError("the captured rows do not record the digest of their model", hint=hint)
    if not artifact_store.has_artifact(store, model_sha256):
        where = artifact_store.describe_store(store)
        raise InputError(f"the model {model_sha256[:12]} of the captured rows is not in {where}", hint=hint)
    artifact = artifact_store.load_artifact(store, model_sha256, "model", reporter=reporter)
    return model_loading.open_model_artifact(artifact, reporter).weights
