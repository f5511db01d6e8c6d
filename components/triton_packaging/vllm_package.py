"""Files of a package for Triton's vLLM backend in addition to config.pbtxt: model.json and multi_lora.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import InputError
from components.triton_packaging.adapter_placement import AdapterPlacement, compute_required_rank
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.package_contents import PackageContents
from components.triton_packaging.weight_files import write_json

MODEL_FILENAME, ADAPTERS_FILENAME = "model.json", "multi_lora.json"
MAX_BATCH_LORAS = 8  # default for max_loras


def write_vllm_files(
    version: Path,
    contents: PackageContents,
    placement: AdapterPlacement,
    config: TritonPackagingConfig,
    dtype: str,
    context: int,
) -> None:
    """Write model.json into a version folder, and multi_lora.json if adapters are attached.

    model.json contains keyword arguments of vLLM's AsyncEngineArgs.

    Args:
        dtype: data type of computation: float32 or bfloat16.
        context: length of the model's context, in tokens.

    Raises:
        InputError: the configured rank is too low for an adapter, or an adapter exceeds vLLM's highest rank.
    """
    settings = config.vllm
    arguments: dict[str, object] = {
        "model": resolve_serving_path(config, contents.weights),
        "tokenizer": resolve_serving_path(config, contents.tokenizer),
        "dtype": dtype,
        "max_model_len": min(settings.max_model_len or config.max_prompt_tokens + config.max_tokens, context),
        "max_num_seqs": config.slots,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": False,
    }
    if settings.quantization:
        arguments["quantization"] = settings.quantization
    if placement.adapters:
        required = compute_required_rank(placement.adapters)
        rank = settings.max_lora_rank or required
        if rank < required:
            raise InputError(
                f"triton_packaging.vllm.max_lora_rank is {rank}; expected at least {required} for these adapters",
                hint="Set triton_packaging.vllm.max_lora_rank to 0 to use the lowest rank that fits all adapters.",
            )
        arguments["enable_lora"] = True
        arguments["max_lora_rank"] = rank
        arguments["max_loras"] = settings.max_loras or min(len(placement.adapters), MAX_BATCH_LORAS)
        adapters = {name: resolve_serving_path(config, folder) for name, folder in contents.adapters.items()}
        write_json(version / ADAPTERS_FILENAME, adapters)
    write_json(version / MODEL_FILENAME, arguments)


def read_arguments(version: Path) -> dict[str, object]:
    """Return the content of model.json in a version folder."""
    arguments: dict[str, object] = json.loads((version / MODEL_FILENAME).read_text(encoding="utf-8"))
    return arguments


def resolve_serving_path(config: TritonPackagingConfig, path: str) -> str:
    """Return an absolute path unchanged; make a path in the version folder relative to the package's folder."""
    return path if path.startswith("/") else f"{config.model_name}/1/{path}"


def prefix_paths(version: Path, folder: str, old_prefix: str = "") -> None:
    """Prefix the package's own paths in a version folder's files with a folder on the server's machine.

    Absolute paths without `old_prefix` are not changed: they refer to weights outside of the package.

    Args:
        old_prefix: prefix to replace, if the package's own paths already have one.
    """

    def replace_prefix(path: str) -> str:
        if old_prefix and path.startswith(old_prefix):
            path = path[len(old_prefix) :]
        return path if path.startswith("/") else f"{folder.rstrip('/')}/{path}"

    model, adapters = version / MODEL_FILENAME, version / ADAPTERS_FILENAME
    arguments = json.loads(model.read_text(encoding="utf-8"))
    write_json(model, {**arguments, **{key: replace_prefix(arguments[key]) for key in ("model", "tokenizer")}})
    if adapters.exists():
        folders = json.loads(adapters.read_text(encoding="utf-8"))
        write_json(adapters, {name: replace_prefix(path) for name, path in folders.items()})


def check_vocabularies(model: LoadableModel, adapters: Mapping[str, LoadableModel]) -> None:
    """Raise InputError if an adapter's vocabulary differs from the model's: vLLM uses one tokenizer for all."""
    vocabulary = model_loading.load_tokenizer(model.tokenizer).get_vocab()
    for name, other in adapters.items():
        if other is not model and model_loading.load_tokenizer(other.tokenizer).get_vocab() != vocabulary:
            raise InputError(
                f"the vocabulary of the adapter {name} differs from the model's; vLLM uses one tokenizer",
                hint="Package this adapter separately.",
            )
