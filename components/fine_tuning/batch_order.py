"""Row order of a training run: batches of similar length in random order, which a resumed training repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from components.fine_tuning.mixing import Mixture

if TYPE_CHECKING:
    from torch.utils.data import Sampler

# Rows of this number of batches are sorted together: on the demo rows, padding decreases by a third.
POOL_BATCHES = 16


def order_epoch(
    lengths: Sequence[int], batch: int, *, seed: int, epoch: int, mixture: Mixture | None = None
) -> list[int]:
    """Return the row indices of one epoch.

    Rows are shuffled, sorted by length within pools of POOL_BATCHES batches and cut into batches; then the batches are
    shuffled. The length grouping of transformers is unsuitable: it orders each pool from long to short rows, and
    depends on the global random state. A resumed training does not have the same state at that point.

    Args:
        lengths: Tokens of each row.
        batch: Rows in a batch.
        seed: Seed of the recipe.
        epoch: Number of the epoch, from 0.
        mixture: Rows that the epoch draws. None: every row once.
    """
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(count_epoch_rows(lengths, mixture), generator=generator).tolist()
    if mixture:
        drawn = mixture.draw_epoch(seed=seed, epoch=epoch)
        shuffled = [drawn[i] for i in shuffled]
    pools = [shuffled[i : i + POOL_BATCHES * batch] for i in range(0, len(shuffled), POOL_BATCHES * batch)]
    rows: list[int] = []
    for pool in pools:
        ordered = sorted(pool, key=lambda r: (lengths[r], r))
        batches = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
        if mixture:
            _separate_copies(batches)
        rows += [row for rows_of_batch in batches for row in rows_of_batch]
    full_batches = len(rows) // batch
    order = torch.randperm(full_batches, generator=generator).tolist()
    return [row for i in order for row in rows[i * batch : (i + 1) * batch]] + rows[full_batches * batch :]


def _separate_copies(batches: Sequence[list[int]]) -> None:
    """Exchange copies of a row in a batch for rows of the nearest batches, where the lengths are similar."""
    for number, rows in enumerate(batches):
        nearest = sorted(range(len(batches)), key=lambda other: abs(other - number))
        for position, row in enumerate(rows):
            if row not in rows[:position]:
                continue
            candidates = (
                (other, place)
                for other in (batches[i] for i in nearest)
                if row not in other
                for place, candidate in enumerate(other)
                if candidate not in rows
            )
            if found := next(candidates, None):
                other, place = found
                rows[position], other[place] = other[place], row


def count_epoch_rows(lengths: Sequence[int], mixture: Mixture | None) -> int:
    """Return the number of rows of an epoch; for the arguments see `order_epoch`."""
    return mixture.rows if mixture else len(lengths)


def count_epoch_steps(rows: int, batch: int) -> int:
    """Return the optimizer steps of an epoch with this number of rows. As in transformers, the last batch is partial."""
    return max(1, math.ceil(rows / batch))


def count_draws(
    lengths: Sequence[int], batch: int, steps: int, *, seed: int, mixture: Mixture | None = None
) -> list[int]:
    """Return how often each row is in the first `steps` batches of a training run; for the arguments see `order_epoch`."""
    epochs, remaining_steps = divmod(steps, count_epoch_steps(count_epoch_rows(lengths, mixture), batch))
    draws = [0 if mixture else epochs] * len(lengths)
    rows: list[int] = []
    if remaining_steps:
        order = order_epoch(lengths, batch, seed=seed, epoch=epochs, mixture=mixture)
        rows = order[: remaining_steps * batch]
    if mixture:
        rows += (row for epoch in range(epochs) for row in mixture.draw_epoch(seed=seed, epoch=epoch))
    for row in rows:
        draws[row] += 1
    return draws


def repeat_batches(rows: Sequence[int], batch: int, *, answers: int, repeats: int) -> list[int]:
    """Repeat each row of a batch `answers` times, and each batch `repeats` times, as TRL's trainers that generate expect.

    The last batch is completed with rows from the beginning of the epoch.
    """
    complete = [rows[i % len(rows)] for i in range(batch * math.ceil(len(rows) / batch))]
    batches = (complete[i : i + batch] for i in range(0, len(complete), batch))
    return [row for one in batches for _ in range(repeats) for row in one for _ in range(answers)]


def build_sampler(
    lengths: Sequence[int],
    batch: int,
    *,
    seed: int,
    mixture: Mixture | None = None,
    answers: int = 0,
    repeats: int = 1,
) -> Sampler[int]:
    """Return a torch sampler over `order_epoch`; the trainer sets the epoch. For the first arguments see `order_epoch`.

    Args:
        answers: Answers to each row in the batches of `repeat_batches`. 0: batches without repeated rows.
        repeats: Repetitions of each batch, if there are answers.
    """
    from torch.utils.data import Sampler

    class LengthGroupedSampler(Sampler[int]):  # type: ignore[misc] # torch is untyped here
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            rows = count_epoch_rows(lengths, mixture)
            return rows if not answers else count_epoch_steps(rows, batch) * batch * answers * repeats

        def __iter__(self) -> Iterator[int]:
            rows = order_epoch(lengths, batch, seed=seed, epoch=self.epoch, mixture=mixture)
            return iter(rows if not answers else repeat_batches(rows, batch, answers=answers, repeats=repeats))

    return LengthGroupedSampler()
