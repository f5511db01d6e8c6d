"""Row order of a training: batches of similar length in random order, which a resumed training repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.data import Sampler

# Rows of this number of batches are sorted together: on the demo rows, padding decreases by a third.
POOL_BATCHES = 16


def order_epoch(lengths: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[int]:
    """Return the row indices of one epoch.

    Rows are shuffled, sorted by length within pools of POOL_BATCHES batches and cut into batches; then the batches are
    shuffled. The length grouping of transformers is unsuitable: it orders each pool from long to short rows, and
    depends on the global random state. A resumed training does not have the same state at that point.

    Args:
        lengths: Tokens of each row.
        batch: Rows in a batch.
        seed: Seed of the recipe.
        epoch: Number of the epoch, from 0.
    """
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    pools = [shuffled[i : i + POOL_BATCHES * batch] for i in range(0, len(shuffled), POOL_BATCHES * batch)]
    rows = [row for pool in pools for row in sorted(pool, key=lambda r: (lengths[r], r))]
    full_batches = len(rows) // batch
    order = torch.randperm(full_batches, generator=generator).tolist()
    return [row for i in order for row in rows[i * batch : (i + 1) * batch]] + rows[full_batches * batch :]


def build_sampler(lengths: Sequence[int], batch: int, *, seed: int) -> Sampler[int]:
    """Return a torch sampler over `order_epoch`; the trainer sets the epoch. For the arguments see `order_epoch`."""
    from torch.utils.data import Sampler

    class LengthGroupedSampler(Sampler[int]):  # type: ignore[misc] # torch is untyped here
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return len(lengths)

        def __iter__(self) -> Iterator[int]:
            return iter(order_epoch(lengths, batch, seed=seed, epoch=self.epoch))

    return LengthGroupedSampler()
