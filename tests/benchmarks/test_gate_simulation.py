"""The promotion gate refuses a model at the limit of a rule under skewed and rare losses.

The test marked `stress` simulates every distribution, which takes a minute of CPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import gate_simulation, gate_simulation_page
from benchmarks.gate_simulation import MAX_LOSS, SIZES
from components.common import significance
from components.model_registry import split_reuse


def test_simulated_bound_is_that_of_the_gate() -> None:
    generator = np.random.default_rng(3)
    values = generator.normal(0.02, 0.3, (20, 100))
    draws = gate_simulation.draw_weights(generator, 100, 4000)
    simulated = gate_simulation.compute_gate_p_values(values.astype(np.float32), 1.0, draws)
    for row, p_value in zip(values, simulated, strict=True):
        gain = significance.estimate_pessimistic_gain(
            row, [0.0] * 100, [1.0] * 100, max_item_loss=1.0, samples=4000, seed=5
        )
        assert gain.compute_p_value(0.0) == pytest.approx(p_value, abs=0.05)


@pytest.mark.parametrize(
    ("name", "items"),
    [
        ("catastrophe on 1% of items", 50),
        ("catastrophe on 2% of items", 279),
        ("very skewed: lognormal losses, σ 1.5", 279),
        ("right or wrong answers", 100),
    ],
)
def test_false_acceptance_is_at_most_nominal(name: str, items: int) -> None:
    differences = gate_simulation.build_distributions()[name]
    draws = gate_simulation.draw_weights(np.random.default_rng(1), items, 400)
    rates = gate_simulation.simulate(differences, -MAX_LOSS, items, 5.0, 400, draws, seed=2)
    assert rates["gate"] <= 0.08  # 5% and three standard errors of 400 trials
    assert rates[gate_simulation.BOUND_ALONE] <= 0.08
    better = gate_simulation.simulate(differences, 0.2, 279, 5.0, 100, draws, seed=2) if items == 279 else {"gate": 1.0}
    assert better["gate"] >= 0.8


@pytest.mark.parametrize("items", SIZES)
def test_harmed_share_at_the_limit_is_rarely_accepted(items: int) -> None:
    assert gate_simulation.simulate_harmed_share(items, 0.05, 4000) <= 0.06


def test_uniform_p_values_exhaust_the_error_probability_of_a_split() -> None:
    """Uniform p-values are the worst case of a valid test. The limit has three standard errors of 0.0006."""
    generator, trials = np.random.default_rng(4), 200_000
    levels = 0.05 * np.array([split_reuse.compute_level_factor(failures) for failures in range(20)])
    accepted = np.mean((generator.random((trials, 20)) <= levels).any(axis=1))
    assert 0.065 <= accepted <= 0.07 + 3 * 0.0006


@pytest.mark.stress
def test_inferior_candidates_on_one_split_rarely_pass() -> None:
    """The documented limit is 7%; its standard error in 4,000 trials is 0.4%."""
    reuse = gate_simulation.simulate_reuse(10, gate_simulation.REUSE_ITEMS, 4000, gate_simulation.REUSE_SAMPLES)
    assert reuse["10"]["every candidate at the rule's level"] > 0.25
    assert reuse["1"]["with the correction"] <= 0.05 + 0.004
    assert reuse["10"]["with the correction"] <= 0.07 + 0.004


@pytest.mark.stress
def test_worst_false_acceptance_is_below_seven_percent(tmp_path: Path) -> None:
    results = gate_simulation.run(SIZES, 1000, 1000)
    assert results.find_worst("before") > 0.5
    assert results.find_worst("gate") <= 0.07
    assert results.find_worst(gate_simulation.BOUND_ALONE) <= 0.07
    assert results.average_power("gate", 279) > 0.7
    assert results.reuse["10"]["with the correction"] <= 0.07
    facts = {"processor": "a", "cores": 1, "memory": 2**30, "python": "3", "command": "c", "commit": "d", "load": 0}
    gate_simulation_page.write_page(results, tmp_path / "page.md", {"trials": 1000, "samples": 1000, **facts})
    assert "**missed**" not in (tmp_path / "page.md").read_text()
