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
TRIAL_ROWS, TRIAL_TOKENS = 4, 32


def merge(model: PeftModel) -> PreTrainedModel:
    """Return the model with its adapter merged into the weights, in float32.

    Raises:
        TrainingError: the merged model's logits differ from those of base and adapter.
    """
    model = model.float().eval()
    if model.config._attn_implementation == "flash_attention_2":  # has no float32 kernels
        model.get_base_model().set_attn_implementation("sdpa")
    before = _compute_logits(model)
    merged: PreTrainedModel = model.merge_and_unload()
    difference = compute_relative_difference(before, _compute_logits(merged))
    if not difference <= MAX_LOGIT_DIFFERENCE:
        raise TrainingError(
            "the merged model differs from the base model with its adapter: the relative difference of the logits "
            f"is {difference:.2g}; expected at most {MAX_LOGIT_DIFFERENCE:g}",
            hint="Set fine_tuning.merge to false, which publishes the adapter.",
        )
    return merged


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


def load_unquantized(base: Path, adapter: Path) -> PeftModel:
    """Load base model and adapter in float32, for an adapter trained on 4-bit base weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    return PeftModel.from_pretrained(model, str(adapter))
