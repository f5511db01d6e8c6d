"""Weights of linear layers for vLLM, rounded to nearest, in the format of compressed-tensors.

A linear layer has one scale per output row. Its inputs are rounded to the type of the weights too, with one scale per
token, which is computed when the model runs; therefore no calibration data is needed. The output layer and the embedding
are unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel


def round_linear_layers(model: PreTrainedModel, preset: str) -> None:
    """Round the weights of a model's linear layers, and the inputs of these layers from now on, as in a package.

    Args:
        preset: scheme of compressed-tensors, such as "FP8_DYNAMIC".
    """
    from compressed_tensors.compressors import decompress_module

    for layer in _compress_linear_layers(model, preset):
        decompress_module(layer)


def save_compressed(model: PreTrainedModel, folder: Path, dtype: str, preset: str) -> None:
    """Compress a model, and write its weights and configuration; transformers and vLLM load them.

    Args:
        dtype: data type of the other weights: float32 or bfloat16.
        preset: scheme of compressed-tensors, such as "FP8_DYNAMIC".
    """
    import torch
    from compressed_tensors.compressors import ModelCompressor

    _compress_linear_layers(model, preset)
    compressor = ModelCompressor.from_pretrained_model(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not name.endswith("weight_scale"):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _compress_linear_layers(model: PreTrainedModel, preset: str) -> list[torch.nn.Module]:
    """Replace the weights of a model's linear layers by FP8 numbers and scales, and return these layers.

    A compressed weight is the weight divided by the scale of its row: the row's largest magnitude divided by the largest
    number of the type, 448 for FP8 (E4M3).
    """
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    output_layer = model.get_output_embeddings()
    ignored = [name for name, module in model.named_modules() if module is output_layer]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"linear": scheme}, ignore=ignored))
    layers = [layer for layer in model.modules() if getattr(layer, "quantization_scheme", None)]
    for layer in layers:
        weight = layer.weight.detach()
        scale, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme.weights)
        layer.weight_scale.data.copy_(scale)
        compress_module(layer)
    return layers
