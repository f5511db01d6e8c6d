"""Text embeddings from a model on this machine: its input embeddings, or the hidden states of an encoder.

Input embeddings need no forward pass and no torch: the vector of a text is the mean of its tokens' embeddings, weighted by
smooth inverse frequency (Arora et al. 2017, A Simple but Tough-to-Beat Baseline for Sentence Embeddings). Tokens of
context that recurs across rows are frequent, so they hardly count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.common.models import standalone_tokenizer
from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMOOTHING = 1e-3  # `a` of the weight a / (a + frequency); Arora et al. recommend 1e-3 to 1e-4
MAX_TOKENS = 2_048  # of a text; the rest does not count
MAX_COMPONENT_TEXTS = 10_000  # sampled for the common component
ENCODER_BATCH = 32
INPUT_EMBEDDING_NAMES = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight"),
    "embeddings.weight",
)
FLOAT_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # NumPy has no bfloat16

TextEmbedder = Callable[[Sequence[str]], np.ndarray]


def build_input_embedder(folder: Path, sample: Iterable[Sequence[str]]) -> TextEmbedder:
    """Return the embedder of texts by the model's input embeddings.

    Args:
        folder: the model's folder, with safetensors and tokenizer.json.
        sample: batches of texts, whose token frequencies determine the weights.

    Returns:
        A function from texts to unit vectors (float32, texts x hidden size); a text without tokens is a zero vector.

    Raises:
        ConfigurationError: the folder has no readable input embeddings or tokenizer.
    """
    matrix, tokenizer = _open_model(folder)
    counts: np.ndarray = np.zeros(len(matrix), np.int64)
    pieces, sampled = [], 0
    for texts in sample:
        ids = _tokenize(tokenizer, texts, len(matrix))
        for row in ids:
            counts += np.bincount(row, minlength=len(matrix))
        if sampled < MAX_COMPONENT_TEXTS:
            pieces.append(ids[: MAX_COMPONENT_TEXTS - sampled])
            sampled += len(pieces[-1])
    weights = (SMOOTHING / (SMOOTHING + counts / max(1, counts.sum()))).astype(np.float32)
    vectors = (
        np.concatenate([_average(matrix, weights, ids) for ids in pieces]) if pieces else np.zeros((0, matrix.shape[1]))
    )
    _, components = np.linalg.eigh(vectors.T @ vectors)
    common = components[:, -1].astype(np.float32)  # of the largest eigenvalue

    def embed(texts: Sequence[str]) -> np.ndarray:
        averages = _average(matrix, weights, _tokenize(tokenizer, texts, len(matrix)))
        return _normalize(averages - np.outer(averages @ common, common))

    return embed


def build_mean_embedder(folder: Path) -> TextEmbedder:
    """Return the embedder of texts by the unweighted mean of the model's input embeddings, which needs no sample of texts.

    Returns:
        A function from texts to vectors (float32, texts x hidden size); a text without tokens is a zero vector.

    Raises:
        ConfigurationError: the folder has no readable input embeddings or tokenizer.
    """
    matrix, tokenizer = _open_model(folder)
    weights: np.ndarray = np.ones(len(matrix), np.float32)

    def embed(texts: Sequence[str]) -> np.ndarray:
        return _average(matrix, weights, _tokenize(tokenizer, texts, len(matrix)))

    return embed


def build_encoder(folder: Path) -> TextEmbedder:
    """Return the embedder of texts by the mean of an encoder's last hidden states.

    Raises:
        ConfigurationError: torch is not installed, or the folder contains no model.
    """
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise ConfigurationError(
            "embeddings from hidden states require torch and transformers, which are not installed",
            hint="Run: pip install 'tuneline[models]', or use the input embeddings.",
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModel.from_pretrained(folder, trust_remote_code=False, use_safetensors=True).eval()
    except (OSError, ValueError) as error:
        raise _model_error(folder, str(error).splitlines()[0]) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    limit = min(MAX_TOKENS, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", MAX_TOKENS))

    def embed(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # texts of similar length in a batch
        vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
        for begin in range(0, len(order), ENCODER_BATCH):
            numbers = order[begin : begin + ENCODER_BATCH]
            batch = tokenizer(
                [texts[number] for number in numbers],
                padding=True,
                truncation=True,
                max_length=limit,
                return_tensors="pt",
            )
            with torch.inference_mode():
                states = model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1).float()
            vectors[numbers] = ((states * mask).sum(1) / mask.sum(1).clamp(min=1)).numpy()
        return _normalize(vectors)

    return embed


def _open_model(folder: Path) -> tuple[np.ndarray, Tokenizer]:
    """Return the input embeddings and the tokenizer of a model."""
    matrix = _map_input_embeddings(folder)
    try:
        return matrix, standalone_tokenizer.load_tokenizer(folder)
    except ValueError as error:
        raise _model_error(folder, str(error)) from None


def _map_input_embeddings(folder: Path) -> np.ndarray:
    """Map the input embeddings of a model into memory (vocabulary x hidden size)."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name.endswith(INPUT_EMBEDDING_NAMES) and len(tensor["shape"]) == 2 and tensor["dtype"] in FLOAT_TYPES:
                offset = 8 + size + tensor["data_offsets"][0]
                return np.memmap(path, FLOAT_TYPES[tensor["dtype"]], "r", offset, tuple(tensor["shape"]))
    raise _model_error(folder, "its safetensors contain no input embeddings of type float32, float16 or bfloat16")


def _tokenize(tokenizer: Tokenizer, texts: Sequence[str], vocabulary: int) -> list[np.ndarray]:
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    rows = (np.array(encoding.ids[:MAX_TOKENS], np.int64) for encoding in encodings)
    return [row[row < vocabulary] for row in rows]


def _average(matrix: np.ndarray, weights: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the weighted means of the embeddings of token ids (float32, rows x hidden size)."""
    from scipy import sparse

    columns = np.concatenate([*rows, np.zeros(0, np.int64)])
    used, positions = np.unique(columns, return_inverse=True)
    lengths = [len(row) for row in rows]
    values = weights[columns] / np.repeat(np.maximum(lengths, 1), lengths).astype(np.float32)
    averaging = sparse.csr_array((values, positions, np.cumsum([0, *lengths])), shape=(len(rows), len(used)))
    embeddings = np.asarray(matrix[used])
    if embeddings.dtype == np.uint16:  # bfloat16 is the upper half of float32
        embeddings = (embeddings.astype(np.uint32) << 16).view(np.float32)
    averages: np.ndarray = averaging @ embeddings.astype(np.float32)
    return averages


def _normalize(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit_vectors: np.ndarray = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
    return unit_vectors


def _model_error(folder: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"the model in {folder} cannot embed texts: {problem}",
        hint="Use a model with safetensors and tokenizer.json.",
    )
