"""The order of the rows: rows of like length share a batch, batches come in random order, and a resumed training sees the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

POOL = 16  # batches whose rows are sorted together: padding falls by a third on the demo's rows, batches stay mixed


def epoch_order(lengths: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[int]:
    """Indices of one epoch. Shuffled, sorted by length within pools of POOL batches, cut into batches, and the batches shuffled.

    transformers' own grouping draws from the global random state, which a resumed training cannot have at that moment, and runs each
    pool from long rows to short ones.
    """
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    pools = [shuffled[i : i + POOL * batch] for i in range(0, len(shuffled), POOL * batch)]
    rows = [row for pool in pools for row in sorted(pool, key=lambda r: (lengths[r], r))]
    whole = len(rows) // batch
    order = torch.randperm(whole, generator=generator).tolist()
    return [row for i in order for row in rows[i * batch : (i + 1) * batch]] + rows[whole * batch :]


def sampler(lengths: Sequence[int], batch: int, *, seed: int) -> Any:
    """A torch sampler over epoch_order; the trainer tells it the epoch."""
    from torch.utils.data import Sampler

    class LengthGrouped(Sampler):  # type: ignore[misc]
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return len(lengths)

        def __iter__(self) -> Iterator[int]:
            return iter(epoch_order(lengths, batch, seed=seed, epoch=self.epoch))

    return LengthGrouped()
