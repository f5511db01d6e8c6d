"""The simulation of the drift check: its counts, its mixtures, and its page, on few small windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks import drift_simulation, drift_simulation_page
from benchmarks.drift_simulation import Runs


def test_delays_and_false_alarms_are_counted_from_the_change() -> None:
    runs = Runs(17, 5, alarms=[3, 5, 6, 8, None])
    assert (runs.count_false_alarms(), runs.get_delays()) == (2, [1, 3])
    assert Runs(60, None, alarms=[None, 60]).count_false_alarms() == 1


def test_mixtures_have_the_share_of_their_window() -> None:
    clean, other = (drift_simulation.sample(np.full((3, 1), value)) for value in (0.0, 1.0))
    draw = drift_simulation.mix(clean, other, lambda window: 0.3 * window)
    generator = np.random.default_rng(0)
    assert draw(generator, 100, 0).mean() == 0
    assert abs(draw(generator, 4000, 1).mean() - 0.3) < 0.03


def test_page_has_missed_runs(tmp_path: Path) -> None:
    pool = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    clean, shifted = drift_simulation.sample(pool), drift_simulation.sample(pool + 3)
    drifted = drift_simulation.mix(clean, shifted, lambda window: float(window >= 1))
    results = {
        "none": drift_simulation.simulate(clean, lambda g, n, _: clean(g, n), Runs(2, None), 1, 50),
        "far, 10%": drift_simulation.simulate(clean, drifted, Runs(4, 1), 2, 50),
        "near, 10%": Runs(17, 5, alarms=[None]),
    }
    assert results["far, 10%"].get_delays() == [2, 2]
    machine = {"processor": "a", "cores": 2, "memory": 2**30, "python": "3", "load": 1.0, "commit": "c", "command": "d"}
    facts = {"texts": {"demo": 400}, "embedding_ms": 0.1, "seconds": 1.0, **machine}
    drift_simulation_page.write_page(results, tmp_path / "page.md", facts)
    page = (tmp_path / "page.md").read_text()
    assert "| near, 10% | 1 | 0% | 0% | 0% | – | 1 | 0 |" in page
    assert "met (2 of 2 runs)" in page
    assert (tmp_path / "images" / "benchmarks-drift.svg").exists()
