"""The emulation of a shared cluster: small runs of real processes agree with the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster_emulation import MIB, Scenario, compute_errors, draw_jobs, emulate, predict, write_page
from pipelines.planning.cluster_simulation import Cluster

FEW = draw_jobs(3, seed=1, gpus=(2,), seconds=(0.2, 0.3), mebibytes=0.5)


def test_emulated_customizations_run_and_wait_as_simulated(tmp_path: Path) -> None:
    scenario = Scenario("queue", Cluster((2,), 50 * MIB, 50 * MIB), FEW)  # all arrive at once, for the same two GPUs
    measured, predicted = emulate(scenario, tmp_path), predict(scenario)
    assert measured.mean_wait >= predicted.mean_wait * 0.9  # a sleep may last longer, never shorter
    assert predicted.throughput >= measured.throughput * 0.9
    assert 0 < measured.gpu_share <= 1
    assert (tmp_path / "checkpoint-0").stat().st_size == MIB // 2


def test_throttle_limits_the_transfers_of_all_processes(tmp_path: Path) -> None:
    scenario = Scenario("storage", Cluster((6,), 50 * MIB, 4 * MIB), FEW)
    measured = emulate(scenario, tmp_path)
    seconds = len(FEW) / (measured.throughput / 60)
    assert 3 * 2 * 0.5 * MIB / seconds <= 4.2 * MIB  # three customizations write half a mebibyte twice


def test_page_lists_misses() -> None:
    scenario = Scenario("queue", Cluster((2,), 50 * MIB, 50 * MIB), FEW)
    predicted = predict(scenario)
    other = predict(Scenario("queue", Cluster((4,), 50 * MIB, 50 * MIB), FEW))
    assert abs(compute_errors(other, predicted)["throughput"] or 0) > 0.05
    page = write_page([(scenario, other, predicted)])
    assert "missed in 1 of 1 scenarios | **missed**" in page
    assert write_page([(scenario, predicted, predicted)]).count("| met |") == 2


@pytest.mark.parametrize("count", [1, 5])
def test_customizations_are_those_of_the_seed(count: int) -> None:
    assert draw_jobs(count, 2, (1, 2), (1.0, 2.0), 1.0) == draw_jobs(5, 2, (1, 2), (1.0, 2.0), 1.0)[:count]
