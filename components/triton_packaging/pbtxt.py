"""config.pbtxt, written with Triton's own protobuf and read back."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.common import artifacts
from components.common.errors import TunelineError
from components.triton_packaging.vllm_backend import tuneline_tensors

CONFIG = "config.pbtxt"
WARMUP_TEXT, WARMUP_TOKENS = "Hello.", 4

# name: (data type, dimensions). What the request of the python backend may hold; model.py says which must be there.
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
}
OUTPUTS: Mapping[str, tuple[str, list[int]]] = {
    "text_output": ("TYPE_STRING", [1]),
    "finish_reason": ("TYPE_STRING", [1]),
    "prompt_tokens": ("TYPE_INT32", [1]),
    "completion_tokens": ("TYPE_INT32", [1]),
}


def stream_name(name: str) -> str:
    """The name of the model that streams what the model of this name answers."""
    return f"{name}_stream"


def write(folder: Path, parameters: Mapping[str, str]) -> None:
    """Write config.pbtxt and the warm-up request's data into a model folder, whose name is the model's.

    Raises TunelineError when what was written does not read back as the same configuration.
    """
    config = python_config(folder.name, parameters)
    _add_warmup(config)
    _write_warmup(folder / "warmup")
    write_config(folder, config)


def write_stream(folder: Path, engine: str, parameters: Mapping[str, str]) -> None:
    """Write config.pbtxt of the model that streams the answers of the model `engine`: it holds no weights and runs on the CPU."""
    from tritonclient.grpc import model_config_pb2 as pb

    config = python_config(folder.name, {"engine": engine, **parameters})
    config.model_transaction_policy.decoupled = True
    config.instance_group[0].kind = pb.ModelInstanceGroup.KIND_CPU
    write_config(folder, config)


def write_vllm(folder: Path, parameters: Mapping[str, str]) -> None:
    """Write config.pbtxt of a model for Triton's vLLM backend, which fills in inputs and outputs itself when it loads the model."""
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=folder.name, backend="vllm")
    config.version_policy.latest.num_versions = 1
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_MODEL)
    _add_parameters(config, parameters)
    write_config(folder, config)


def complete_vllm(config: Any) -> None:
    """Fill in what the vLLM backend fills in where Triton lets a backend complete a configuration: inputs, outputs, many responses."""
    from tritonclient.grpc import model_config_pb2 as pb

    for tensor, (kind, dims, optional) in tuneline_tensors.INPUTS.items():
        config.input.add(name=tensor, data_type=pb.DataType.Value(kind), dims=dims, optional=optional)
    for tensor, (kind, dims) in tuneline_tensors.OUTPUTS.items():
        config.output.add(name=tensor, data_type=pb.DataType.Value(kind), dims=dims)
    config.model_transaction_policy.decoupled = True


def write_config(folder: Path, config: Any) -> None:
    """Write config.pbtxt of a model folder: the old or the new one is there, whole. Raises TunelineError when it does not read back."""
    from google.protobuf import text_format

    text = text_format.MessageToString(config, as_utf8=True)
    artifacts.write_atomically(folder / CONFIG, text)
    if read(folder) != config:
        raise TunelineError(f"{folder / CONFIG} does not read back as it was written", hint="Report this with the model's manifest.json.")


def read(folder: Path) -> Any:
    """The ModelConfig message of a model folder. Raises TunelineError when it does not parse or is not named like its folder."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = folder / CONFIG
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise TunelineError(f"{path} cannot be read: {error}", hint="Package the model again.") from None
    if config.name != folder.name:
        raise TunelineError(
            f"{path} names the model {config.name!r}, its folder {folder.name!r}", hint="Triton never loads such a model: rename one."
        )
    return config


def backend_of(folder: Path) -> str:
    """The backend of a model folder; "" where its configuration cannot be read, which the server tells better."""
    try:
        return str(read(folder).backend)
    except TunelineError:
        return ""


def python_config(name: str, parameters: Mapping[str, str]) -> Any:
    """The configuration of a model for our python backend: one instance, on a GPU where the server has one, no batch dimension."""
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=name, backend="python", max_batch_size=0)
    config.version_policy.latest.num_versions = 1
    for tensor, (kind, dims) in INPUTS.items():
        config.input.add(name=tensor, data_type=pb.DataType.Value(kind), dims=dims, optional=True)
    for tensor, (kind, dims) in OUTPUTS.items():
        config.output.add(name=tensor, data_type=pb.DataType.Value(kind), dims=dims)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_AUTO)
    _add_parameters(config, parameters)
    return config


def _add_parameters(config: Any, parameters: Mapping[str, str]) -> None:
    for key, value in parameters.items():
        config.parameters[key].string_value = value


def _add_warmup(config: Any) -> None:
    """One short request before the model counts as ready: the first one pays for lazy initialisation."""
    from tritonclient.grpc import model_config_pb2 as pb

    warmup = config.model_warmup.add(name="hello", batch_size=1, count=1)
    for name in ("text_input", "max_tokens"):
        kind, dims = INPUTS[name]
        warmup.inputs[name].CopyFrom(pb.ModelWarmup.Input(data_type=pb.DataType.Value(kind), dims=dims, input_data_file=name))


def _write_warmup(folder: Path) -> None:
    """The tensors in Triton's binary form: a string is its length (uint32, little-endian) and its bytes."""
    folder.mkdir(exist_ok=True)
    text = WARMUP_TEXT.encode()
    (folder / "text_input").write_bytes(struct.pack("<I", len(text)) + text)
    (folder / "max_tokens").write_bytes(struct.pack("<i", WARMUP_TOKENS))
