"""Size of the key-value cache on a GPU, as arithmetic: no GPU is needed."""

from __future__ import annotations

from transformers import LlamaConfig

from components.triton_packaging.python_backend.cache_size import compute_token_bytes, limit_to_free_memory

GIB = 1 << 30
LONGEST = 5120  # tokens of a request with the default limits
EIGHT_BILLION = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128
)


def test_bytes_of_a_token_follow_the_shape_and_the_served_dtype() -> None:
    assert compute_token_bytes(EIGHT_BILLION, 2) == 128 << 10
    assert compute_token_bytes(EIGHT_BILLION, 4) == 256 << 10
    without_groups = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    assert compute_token_bytes(without_groups, 2) == 2 * 2 * 64 * 2


def test_cache_holds_all_slots_on_a_large_gpu_and_half_of_the_free_memory_on_a_small_one() -> None:
    token_bytes = compute_token_bytes(EIGHT_BILLION, 2)
    requested = 16 * LONGEST
    assert limit_to_free_memory(requested, LONGEST, token_bytes, 60 * GIB) == requested
    assert limit_to_free_memory(requested, LONGEST, token_bytes, 8 * GIB) == 4 * GIB // token_bytes == 32_768
    assert limit_to_free_memory(requested, LONGEST, token_bytes, GIB) == LONGEST
