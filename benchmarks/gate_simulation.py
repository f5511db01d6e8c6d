"""Simulation of the promotion gate: how often it accepts a model at the limit of a rule, an equal and a better model.

`make bench-gate` writes docs/reference/benchmarks-gate.md. All trials of a case share the random weights of their bounds, so that
the bounds of thousands of trials are a few matrix products.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.common import significance
from components.common.gate_rules import Rule
from components.evaluation import promotion_gate
from components.evaluation.config import MAX_HARMED_SHARE
from components.model_registry import split_reuse

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray
    Generator = np.random.Generator

CONFIDENCE = 0.95
MAX_LOSS = 0.1  # the simulated rule's limit; a model whose mean difference is −MAX_LOSS must not be accepted
BETTER = 0.2  # gain of the clearly better model
SIZES = (20, 50, 100, 279, 1000)
ITEM_LOSSES = (5.0, 1.0)  # max_item_loss: the default of held_out.loss, and a stricter assumption
SEED = 20
REUSE_ITEMS = 1000  # with max_item_loss 1, of which the error is near 5%
REUSE_CANDIDATES = 10
REUSE_SAMPLES = 10_000  # the last of ten candidates needs a p-value of 1.5e-4
REUSE_TRIALS_PER_CHUNK = 500  # limits the memory of the weighted sums


@dataclass(frozen=True)
class Differences:
    """A distribution of differences per item, positive if the candidate is better.

    Attributes:
        draw: Returns differences of a shape with a mean, none below −`max_item_loss` where `is_bounded`.
        is_bounded: Whether the assumption on unseen items holds exactly.
        is_unit: Whether the differences are those of right and wrong answers, so that the largest loss is 1.
        draw_weights: Returns the items' weights; None for equal weights.
    """

    draw: Callable[[Generator, tuple[int, int], float, float], Array]
    is_bounded: bool = False
    is_unit: bool = False
    draw_weights: Callable[[Generator, tuple[int, int]], Array] | None = None


def _shift(draw: Callable[[Generator, tuple[int, int]], Array]) -> Differences:
    return Differences(lambda generator, shape, mean, _: draw(generator, shape) + mean)


def _rare_losses(share: float, factor: float = 1.0, weights: bool = False) -> Differences:
    """Return small differences, except that a share of the items is worse by `factor` × max_item_loss."""
    import numpy as np

    def draw(generator: Generator, shape: tuple[int, int], mean: float, max_item_loss: float) -> Array:
        loss = factor * max_item_loss
        usual = (mean + share * loss) / (1 - share)
        return np.where(generator.random(shape) < share, -loss, generator.normal(usual, 0.1, shape))

    def draw_weights(generator: Generator, shape: tuple[int, int]) -> Array:
        return generator.lognormal(0, 0.6, shape)

    return Differences(draw, factor <= 1, draw_weights=draw_weights if weights else None)


def _slices(generator: Generator, shape: tuple[int, int]) -> Array:
    import numpy as np

    return np.where(
        generator.random(shape) < 0.1, generator.normal(-0.9, 0.3, shape), generator.normal(0.1, 0.2, shape)
    )


def _right_or_wrong(generator: Generator, shape: tuple[int, int], mean: float, _: float) -> Array:
    lost, won = 0.1 - mean / 2, 0.1 + mean / 2
    return generator.choice([-1.0, 0.0, 1.0], shape, p=[lost, 1 - lost - won, won])


def _only_lost(generator: Generator, shape: tuple[int, int], mean: float, _: float) -> Array:
    import numpy as np

    return np.sign(mean) * (generator.random(shape) < abs(mean))


def build_distributions() -> dict[str, Differences]:
    """Return the distributions by name."""
    import numpy as np

    return {
        "normal": _shift(lambda g, s: g.normal(0, 0.3, s)),
        "skewed: lognormal losses": _shift(lambda g, s: 0.2 * (np.exp(0.5) - g.lognormal(0, 1, s))),
        "very skewed: lognormal losses, σ 1.5": _shift(lambda g, s: 0.1 * (np.exp(1.125) - g.lognormal(0, 1.5, s))),
        "skewed: lognormal gains": _shift(lambda g, s: 0.2 * (g.lognormal(0, 1, s) - np.exp(0.5))),
        "heavy tails: Student's t, 3 degrees": _shift(lambda g, s: 0.2 * g.standard_t(3, s)),
        "two modes": _shift(lambda g, s: g.choice([-0.5, 0.5], s) + g.normal(0, 0.05, s)),
        "nine of ten items unchanged": _shift(lambda g, s: np.where(g.random(s) < 0.9, 0.0, g.normal(0, 1, s))),
        "one slice in ten worse": _shift(_slices),
        "right or wrong answers": Differences(_right_or_wrong, True, True),
        "right or wrong answers, only lost": Differences(_only_lost, True, True),
        "catastrophe on 0.2% of items": _rare_losses(0.002),
        "catastrophe on 0.5% of items": _rare_losses(0.005),
        "catastrophe on 1% of items": _rare_losses(0.01),
        "catastrophe on 2% of items": _rare_losses(0.02),
        "catastrophe on 5% of items": _rare_losses(0.05),
        "catastrophe on 1%, items of unequal length": _rare_losses(0.01, weights=True),
    }


BEYOND = "catastrophe on 1% of items, twice max_item_loss"


@dataclass(frozen=True)
class Draws:
    """Random weights of `items` items: Dirichlet weights with one for the pessimistic item, and bootstrap counts."""

    exponentials: Array
    pessimistic: Array
    counts: Array


def draw_weights(generator: Generator, items: int, samples: int) -> Draws:
    """Draw the weights that all trials of a case share."""
    import numpy as np

    counts = np.stack([np.bincount(generator.integers(0, items, items), minlength=items) for _ in range(samples // 2)])
    exponentials = generator.standard_exponential((samples, items)).astype(np.float32)
    return Draws(exponentials, generator.standard_exponential(samples).astype(np.float32), counts.astype(np.float32))


def compute_gate_p_values(values: Array, max_item_loss: float, draws: Draws) -> Array:
    """Return each trial's p-value of the hypothesis that the mean is at most 0; see `estimate_pessimistic_gain`."""
    import numpy as np

    losses = np.maximum(max_item_loss, -values.min(axis=1))
    sums = draws.exponentials @ values.T - draws.pessimistic[:, None] * losses
    return (1 + np.count_nonzero(sums <= 0, axis=0)) / (1 + len(sums))


def accept_by_bootstrap(values: Array, draws: Draws) -> tuple[Array, Array]:
    """Return the decisions of the gate's earlier bound and of BCa (Efron, JASA 82, 1987).

    The earlier bound was the lower of a studentised bootstrap and of percentiles widened for small samples.
    """
    import numpy as np
    from scipy import stats

    items, samples = values.shape[1], len(draws.counts)
    mean, centred = values.mean(axis=1), values - values.mean(axis=1, keepdims=True)
    error = values.std(axis=1, ddof=1) / items**0.5
    means = draws.counts @ values.T / items
    errors = np.sqrt(np.maximum(draws.counts @ (values.T**2) / items - means**2, 0) / (items - 1))
    with np.errstate(all="ignore"):
        pivots = np.where(errors > 1e-9, (means - mean) / errors, np.sign(means - mean) * 1e6)
    studentised = mean - error * np.quantile(pivots, CONFIDENCE, axis=0)
    degrees = items - 1
    level = stats.norm.cdf((items / degrees) ** 0.5 * stats.t.ppf(1 - CONFIDENCE, degrees))
    before = np.minimum(studentised, np.quantile(means, level, axis=0)) >= 0

    bias = stats.norm.ppf(np.clip((means < mean).mean(axis=0), 1 / samples, 1 - 1 / samples))
    acceleration = (centred**3).sum(axis=1) / (6 * np.maximum((centred**2).sum(axis=1), 1e-30) ** 1.5)
    quantile = bias + stats.norm.ppf(1 - CONFIDENCE)
    levels = stats.norm.cdf(bias + quantile / (1 - acceleration * quantile))
    ranks = np.clip((levels * samples).astype(int), 0, samples - 1)
    return before, np.sort(means, axis=0)[ranks, np.arange(len(mean))] >= 0


def accept_by_betting(values: Array, max_item_loss: float) -> Array:
    """Return the decisions of a betting e-value, the mean over fixed bets (Waudby-Smith & Ramdas, JRSS B 86, 2024)."""
    import numpy as np

    scaled = values / np.maximum(max_item_loss, -values.min(axis=1, keepdims=True))
    wealth = np.stack([np.log1p(0.999 * 0.5**k * scaled).sum(axis=1) for k in range(12)])
    return np.logaddexp.reduce(wealth, axis=0) - np.log(len(wealth)) >= -np.log(1 - CONFIDENCE)


def accept_by_empirical_bernstein(values: Array, max_item_loss: float) -> Array:
    """Return the decisions of the empirical Bernstein bound (Maurer & Pontil, COLT 2009), differences clipped."""
    import numpy as np

    clipped = np.clip(values, -max_item_loss, max_item_loss)
    items, log = values.shape[1], np.log(2 / (1 - CONFIDENCE))
    width = np.sqrt(2 * clipped.var(axis=1, ddof=1) * log / items) + 7 * 2 * max_item_loss * log / (3 * (items - 1))
    return clipped.mean(axis=1) >= width


METHODS = ("before", "BCa", "empirical Bernstein", "betting", "gate")
BOUND_ALONE = "gate without a minimum number of items"  # as for a rule with min_gain: 0
Rates = dict[str, float]


def simulate(
    differences: Differences, mean: float, items: int, max_item_loss: float, trials: int, draws: Draws, seed: int
) -> Rates:
    """Return the share of trials in which each method accepts a model with this mean difference."""
    import numpy as np

    generator = np.random.Generator(np.random.PCG64([seed, items]))
    loss = 1.0 if differences.is_unit else max_item_loss
    values = differences.draw(generator, (trials, items), mean, loss) + MAX_LOSS
    if differences.draw_weights:
        weights = differences.draw_weights(generator, values.shape)
        values = values * weights / weights.mean(axis=1, keepdims=True)
    required = promotion_gate.compute_min_items(Rule(max_loss=MAX_LOSS), loss, None)
    values, loss = values.astype(np.float32), loss - MAX_LOSS
    before, bca = accept_by_bootstrap(values[: trials // 2], draws)  # takes nine tenths of the time
    passes = compute_gate_p_values(values, loss, draws) <= 1 - CONFIDENCE
    decisions = [
        before,
        bca,
        accept_by_empirical_bernstein(values, loss),
        accept_by_betting(values, loss),
        passes & (items >= required),
    ]
    rates = {method: float(accepted.mean()) for method, accepted in zip(METHODS, decisions, strict=True)}
    return {**rates, BOUND_ALONE: float(passes.mean())}


def simulate_harmed_share(items: int, share: float, trials: int) -> float:
    """Return how often the rule on harmed items holds if exactly the allowed share of all items is harmed."""
    import numpy as np

    counts = np.random.Generator(np.random.PCG64([SEED, items])).binomial(items, share, trials)
    bounds = {
        count: significance.compute_clopper_pearson_bounds([1.0] * count + [0.0] * (items - count), CONFIDENCE)[1]
        for count in set(counts.tolist())
    }
    return float(np.mean([bounds[count] <= share for count in counts.tolist()]))


def simulate_reuse(candidates: int, items: int, trials: int, samples: int) -> dict[str, Rates]:
    """Return how often at least one of several inferior candidates passes on one test split, by number of candidates."""
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(SEED))
    draws = draw_weights(generator, items, samples)
    p_values = np.empty((candidates, trials))
    for candidate in range(candidates):
        for start in range(0, trials, REUSE_TRIALS_PER_CHUNK):
            size = min(REUSE_TRIALS_PER_CHUNK, trials - start)
            values = generator.normal(0, 0.3, (size, items)).astype(np.float32)
            p_values[candidate, start : start + size] = compute_gate_p_values(values, 1.0 - MAX_LOSS, draws)
    levels = np.array([(1 - CONFIDENCE) * split_reuse.compute_level_factor(failures) for failures in range(candidates)])
    plain, corrected = p_values <= 1 - CONFIDENCE, p_values <= levels[:, None]
    return {
        str(count): {
            "every candidate at the rule's level": float(plain[:count].any(axis=0).mean()),
            "with the correction": float(corrected[:count].any(axis=0).mean()),
        }
        for count in (1, 2, 5, candidates)
    }


@dataclass(frozen=True)
class Results:
    """Acceptance by distribution, size and method; first for max_item_loss 5, then for 1.

    Attributes:
        false_acceptance: At the rule's limit.
        equal: Of a model equal to the other.
        better: Of a model that is better by BETTER.
        beyond: At the rule's limit, if a catastrophe exceeds max_item_loss.
        harmed: Of a model that harms exactly the allowed share, by size.
        reuse: See `simulate_reuse`.
    """

    false_acceptance: dict[float, dict[str, dict[int, Rates]]]
    equal: dict[float, dict[str, dict[int, Rates]]]
    better: dict[float, dict[str, dict[int, Rates]]]
    beyond: dict[int, Rates]
    harmed: dict[int, float]
    reuse: dict[str, Rates]

    def find_worst(self, method: str, max_item_loss: float = ITEM_LOSSES[0]) -> float:
        """Return the highest false acceptance of a method over distributions and sizes."""
        return max(
            rates[method] for by_size in self.false_acceptance[max_item_loss].values() for rates in by_size.values()
        )

    def average_power(self, method: str, items: int, max_item_loss: float = ITEM_LOSSES[0]) -> float:
        """Return the mean acceptance of an equal model over the distributions."""
        rates = [by_size[items][method] for by_size in self.equal[max_item_loss].values()]
        return sum(rates) / len(rates)


def run(sizes: Sequence[int], trials: int, samples: int) -> Results:
    """Simulate every distribution and size."""
    import numpy as np

    distributions = build_distributions()
    tables: list[dict[float, dict[str, dict[int, Rates]]]] = [
        {loss: {name: {} for name in distributions} for loss in ITEM_LOSSES} for _ in range(3)
    ]
    beyond: dict[int, Rates] = {}
    for items in sizes:
        draws = draw_weights(np.random.Generator(np.random.PCG64([SEED, items])), items, samples)
        for loss in ITEM_LOSSES:
            for name, differences in distributions.items():
                for table, mean, count in zip(
                    tables, (-MAX_LOSS, 0.0, BETTER), (trials, trials // 4, trials // 4), strict=True
                ):
                    table[loss][name][items] = simulate(differences, mean, items, loss, count, draws, SEED)
        beyond[items] = simulate(_rare_losses(0.01, 2.0), -MAX_LOSS, items, ITEM_LOSSES[0], trials, draws, SEED)
        print(f"{items} items simulated", flush=True)
    return Results(
        *tables,
        beyond,
        {items: simulate_harmed_share(items, MAX_HARMED_SHARE, 20_000) for items in sizes},
        simulate_reuse(REUSE_CANDIDATES, REUSE_ITEMS, trials, REUSE_SAMPLES),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the simulation and write the page."""
    from benchmarks import gate_simulation_page, machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--markdown", type=Path, help="Page to write; its plot is written to the folder images next to it."
    )
    parser.add_argument("--trials", type=int, default=2000, help="Number of trials at the limit, per case.")
    parser.add_argument("--samples", type=int, default=2000, help="Number of random weightings of the items.")
    options = parser.parse_args(arguments)
    began = time.process_time()
    results = run(SIZES, options.trials, options.samples)
    facts = {"trials": options.trials, "samples": options.samples, "seconds": time.process_time() - began}
    print(f"worst false acceptance: {results.find_worst('before'):.1%} before, {results.find_worst('gate'):.1%} now")
    if options.markdown:
        gate_simulation_page.write_page(
            results, options.markdown, {**facts, **machine.circumstances("benchmarks.gate_simulation")}
        )


if __name__ == "__main__":
    main()
