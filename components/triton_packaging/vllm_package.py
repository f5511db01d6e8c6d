"""A package for Triton's vLLM backend: config.pbtxt, and what it reads beside it, model.json and multi_lora.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.common import models
from components.common.errors import InputError
from components.common.models import Model
from components.triton_packaging import form as forms
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.form import Form
from components.triton_packaging.parts import Parts

MODEL, ADAPTERS = "model.json", "multi_lora.json"
MOST_LORAS = 8  # in one batch, where nobody says


def write(version: Path, parts: Parts, form: Form, config: TritonPackagingConfig, dtype: str, context: int) -> None:
    """Write model.json, and multi_lora.json where adapters are attached, into a version folder. `context` is the model's, in tokens."""
    arguments = engine_arguments(parts, form, config, dtype, context)
    _write(version / MODEL, arguments)
    if form.adapters:
        _write(version / ADAPTERS, {name: serving_path(config, folder) for name, folder in parts.adapters.items()})


def engine_arguments(parts: Parts, form: Form, config: TritonPackagingConfig, dtype: str, context: int) -> dict[str, Any]:
    """The keywords of vLLM's AsyncEngineArgs."""
    wanted = config.vllm.max_model_len or config.max_prompt_tokens + config.max_tokens
    arguments = {
        "model": serving_path(config, parts.weights),
        "tokenizer": serving_path(config, parts.tokenizer),
        "dtype": dtype,
        "max_model_len": min(wanted, context),
        "max_num_seqs": config.slots,
        "gpu_memory_utilization": config.vllm.gpu_memory_utilization,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "enforce_eager": config.vllm.enforce_eager,
        "trust_remote_code": False,
    }
    return {**arguments, **lora_arguments(form, config)} if form.adapters else arguments


def lora_arguments(form: Form, config: TritonPackagingConfig) -> dict[str, Any]:
    """The keywords for attached adapters. Raises InputError where the configured rank is too low for one of them."""
    lowest = forms.fitting_rank(form.adapters)
    rank = config.vllm.max_lora_rank or lowest
    if rank < lowest:
        raise InputError(
            f"triton_packaging.vllm.max_lora_rank is {rank}, and the adapters need {lowest}",
            hint="Raise it, or set it to 0 for the lowest rank that all of them fit in.",
        )
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": config.vllm.max_loras or min(len(form.adapters), MOST_LORAS)}


def serving_path(config: TritonPackagingConfig, part: str) -> str:
    """How the server finds a part: as it is where it is absolute, else from the folder that holds the package's model folders."""
    return part if part.startswith("/") else f"{config.model_name}/1/{part}"


def root(version: Path, folder: str, before: str = "") -> None:
    """Let the paths in a version folder's files begin with a folder of the server's machine; `before` is how its own ones begin, where they
    were rooted once. Other absolute ones stay as they are: they name weights that the package refers to."""
    arguments = json.loads((version / MODEL).read_text(encoding="utf-8"))
    _write(version / MODEL, {**arguments, **{key: _within(folder, arguments[key], before) for key in ("model", "tokenizer")}})
    if (version / ADAPTERS).exists():
        adapters = json.loads((version / ADAPTERS).read_text(encoding="utf-8"))
        _write(version / ADAPTERS, {name: _within(folder, path, before) for name, path in adapters.items()})


def _within(folder: str, path: str, before: str) -> str:
    if before and path.startswith(before):
        return f"{folder.rstrip('/')}/{path[len(before) :]}"
    return path if path.startswith("/") else f"{folder.rstrip('/')}/{path}"


def check_tokens(model: Model, adapters: Mapping[str, Model]) -> None:
    """Raise InputError for an adapter whose tokenizer knows other tokens: vLLM uses one tokenizer for all."""
    own = models.load_tokenizer(model.tokenizer).get_vocab()
    for name, one in adapters.items():
        if one is not model and models.load_tokenizer(one.tokenizer).get_vocab() != own:
            raise InputError(
                f"the adapter {name} was tuned with another tokenizer than the model", hint="Package it by itself: vLLM uses one tokenizer."
            )


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
