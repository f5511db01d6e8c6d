"""GGUF files: tensor types, writing, and reading with transformers, whose reader shares no code with the writer."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from components.triton_packaging.gguf_export import architectures, vocabulary

if TYPE_CHECKING:
    import gguf
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

GgufType = Literal["q8_0", "f16", "bf16", "f32", "q5_1", "q5_0", "q4_1", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
# With 4 and 5 bits, rounding of these tensors would affect every token most.
OUTER_TENSORS = ("token_embd.weight", "output.weight")


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    type_: GgufType,
    texts: Mapping[str, str],
) -> None:
    """Write a model in float32 to a GGUF file. Equal arguments give equal bytes.

    Args:
        texts: further metadata by key, such as `general.name`.

    Raises:
        ConfigurationError: llama.cpp does not support the model or its tokenizer.
    """
    import gguf
    import numpy

    writer = gguf.GGUFWriter(path, architectures.find_architecture(model.config).name)
    writer.add_type("model")
    for key, text in texts.items():
        writer.add_string(key, text)
    file_type = "ALL_F32" if type_ == "f32" else f"MOSTLY_{type_.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architectures.add_hyperparameters(writer, model.config)
    vocabulary.add_vocabulary(writer, tokenizer, model.config.vocab_size, _list_end_ids(model, tokenizer))
    types = {}
    for name, tensor in architectures.list_tensors(model):
        types[name] = _choose_type(name, tensor.shape, type_)
        block, block_bytes = gguf.GGML_QUANT_SIZES[types[name]]
        size = tensor.numel() // block * block_bytes
        writer.add_tensor_info(name, tuple(tensor.shape), numpy.dtype(numpy.float32), size, types[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in architectures.list_tensors(model):  # one at a time, to save memory
            values = numpy.ascontiguousarray(tensor.float().numpy())
            with numpy.errstate(over="ignore"):  # the comparison of the losses reports infinite weights
                writer.write_tensor_data(gguf.quantize(values, types[name]))
    finally:
        writer.close()


def _choose_type(name: str, shape: Sequence[int], type_: GgufType) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor: vectors are not quantized, and rows of incomplete blocks are stored in F16."""
    import gguf

    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    chosen = gguf.GGMLQuantizationType[type_.upper()]
    if type_.startswith(("q4", "q5")) and name in OUTER_TENSORS:
        chosen = gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] else chosen


def _list_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer, the tokenizer's first."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return list(dict.fromkeys(int(number) for number in ids if number is not None))


def read_gguf(path: Path, original: PretrainedConfig) -> PreTrainedModel:
    """Return the model of a GGUF file, with dequantized weights in float32.

    Args:
        original: configuration of the exported model, for the settings that transformers does not read from the file.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = architectures.get_head_dim(original)
    if architectures.get_rope_type(original) != "default":
        config.rope_parameters = original.rope_parameters
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar cannot be turned off
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval()
