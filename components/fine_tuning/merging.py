"""A low-rank update put into the weights it stands beside, and the proof that the model answers as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.common.errors import TrainingError

# Of the largest logit: how far a merged model's logits may be from those of base and update apart. Sums in another order, in float32.
TOLERANCE = 1e-5
LENGTH, ROWS = 32, 4  # tokens that are tried


def merged(model: Any) -> Any:
    """The model (a PEFT one) with its update in the weights, in float32. Raises TrainingError where it answers otherwise than before."""
    model = model.float().eval()
    if model.config._attn_implementation == "flash_attention_2":  # which has no float32 kernels
        model.get_base_model().set_attn_implementation("sdpa")
    before = _logits(model)
    whole = model.merge_and_unload()
    off = difference(before, _logits(whole))
    if not off <= TOLERANCE:
        raise TrainingError(
            f"the merged model differs from base and update apart: logits are off by {off:.2g} of the largest, {TOLERANCE:g} is allowed",
            hint="Publish the adapter: fine_tuning.merge: false.",
        )
    return whole


def difference(one: Any, other: Any) -> float:
    """The largest difference of two tensors of logits, as a share of the largest logit."""
    return float((one - other).abs().max() / one.abs().max())


def _logits(model: Any) -> Any:
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).device)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def unquantised(base: Path, adapter: Path) -> Any:
    """Base and adapter in float32, for an update that was trained beside 4-bit weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
    return PeftModel.from_pretrained(whole, str(adapter))
