"""The weights folder of a package: a complete model in the Hugging Face layout, readable by a server of another user."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

from components.common import artifacts, models
from components.common.models import Model
from components.common.paths import link_or_copy

CACHE_BYTES, FLOAT32 = 1 << 30, 4  # the cache of a package that does not say

# Where a model was loaded from is no property of it, and would give equal models unequal bytes.
LOCAL_KEYS = ("_name_or_path", "name_or_path")
BASE_KEYS = ("base_model_name_or_path", "tokenizer_name_or_path")  # of an adapter: its base's name is enough


def served_dtype(configured: str) -> str:
    """float32 or bfloat16: the number format of merged weights and of a GPU's arithmetic."""
    if configured != "auto":
        return configured
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def write_weights(model: Model, folder: Path, dtype: str, *, merged: bool) -> None:
    """Fill `folder` with the model's weights, configuration, tokenizer and chat template; `merged`: with its adapter in the weights.

    An adapter is merged in float32 and stored as `dtype`; other weights are taken over unchanged. Float32 keeps greedy answers on a CPU
    those of the model before merging; bfloat16 halves the package and is what a GPU computes with.
    """
    folder.mkdir(parents=True)
    if merged:
        _merge(model, folder, dtype)
    else:
        _take_over(model.weights, folder)
    write_tokenizer(model, folder)


def write_tokenizer(model: Model, folder: Path) -> None:
    """Write the model's tokenizer and chat template into `folder`, and take out of its files where they came from."""
    folder.mkdir(parents=True, exist_ok=True)
    models.save_tokenizer(models.load_tokenizer(model.tokenizer), folder)
    for path in sorted(folder.glob("*.json")):
        _strip_local_keys(path)


def write_adapter(model: Model, folder: Path) -> None:
    """Fill `folder` with the model's adapter as PEFT and vLLM read it: its weights as links, its configuration without a path."""
    if model.adapter is None:
        raise ValueError("the model has no adapter")
    folder.mkdir(parents=True)
    for path in sorted(model.adapter.glob("adapter_*.safetensors")):
        link_or_copy(path.resolve(), folder / path.name)
    settings = json.loads((model.adapter / models.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    named = {key: model.base.name for key in BASE_KEYS if settings.get(key)}
    (folder / models.ADAPTER_CONFIG).write_text(json.dumps({**settings, **named}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _merge(model: Model, folder: Path, dtype: str) -> None:
    import torch

    merged: Any = models.load(model, dtype=torch.float32).merge_and_unload()
    merged.to(getattr(torch, dtype)).save_pretrained(folder)


def _take_over(source: Path, folder: Path) -> None:
    """The weights as links, so that their bytes lie once; the small files as copies, because they are cleaned."""
    for path in sorted(p for p in source.iterdir() if p.is_file() and models.MODEL_FILES.fullmatch(p.name)):
        if path.suffix == ".safetensors":
            link_or_copy(path.resolve(), folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def _strip_local_keys(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and any(key in content for key in LOCAL_KEYS):
        kept = {key: value for key, value in content.items() if key not in LOCAL_KEYS}
        artifacts.write_atomically(path, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def context_tokens(folder: Path, otherwise: int) -> int:
    """The longest sequence the model was made for, in tokens; `otherwise` where its configuration does not say."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    return int(config.get("max_position_embeddings") or config.get("n_positions") or otherwise)


def cache_tokens(folder: Path, wanted: int) -> int:
    """As many of the wanted tokens as CACHE_BYTES hold the keys and values of, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    width = config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 1) // heads
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 1
    a_token = 2 * layers * (config.get("num_key_value_heads") or heads) * width * FLOAT32
    return int(min(wanted, CACHE_BYTES // a_token))


def make_readable(folder: Path) -> None:
    """Let any user read the package: safetensors files are born private, and Triton often runs as another user."""
    for path in (folder, *folder.rglob("*")):
        wanted = 0o755 if path.is_dir() else 0o644
        if stat.S_IMODE(path.stat().st_mode) & wanted != wanted:
            path.chmod(wanted)
