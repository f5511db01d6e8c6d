"""Checks of a model's weights before they are used: files, index, tensors and vocabulary.

They read headers only, not the data of the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from components.common.runtime.errors import ConfigurationError

MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
MAX_NAMED_TENSORS = 5  # of each kind, in an error
COPY_HINT = "Copy or download the model again."
# Constant causal masks, which checkpoints of old versions of transformers contain.
CAUSAL_MASK_PATTERN = re.compile(r"\.(attn|attention)\.(masked_)?bias$")
ADAPTER_CONFIG = "adapter_config.json"
MATCH_HINT = "Use the config.json that belongs to the weights, or download the model again."


def check_weight_files(folder: Path, names: Collection[str], uri: str) -> None:
    """Check that weights are whole and that an index and config.json refer only to files of the model.

    transformers opens every file in an index. A file outside the folder would not be part of the digest, and
    a file in another format may be a pickle, which can run code.

    Args:
        folder: Folder of the model.
        names: Names of the files that the digest covers.
        uri: Source of the model, for the message.

    Raises:
        ConfigurationError: a weights file is damaged, or a file that would be loaded is not part of the model.
    """
    if ADAPTER_CONFIG in names:  # transformers would load other base weights, which the digest does not cover
        raise ConfigurationError(
            f"fine_tuning.base_model: {uri} contains {ADAPTER_CONFIG}, which refers to another base model",
            hint="Merge the adapter into its base model, or remove the file if the weights are complete.",
        )
    tensors = {name: _read_tensor_names(folder / name, uri) for name in names if name.endswith(".safetensors")}
    explicit = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("transformers_weights")
    usable = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    if explicit is not None and explicit not in usable:
        raise ConfigurationError(
            f"fine_tuning.base_model: config.json of {uri} refers to the weights {explicit!r}, which are not a "
            "safetensors file of the model",
            hint="Remove transformers_weights from config.json.",
        )
    for index in sorted(name for name in names if name.endswith(".safetensors.index.json")):
        for tensor, name in _read_index(folder / index, uri).items():
            if name not in tensors:
                raise ConfigurationError(
                    f"fine_tuning.base_model: {index} of {uri} refers to {name!r}, which is not a safetensors file "
                    "of the model",
                    hint=COPY_HINT,
                )
            if tensor not in tensors[name]:
                raise ConfigurationError(
                    f"fine_tuning.base_model: {name} of {uri} has no tensor {tensor!r}, which {index} lists",
                    hint=COPY_HINT,
                )


def _read_tensor_names(path: Path, uri: str) -> frozenset[str]:
    """Return the names in the header of a safetensors file: 8 bytes length, JSON, then the data, without gaps."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ConfigurationError(
            f"fine_tuning.base_model: {path.name} of {uri} is not a safetensors file ({size} bytes)", hint=COPY_HINT
        ) from None
    if size != expected:
        raise ConfigurationError(
            f"fine_tuning.base_model: {path.name} of {uri} has {size} bytes; expected {expected}", hint=COPY_HINT
        )
    return frozenset(tensors)


def _read_index(path: Path, uri: str) -> Mapping[str, str]:
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {"weight_map": dict(entries)} if all(isinstance(name, str) for name in entries.values()):
                return entries
    except (ValueError, RecursionError):
        pass
    raise ConfigurationError(
        f"fine_tuning.base_model: {path.name} of {uri} has no weight_map of tensor and file names", hint=COPY_HINT
    )


def check_vocabulary(tokenizer: Any, config: Any, uri: str) -> None:
    """Raise ConfigurationError if the ID of a token that rows can contain exceeds the embedding of the model.

    Gemma 3 1B has a special token for images and no embedding for it. Special tokens without a role that are not in the
    chat template are left out.

    Args:
        tokenizer: A transformers tokenizer.
        config: The transformers configuration.
        uri: Source of the model, for the message.
    """
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    unused = {
        str(added)
        for added in tokenizer.added_tokens_decoder.values()
        if added.special and str(added) not in used and str(added) not in str(tokenizer.chat_template)
    }
    vocabulary = ((token, number) for token, number in tokenizer.get_vocab().items() if token not in unused)
    token, last = max(vocabulary, key=lambda item: item[1], default=("", -1))
    size = config.get_text_config(decoder=True).vocab_size
    if last >= size:
        raise ConfigurationError(
            f"fine_tuning.base_model: the token {token!r} of {uri} has the ID {last}, and the model has {size} "
            "embeddings",
            hint="Use the tokenizer that belongs to the model, or a model with resized embeddings.",
        )


def check_loaded_tensors(info: Mapping[str, Collection[Any]], folder: Path) -> None:
    """Raise ConfigurationError if transformers did not fill every parameter from the weights, or left tensors out.

    Args:
        info: The loading information of `from_pretrained`.
        folder: Folder of the model, for the message.
    """
    shapes = {name: (list(found), list(wanted)) for name, found, wanted in info["mismatched_keys"]}
    problems = [
        *_list_tensors("missing", info["missing_keys"]),
        *_list_tensors("unexpected", [n for n in info["unexpected_keys"] if not CAUSAL_MASK_PATTERN.search(n)]),
        *_list_tensors(
            "wrong shape", [f"{name} ({found}; expected {wanted})" for name, (found, wanted) in shapes.items()]
        ),
    ]
    if problems:
        raise ConfigurationError(
            f"the weights in {folder} do not match its config.json: {'; '.join(problems)}", hint=MATCH_HINT
        )


def _list_tensors(kind: str, names: Collection[str]) -> list[str]:
    if not names:
        return []
    shown = sorted(names)[:MAX_NAMED_TENSORS]
    more = [f"and {len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return [f"{kind}: {', '.join([*shown, *more])}"]
