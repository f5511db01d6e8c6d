"""Isolation check: measures on the model to be trained whether rows in one packed sequence attend to each other.

Packed rows have no mask. Position ids restart in each row, which should limit attention to the row. Some kernels and
models ignore position ids: all kernels with an all-ones mask, and all models with prompt tuning.
"""

# The check changes one row and requires bit-identical logits of the other rows, except in models with experts. There,
# the changed row changes the number of tokens of each expert, and so the rounding of its matrix products. Measured on
# six families with 16 experts, four layers and a hidden size of 256, in float32: at most 5 epsilon of the largest
# logit from rounding; with attention between rows, the logits change by at least the largest logit.

from __future__ import annotations

from typing import TYPE_CHECKING

from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL_ROWS, TRIAL_TOKENS = 3, 8  # rows in the test sequence, tokens per row
MAX_EXPERT_ROUNDING = 16  # epsilons of the largest logit


def measure_leak(model: PreTrainedModel, *, vocabulary: int) -> float:
    """Return the largest change of the other rows' logits if the first row changes; 0.0 if rows are isolated.

    A change within the rounding of experts is 0.0.

    Args:
        model: The model to be trained.
        vocabulary: Number of token ids in the model's vocabulary.
    """
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)  # leaves the training's random state unchanged
    before = torch.randint(vocabulary, (1, TRIAL_ROWS * TRIAL_TOKENS), generator=generator).to(device)
    after = before.clone()
    first_row, old_row = after[:, :TRIAL_TOKENS], before[:, :TRIAL_TOKENS]
    first_row[:] = torch.randint(vocabulary, (1, TRIAL_TOKENS), generator=generator).to(device)
    first_row += (first_row == old_row) * (1 - 2 * (old_row > 0))  # change tokens that were drawn again
    positions = torch.arange(TRIAL_TOKENS, device=device).repeat(TRIAL_ROWS)[None]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = [
            model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, TRIAL_TOKENS:]
            for ids in (before, after)
        ]
    model.train(was_training)
    leak = float((logits[0] - logits[1]).abs().max())
    if any("Experts" in type(module).__name__ for module in model.modules()):
        rounding = MAX_EXPERT_ROUNDING * torch.finfo(logits[0].dtype).eps * float(logits[0].abs().max())
        return leak if leak > rounding else 0.0
    return leak


def check_isolation(model: PreTrainedModel, *, vocabulary: int) -> None:
    """Check that packed rows do not attend to each other. For the arguments see `measure_leak`.

    Raises:
        ConfigurationError: packed rows attend to each other.
    """
    leak = measure_leak(model, vocabulary=vocabulary)
    if leak:
        kernel = getattr(model.config, "_attn_implementation", "?")
        raise ConfigurationError(
            f"fine_tuning.packing: packed rows attend to each other (attention {kernel}): "
            f"changing one row changed the logits of other rows by {leak:.2g}; expected 0",
            hint="Set fine_tuning.packing to false.",
        )
