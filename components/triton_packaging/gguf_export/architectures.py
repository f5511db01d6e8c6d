"""Model configurations and weights in the terms of llama.cpp: hyperparameters, tensor names and tensor layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import gguf
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

LLAMA3_ROPE = "llama3"
ROPE_TYPES = ("default", "linear", LLAMA3_ROPE)


@dataclass(frozen=True)
class Architecture:
    """A model family that llama.cpp computes like transformers.

    Attributes:
        name: name of the architecture in GGUF files.
        interleaves_rotation: llama.cpp rotates adjacent elements of queries and keys, while transformers rotates elements
            of the two halves. The rows of both projections are reordered.
        has_sliding_window: llama.cpp ignores the window of the family, so that the context ends with the window.
    """

    name: str
    interleaves_rotation: bool = False
    has_sliding_window: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", interleaves_rotation=True),
    "mistral": Architecture("llama", interleaves_rotation=True, has_sliding_window=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}


def find_architecture(config: PretrainedConfig) -> Architecture:
    """Return the architecture of a model. Reads no weights.

    Raises:
        ConfigurationError: the family, or one of its options, is not supported.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ConfigurationError(
            f"the model is a {config.model_type} model; GGUF export supports {', '.join(ARCHITECTURES)}",
            hint="Serve the package with `tuneline serve`, or choose another base model.",
        )
    rope_type = get_rope_type(config)
    problems = {
        "quantization_config is set; expected full weights": getattr(config, "quantization_config", None) is not None,
        f"rope_type is {rope_type}; expected one of {', '.join(ROPE_TYPES)}": rope_type not in ROPE_TYPES,
        f"hidden_act is {config.hidden_act}; expected silu": config.hidden_act != "silu",
        "attention_bias is true; expected false": bool(getattr(config, "attention_bias", False)),
        "mlp_bias is true; expected false": bool(getattr(config, "mlp_bias", False)),
        "use_sliding_window is true; expected false": bool(getattr(config, "use_sliding_window", False)),
    }
    if problem := next((text for text, is_present in problems.items() if is_present), None):
        raise ConfigurationError(
            f"GGUF export does not support the {config.model_type} model: {problem}",
            hint="Serve the package with `tuneline serve`, or choose another base model.",
        )
    return architecture


def get_rope_type(config: PretrainedConfig) -> str:
    """Return the type of the rotary position embedding; "default" if it is not scaled."""
    return str(config.rope_parameters.get("rope_type", "default"))


def get_head_dim(config: PretrainedConfig) -> int:
    """Return the size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def add_hyperparameters(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Add the hyperparameters of a model to the metadata of a file."""
    import gguf

    head_dim, rope = get_head_dim(config), config.rope_parameters
    context = config.max_position_embeddings
    if ARCHITECTURES[config.model_type].has_sliding_window and config.sliding_window:
        context = min(context, config.sliding_window)
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if get_rope_type(config) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def list_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a float32 model with their names in GGUF files. Tied weights are yielded once.

    Raises:
        ConfigurationError: a tensor has no place in the architecture.
    """
    import gguf

    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    if get_rope_type(config) == LLAMA3_ROPE:
        yield "rope_freqs.weight", _compute_frequency_divisors(config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise ConfigurationError(
                f"the tensor {name} of the {config.model_type} model has no name in the GGUF architecture "
                f"{architecture.name}",
                hint="Serve the package with `tuneline serve`, or choose another base model.",
            )
        tensor = parameter.detach().cpu()
        count = heads.get(name.split(".")[-2])
        if architecture.interleaves_rotation and count:
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        yield new_name, tensor


def _compute_frequency_divisors(config: PretrainedConfig) -> torch.Tensor:
    """Return the numbers by which the scaling of Llama 3 divides each rotation frequency."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS[LLAMA3_ROPE](config, torch.device("cpu"))
    exponents = torch.arange(0, get_head_dim(config), 2, dtype=torch.int64).float() / get_head_dim(config)
    return 1.0 / config.rope_parameters["rope_theta"] ** exponents / scaled
