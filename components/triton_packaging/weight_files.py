"""Writes a package's weights, tokenizer and adapters in the Hugging Face layout, with read permission for all users."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.models.quantizations import find_quantization
from components.common.runtime.filesystem import link_or_copy

MAX_CACHE_BYTES, FLOAT32_BYTES = 1 << 30, 4  # limit of the default of cache_tokens

# Removed from the files: equal models from different folders must have equal bytes.
LOCAL_KEYS = ("_name_or_path", "name_or_path")


def resolve_dtype(configured: str, quantization: str = "none") -> str:
    """Return the dtype of merged weights and of GPU arithmetic: float32 or bfloat16."""
    if configured != "auto":
        return configured
    entry = find_quantization(quantization)
    if entry and entry.needs_bfloat16:
        return "bfloat16"
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def write_weights(model: LoadableModel, folder: Path, dtype: str, *, merged: bool) -> None:
    """Write the model's weights, configuration, tokenizer and chat template.

    Weight files are linked if possible. Smaller files are copied, because local paths are removed from them.

    Args:
        merged: whether to merge the adapter, in float32, and store the result as `dtype`. With float32, greedy answers
            on a CPU equal those before merging. bfloat16 halves the package and is the dtype of GPU arithmetic.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if merged:
        import torch

        adapted = model_loading.load_model(model, dtype=torch.float32).merge_and_unload()
        adapted.to(getattr(torch, dtype)).save_pretrained(folder)
    else:
        for path in sorted(p for p in model.weights.iterdir() if model_loading.MODEL_FILE_PATTERN.fullmatch(p.name)):
            if path.suffix == ".safetensors":
                link_or_copy(path.resolve(), folder / path.name)
            elif path.is_file():
                shutil.copyfile(path, folder / path.name)
    write_tokenizer(model, folder)


def write_tokenizer(model: LoadableModel, folder: Path) -> None:
    """Write the model's tokenizer and chat template, and remove the local paths from all JSON files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model_loading.save_tokenizer(model_loading.load_tokenizer(model.tokenizer), folder)
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and any(key in content for key in LOCAL_KEYS):
            kept = {key: value for key, value in content.items() if key not in LOCAL_KEYS}
            write_json(path, kept)


def write_adapter(model: LoadableModel, folder: Path) -> None:
    """Write the model's adapter for PEFT and vLLM.

    Weight files are linked if possible. In the configuration, the base model's name replaces local paths.

    Raises:
        ValueError: the model has no adapter.
    """
    if model.adapter is None:
        raise ValueError("the model has no adapter")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.adapter.glob("adapter_*.safetensors")):
        link_or_copy(path.resolve(), folder / path.name)
    settings = json.loads((model.adapter / model_loading.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for key in ("base_model_name_or_path", "tokenizer_name_or_path"):
        if settings.get(key):
            settings[key] = model.base.name
    write_json(folder / model_loading.ADAPTER_CONFIG, settings)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file of a package."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_config(folder: Path) -> dict[str, int]:
    """Return the language model's section of config.json."""
    config: dict[str, dict[str, int]] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)  # type: ignore[arg-type] # both are configurations


def read_context_tokens(folder: Path, default: int) -> int:
    """Return the longest sequence that the model supports, in tokens; `default` if its configuration has no limit."""
    config = _read_config(folder)
    return int(config.get("max_position_embeddings") or config.get("n_positions") or default)


def limit_cache_tokens(folder: Path, requested_tokens: int) -> int:
    """Return the requested number of tokens, reduced if their float32 keys and values exceed MAX_CACHE_BYTES."""
    config = _read_config(folder)
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    width = config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 1) // heads
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 1
    bytes_per_token = 2 * layers * (config.get("num_key_value_heads") or heads) * width * FLOAT32_BYTES
    return int(min(requested_tokens, MAX_CACHE_BYTES // bytes_per_token))


def make_readable(folder: Path) -> None:
    """Grant the group read permission for the package.

    safetensors creates files with permissions for their owner only, and Triton often runs as another user of the group.
    """
    for path in (folder, *folder.rglob("*")):
        mode = 0o750 if path.is_dir() else 0o640
        if stat.S_IMODE(path.stat().st_mode) & mode != mode:
            path.chmod(mode)
