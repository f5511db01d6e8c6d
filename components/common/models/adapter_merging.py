"""Merging of an adapter into the base weights, with a check that the logits of the merged model agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.common.runtime.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

MAX_LOGIT_DIFFERENCE = 1e-5  # relative to the largest logit; the order of float32 sums causes smaller differences
# Relative to the largest logit, in unit roundoffs of the weights' dtype (2^-8 for bfloat16): rounding errors of successive
# layers add up like a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). Measured: at most 6.5 in Llama
# models of 2 and 30 layers.
MAX_ROUNDING_DIFFERENCE = 32
VERSION = 1  # increment when the merged weights change
TRIAL_ROWS, TRIAL_TOKENS = 4, 32


def merge(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with its adapter merged into the weights, in float32, and the result rounded to `dtype`.

    Raises:
        TrainingError: the logits of the merged or the rounded weights differ from those of base and adapter.
    """
    model = model.float().eval()
    if model.config._attn_implementation == "flash_attention_2":  # has no float32 kernels; every model has eager
        model.get_base_model().set_attn_implementation("eager")
    expected = _compute_logits(model)
    merged: PreTrainedModel = model.merge_and_unload()
    _check_logits(expected, merged, MAX_LOGIT_DIFFERENCE)
    rounded = merged.to(dtype).float()  # a CPU computes many times faster in float32
    _check_logits(expected, rounded, max(MAX_LOGIT_DIFFERENCE, get_rounding_tolerance(dtype)))
    return rounded.to(dtype)


def get_rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative difference of logits that rounding of the weights to `dtype` may cause."""
    import torch

    return float(MAX_ROUNDING_DIFFERENCE * torch.finfo(dtype).eps / 2)


def _check_logits(expected: torch.Tensor, merged: PreTrainedModel, tolerance: float) -> None:
    difference = compute_relative_difference(expected, _compute_logits(merged))
    if not difference <= tolerance:
        raise TrainingError(
            "the merged model differs from the base model with its adapter: the relative difference of the logits "
            f"is {difference:.2g}; expected at most {tolerance:.2g}",
            hint="Set fine_tuning.merge to false, which publishes the adapter, or fine-tune from another base model.",
        )


def compute_relative_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference of two equally shaped tensors of logits, relative to the largest expected logit."""
    return float((expected - actual).abs().max() / expected.abs().max())


def _compute_logits(model: PreTrainedModel) -> torch.Tensor:
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (TRIAL_ROWS, TRIAL_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits
    return logits


def load_adapted(base: Path, adapter: Path) -> PeftModel:
    """Load base model and adapter in float32, for an adapter trained on 4-bit or sharded base weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    return PeftModel.from_pretrained(model, str(adapter))
