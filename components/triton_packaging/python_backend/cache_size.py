"""Size of the key-value cache on a GPU, from the memory that the weights leave free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The rest is for activations, and for the next version, which a deployment loads beside this one.
FREE_MEMORY_SHARE = 0.5


def compute_token_bytes(config: PretrainedConfig, element_bytes: int) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        config: the configuration of the language model.
        element_bytes: size of the data type in which the model is served.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * key_value_heads * width * element_bytes)


def limit_to_free_memory(requested_tokens: int, longest: int, token_bytes: int, free_bytes: int) -> int:
    """Return the capacity of the cache in tokens: at least one request of maximum length.

    Args:
        requested_tokens: capacity without a limit.
        longest: maximum length of a request, in tokens.
        free_bytes: free memory of the device after the weights are loaded.
    """
    return max(longest, min(requested_tokens, int(free_bytes * FREE_MEMORY_SHARE) // token_bytes))
