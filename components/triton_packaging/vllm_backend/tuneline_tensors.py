"""Tensor names, types and shapes of Triton's vLLM backend, as listed in its documentation.

Imports nothing, because `triton_config` reads this table outside of Triton.
"""

from __future__ import annotations

# name: (data type, dimensions, optional)
INPUTS: dict[str, tuple[str, list[int], bool]] = {
    "text_input": ("TYPE_STRING", [1], False),
    "stream": ("TYPE_BOOL", [1], True),
    "sampling_parameters": ("TYPE_STRING", [1], True),
    "exclude_input_in_output": ("TYPE_BOOL", [1], True),
    "return_finish_reason": ("TYPE_BOOL", [1], True),
    "return_logprobs": ("TYPE_BOOL", [1], True),
    "return_num_input_tokens": ("TYPE_BOOL", [1], True),
    "return_num_output_tokens": ("TYPE_BOOL", [1], True),
}
# name: (data type, dimensions)
OUTPUTS: dict[str, tuple[str, list[int]]] = {
    "text_output": ("TYPE_STRING", [-1]),
    "finish_reason": ("TYPE_STRING", [-1]),
    "logprobs": ("TYPE_STRING", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
}
