"""Writes and reads config.pbtxt with Triton's own protobuf messages."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import TunelineError
from components.triton_packaging.vllm_backend import tuneline_tensors

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

CONFIG_FILENAME = "config.pbtxt"
# Values of the parameter `tools` of a package: how a client passes tools to the model.
TOOLS_IN_TEMPLATE, TOOLS_AS_TEXT = "template", "text"
WARMUP_TEXT, WARMUP_TOKENS = b"Hello.", 4

# name: (data type, dimensions). All inputs are optional for Triton; the python backend checks which are required.
INPUTS: Mapping[str, tuple[str, list[int]]] = {
    "text_input": ("TYPE_STRING", [1]),
    "messages": ("TYPE_STRING", [1]),
    "apply_chat_template": ("TYPE_BOOL", [1]),
    "max_tokens": ("TYPE_INT32", [1]),
    "temperature": ("TYPE_FP32", [1]),
    "top_p": ("TYPE_FP32", [1]),
    "top_k": ("TYPE_INT32", [1]),
    "seed": ("TYPE_INT64", [1]),
    "stop": ("TYPE_STRING", [-1]),
    "tools": ("TYPE_STRING", [1]),
    "json_schema": ("TYPE_STRING", [1]),
    "logprobs": ("TYPE_INT32", [1]),
    "frequency_penalty": ("TYPE_FP32", [1]),
    "presence_penalty": ("TYPE_FP32", [1]),
}
OUTPUTS: Mapping[str, tuple[str, list[int]]] = {
    "text_output": ("TYPE_STRING", [1]),
    "finish_reason": ("TYPE_STRING", [1]),
    "prompt_tokens": ("TYPE_INT32", [1]),
    "completion_tokens": ("TYPE_INT32", [1]),
    "logprobs": ("TYPE_STRING", [1]),
}


def stream_model_name(name: str) -> str:
    """Return the name of the model that streams the answers of the model `name`."""
    return f"{name}_stream"


def write_python_model(folder: Path, parameters: Mapping[str, str]) -> None:
    """Write config.pbtxt and the data of the warm-up request into a model folder; its name is the model's name.

    Raises:
        TunelineError: the configuration read back from the file differs.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    config = create_config(folder.name, "python", parameters)
    # Triton sends a short request before the model is ready, because lazy initialization slows down the first request.
    warmup = config.model_warmup.add(name="hello", batch_size=1, count=1)
    for name in ("text_input", "max_tokens"):
        kind, dims = INPUTS[name]
        warmup.inputs[name].CopyFrom(
            pb.ModelWarmup.Input(data_type=pb.DataType.Value(kind), dims=dims, input_data_file=name)
        )
    # Tensors in Triton's binary form: a string is its length (uint32, little-endian) and its bytes.
    (folder / "warmup").mkdir(exist_ok=True)
    (folder / "warmup" / "text_input").write_bytes(struct.pack("<I", len(WARMUP_TEXT)) + WARMUP_TEXT)
    (folder / "warmup" / "max_tokens").write_bytes(struct.pack("<i", WARMUP_TOKENS))
    write_config(folder, config)


def write_stream_model(folder: Path, engine_name: str, parameters: Mapping[str, str]) -> None:
    """Write config.pbtxt of the model that streams the answers of `engine_name`; it runs on the CPU.

    Raises:
        TunelineError: the configuration read back from the file differs.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    config = create_config(folder.name, "python", {"engine": engine_name, **parameters})
    config.model_transaction_policy.decoupled = True
    config.instance_group[0].kind = pb.ModelInstanceGroup.KIND_CPU
    write_config(folder, config)


def write_vllm_model(folder: Path, parameters: Mapping[str, str]) -> None:
    """Write config.pbtxt of a model for Triton's vLLM backend.

    Raises:
        TunelineError: the configuration read back from the file differs.
    """
    write_config(folder, create_config(folder.name, "vllm", parameters))


def complete_vllm_config(config: ModelConfig) -> None:
    """Add the inputs, outputs and decoupled mode that the vLLM backend adds if auto-complete is enabled."""
    _add_tensors(config, tuneline_tensors.INPUTS, tuneline_tensors.OUTPUTS)
    config.model_transaction_policy.decoupled = True


def set_parameters(config: ModelConfig, parameters: Mapping[str, str]) -> None:
    """Set parameters of a configuration; keep its other parameters."""
    for key, value in parameters.items():
        config.parameters[key].string_value = value


def _add_tensors(
    config: ModelConfig,
    inputs: Mapping[str, tuple[str, list[int], bool]],
    outputs: Mapping[str, tuple[str, list[int]]],
) -> None:
    from tritonclient.grpc.model_config_pb2 import DataType

    for name, (kind, dims, optional) in inputs.items():
        config.input.add(name=name, data_type=DataType.Value(kind), dims=dims, optional=optional)
    for name, (kind, dims) in outputs.items():
        config.output.add(name=name, data_type=DataType.Value(kind), dims=dims)


def write_config(folder: Path, config: ModelConfig) -> None:
    """Write config.pbtxt of a model folder atomically.

    Raises:
        TunelineError: the configuration read back from the file differs.
    """
    from google.protobuf import text_format

    artifact_folder.write_atomically(folder / CONFIG_FILENAME, text_format.MessageToString(config, as_utf8=True))
    if read_config(folder) != config:
        raise TunelineError(
            f"{folder / CONFIG_FILENAME}: the configuration read back differs from the one written",
            hint="Report this error with the model's manifest.json.",
        )


def read_config(folder: Path) -> ModelConfig:
    """Return the ModelConfig message of a model folder.

    Raises:
        TunelineError: the file does not parse, or its model name differs from the folder's name.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = folder / CONFIG_FILENAME
    try:
        config = text_format.Parse(filesystem.read_text(path), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise TunelineError(f"{path} cannot be read: {error}", hint="Package the model again.") from None
    if config.name != folder.name:
        raise TunelineError(
            f"{path}: name is {config.name!r}; expected the folder name {folder.name!r}",
            hint="Rename the folder, or correct `name`.",
        )
    return config


def read_parameters(folder: Path) -> dict[str, str]:
    """Return the parameters of a model folder's config.pbtxt.

    Raises:
        TunelineError: as `read_config`.
    """
    return {name: value.string_value for name, value in read_config(folder).parameters.items()}


def read_backend(folder: Path) -> str:
    """Return the backend of a model folder; "" if config.pbtxt is unreadable, which the server reports."""
    try:
        return str(read_config(folder).backend)
    except TunelineError:
        return ""


def create_config(name: str, backend: str, parameters: Mapping[str, str]) -> ModelConfig:
    """Return the configuration of a model: one instance, no batch dimension.

    A python model is placed on a GPU if the server has one. The vLLM backend chooses its devices, and adds inputs and
    outputs when it loads the model.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=name, backend=backend)
    config.version_policy.latest.num_versions = 1
    set_parameters(config, parameters)
    if backend == "vllm":
        config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_MODEL)
    else:
        config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_AUTO)
        _add_tensors(config, {name: (*each, True) for name, each in INPUTS.items()}, OUTPUTS)
    return config
