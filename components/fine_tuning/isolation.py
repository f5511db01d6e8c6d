"""Whether rows that lie in one sequence see each other, found out on the very model that is trained.

Rows are laid end to end with positions that begin anew in each and no mask: attention is then to be confined to the row. Which kernels and
model codes hold to that differs (with an all-ones mask none does, with prompt tuning none), so it is not believed but tried: one row is
changed, and the logits of the others have to stay what they were to the last bit.
"""

from __future__ import annotations

from typing import Any

from components.common.errors import ConfigurationError

ROWS, LENGTH = 3, 8  # of the trial


def moved(model: Any, *, vocabulary: int) -> float:
    """The most that a logit of other rows moves when the tokens of the first row are changed; 0.0 where rows do not see each other."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)  # the training's own random numbers stay as they are
    before = torch.randint(vocabulary, (1, ROWS * LENGTH), generator=generator).to(device)
    after = before.clone()
    after[:, :LENGTH] = torch.randint(vocabulary, (1, LENGTH), generator=generator).to(device)
    after[:, :LENGTH] += (after[:, :LENGTH] == before[:, :LENGTH]) * (1 - 2 * (before[:, :LENGTH] > 0))
    positions = torch.arange(LENGTH, device=device).repeat(ROWS)[None]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        one, other = (model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, LENGTH:] for ids in (before, after))
    model.train(was_training)
    return float((one - other).abs().max())


def check(model: Any, *, vocabulary: int) -> None:
    """Raise ConfigurationError where packed rows would see each other."""
    by = moved(model, vocabulary=vocabulary)
    if by:
        kernel = getattr(model.config, "_attn_implementation", "?")
        raise ConfigurationError(
            f"fine_tuning.packing: packed rows see each other here (attention {kernel}): a changed row moved the others by {by:.2g}",
            hint="Set fine_tuning.packing to false, or fine_tuning.attention to sdpa.",
        )
