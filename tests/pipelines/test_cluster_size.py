"""The simulation of a shared cluster obeys the laws of queues; `tuneline size --demand` chooses nodes and materials."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import TunelineError
from pipelines.planning import cluster_report, cluster_size
from pipelines.planning.cluster_simulation import Cluster, Job, Phase, SharedRate, SimulationResult, Stage, simulate
from pipelines.planning.storage_nodes import choose_storage_cluster, load_storage_nodes
from tests.pipelines.command import run_in_process
from tests.pipelines.test_sizing import size

DATA = ("--rows", 50_000, "--mean-length", 600)
DEMAND = ("--demand", "20xllama-3.1-8b", "--demand", "2xllama-3.1-70b", "--gpu", "h200", *DATA)


@pytest.fixture(autouse=True)
def few_customizations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate fewer customizations than the command does."""
    monkeypatch.setattr(cluster_size, "SIMULATED_JOBS", 200)
    monkeypatch.setattr(cluster_size, "CAPACITY_JOBS", 60)


def build_job(gpus: int = 1, seconds: float = 10.0, size: float = 100.0, arrival: float = 0.0) -> Job:
    phases = (Phase("read", size), Phase("compute", seconds), Phase("write", size), Phase("compute", seconds))
    return Job(f"{gpus} GPUs", (Stage("train", gpus, phases), Stage("package", 0, (Phase("write", size),))), arrival)


def draw_jobs(count: int, seed: int = 1, gap: float = 8.0) -> list[Job]:
    generator, time, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        time += generator.expovariate(1 / gap)
        jobs.append(build_job(generator.choice((1, 2, 4)), generator.uniform(1, 20), generator.uniform(10, 90), time))
    return jobs


def mean_wait(result: SimulationResult) -> float:
    return sum(record.wait for record in result.records) / len(result.records)


def test_one_team_without_contention_takes_the_serial_time() -> None:
    cluster = Cluster((2,), read_rate=50, write_rate=25)
    result = simulate(cluster, [build_job() for _ in range(5)], teams=1)
    one = 100 / 50 + 10 + 100 / 25 + 10 + 100 / 25
    assert result.end == pytest.approx(5 * one)
    assert [record.wait for record in result.records] == [0] * 5


def test_customizations_for_all_gpus_run_one_after_the_other() -> None:
    result = simulate(Cluster((4,), math.inf, math.inf), [build_job(4, size=0) for _ in range(3)])
    assert [record.wait for record in result.records] == pytest.approx([0, 20, 40])
    assert result.peak == {"4 GPUs": 1}


def test_transfers_share_the_rate_and_conserve_bytes() -> None:
    pool = SharedRate(rate=10, client_rate=math.inf)
    pool.start(0, 100, job=0)
    pool.start(5, 20, job=1)  # 50 bytes left for job 0, then 5 bytes per second each
    assert pool.get_next_end() == pytest.approx(9)
    assert pool.end(9) == 1
    assert pool.get_next_end() == pytest.approx(12)
    assert pool.end(12) == 0
    assert pool.delivered == pytest.approx(120)


def test_one_client_does_not_exceed_its_own_rate() -> None:
    pool = SharedRate(rate=10, client_rate=2)
    pool.start(0, 10, job=0)
    assert pool.get_next_end() == pytest.approx(5)


@pytest.mark.parametrize("queue", ["BestEffortFIFO", "StrictFIFO"])
def test_laws_of_queues_hold(queue: str) -> None:
    jobs = draw_jobs(150)
    cluster = Cluster((4, 4), read_rate=30, write_rate=20, queue=queue)
    result = simulate(cluster, jobs)
    time_in_system = [record.finish - record.arrival for record in result.records]
    assert result.in_system_seconds == pytest.approx(sum(time_in_system))  # Little's law over a whole busy time
    written = sum(
        phase.amount for job in jobs for stage in job.stages for phase in stage.phases if phase.kind == "write"
    )
    assert result.write_bytes == pytest.approx(written)
    assert result.write_bytes <= cluster.write_rate * result.end
    assert 0 < sum(record.gpu_seconds for record in result.records) <= cluster.gpus * result.end
    for record in result.records:
        assert record.wait >= 0


def test_more_gpus_and_faster_storage_shorten_the_wait() -> None:
    jobs = draw_jobs(150, gap=6.0)
    waits = [mean_wait(simulate(Cluster((4,) * nodes, 30, 30), jobs)) for nodes in (2, 3, 4, 8)]
    assert all(fewer > more for fewer, more in pairwise(waits))
    rates = [mean_wait(simulate(Cluster((4, 4), rate, rate), jobs)) for rate in (15, 30, 300)]
    assert all(slow > fast for slow, fast in pairwise(rates))


def test_best_effort_queue_fills_gaps_that_a_strict_queue_leaves() -> None:
    jobs = [build_job(3, size=0), build_job(4, size=0, arrival=1), build_job(1, size=0, arrival=2)]
    best, strict = (simulate(Cluster((4,), 1, 1, queue=queue), jobs) for queue in ("BestEffortFIFO", "StrictFIFO"))
    assert [record.wait for record in best.records] == pytest.approx([0, 21, 0])  # the third overtakes the second
    assert [record.wait for record in strict.records] == pytest.approx([0, 19, 38])


def test_training_on_several_nodes_needs_whole_nodes() -> None:
    jobs = [build_job(1, size=0), build_job(8, size=0, arrival=1)]
    result = simulate(Cluster((4, 4), 1, 1), jobs)
    assert result.records[1].wait == pytest.approx(19)
    with pytest.raises(ValueError, match="a stage needs 9 GPUs"):
        simulate(Cluster((4, 4), 1, 1), [build_job(9)])


def test_storage_cluster_holds_capacity_and_rate() -> None:
    node = load_storage_nodes()["f210"]
    small = choose_storage_cluster(node, 10e12, 1e9, None)
    assert (small.nodes, small.drive_tb, small.bound) == (3, 1.92, "smallest supported cluster")
    assert small.usable_bytes == pytest.approx(0.9 * 3 * 4 * 1.92e12 * 2 / 3)
    assert choose_storage_cluster(node, 10e12, 12e9, 2e9).nodes == 6
    large = choose_storage_cluster(node, 500e12, 1e9, None)
    assert (large.drive_tb, large.bound) == (15.36, "capacity")


def test_demand_gives_nodes_waits_and_materials_with_reasons() -> None:
    result = size(*DEMAND, "--raw", "50GB", "--storage-node", "f210", "--gpu-hour-price", 3)
    materials = {item["item"]: item for item in result["bill_of_materials"]}
    assert result["customizations_per_week"]["demand"] == pytest.approx(22 / 4.348, rel=0.01)
    assert result["nodes"] == materials["nodes with 8 × h200"]["quantity"] == 1
    datasets, models = 22 * 50e9 * 7, 3 * 2 * (20 * 8.03e9 + 2 * 70.55e9)
    assert materials["usable storage"]["quantity"] == pytest.approx((datasets + models) / 1e12, rel=0.03)
    assert materials["PowerScale F210 nodes with 4 × 1.92 TB"]["quantity"] == 3
    assert all(item["reason"] for item in result["bill_of_materials"])
    capacity = result["customizations_per_week"]["capacity"]
    assert capacity["low"] < capacity["drawn"] < capacity["best"]
    assert result["binds"]["bound"] == "GPUs"
    assert size(*DEMAND, "--raw", "50GB", "--storage-node", "f210", "--gpu-hour-price", 3) == result


def test_slow_storage_and_few_teams_limit_the_capacity() -> None:
    one = size(*DEMAND, "--teams", 1)
    assert one["binds"]["bound"] == "teams"
    slow = size(*DEMAND, "--read-rate", "10MB", "--nodes", 1)
    assert slow["binds"]["bound"] == "read rate"
    gains = {gain["change"]: gain["customizations_per_week"] for gain in slow["gains"]}
    assert gains["1 GB/s more read bandwidth"] > gains["one more node"]


def test_capacity_grows_with_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_size, "CAPACITY_JOBS", 20)  # less than the GPUs of the larger cluster
    fast_storage = ("--read-rate", "1TB", "--write-rate", "1TB")
    small, large = (
        size("--demand", "8x8b", "--gpu", "h200", "--nodes", nodes, *fast_storage, *DATA) for nodes in (1, 5)
    )
    rates = [result["customizations_per_week"]["capacity"]["drawn"] for result in (small, large)]
    assert rates[1] == pytest.approx(5 * rates[0], rel=0.15)


def test_demands_of_one_model_are_added() -> None:
    split = size("--demand", "12x8b", "--demand", "8x8b", "--gpu", "h200", *DATA)
    assert split == size("--demand", "20x8b", "--gpu", "h200", *DATA)


@pytest.mark.parametrize("rates", [(), ("--read-rate", "20GB", "--write-rate", "10GB")])
def test_sample_of_a_large_cluster_has_the_capacity_and_gains_of_the_whole(
    rates: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default rates, the storage limits the capacity; with these, the GPUs."""
    monkeypatch.setattr(cluster_size, "SAMPLE_NODES", 4)
    monkeypatch.setattr(cluster_size, "SIMULATED_JOBS", 100)
    arguments = ("--demand", "20x8b", "--gpu", "h200", "--nodes", 12, *DATA, *rates)
    sampled = size(*arguments)
    monkeypatch.setattr(cluster_size, "SAMPLE_NODES", 12)
    whole = size(*arguments)
    for case, expected in whole["customizations_per_week"]["capacity"].items():
        assert sampled["customizations_per_week"]["capacity"][case] == pytest.approx(expected, rel=0.03)
    assert sampled["binds"]["bound"] == whole["binds"]["bound"] == ("GPUs" if rates else "read rate")
    noise = cluster_size.NOISE_SHARE * whole["customizations_per_week"]["capacity"]["drawn"]
    for found, wanted in zip(sampled["gains"], whole["gains"], strict=True):
        gain = wanted["customizations_per_week"]
        assert found["customizations_per_week"] == pytest.approx(gain, rel=0.1, abs=2 * noise)
    assert "the capacity is 3 times that of 4 nodes with a proportional share of the storage" in sampled["assumptions"]


def test_longer_waits_need_fewer_nodes() -> None:
    busy = ("--demand", "4000x8b", "--gpu", "h200", *DATA)
    patient, hasty = (size(*busy, "--max-wait-hours", hours) for hours in (24, 0))
    assert patient["nodes"] < hasty["nodes"]
    assert patient["keeps_up"]
    assert not size(*busy, "--nodes", 1)["keeps_up"]
    assert hasty["wait_hours"]["p90"] == 0 < patient["wait_hours"]["p90"] <= 24


def test_report_has_plots_and_text_the_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_report, "PLOTTED_NODES", 2)
    arguments = ("size", *map(str, DEMAND), "--report", "cluster.html")
    text = run_in_process(*arguments, cwd=tmp_path).stdout
    page = (tmp_path / "cluster.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3  # utilization, memory and capacity; nobody waits
    assert all(f"<h2>{heading}</h2>" in page for heading in ("Bill of materials", "Waiting time", "Gains", "Formulas"))
    assert "do not wait for GPUs" in page
    assert "materials nodes with 8 × h200: 1; training llama-3.1-70b needs 2 GPUs" in text


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--demand", "8b"), "--demand '8b' is not COUNTxMODEL", "20x8b"),
        (("--demand", "2x8b"), "--demand 2x8b parameters requires the amount of data", "--tokens"),
        (("--demand", "2x8b", "--model", "8b", *DATA), "--demand and --model cannot be combined", "COUNTxMODEL"),
        (("--model", "8b", "--storage-node", "f210", *DATA), "--storage-node requires --demand", "20x8b"),
        (
            ("--demand", "2x8b", "--queue", "LIFO", *DATA),
            "--queue is 'LIFO'; expected BestEffortFIFO or StrictFIFO",
            "BestEffortFIFO",
        ),
        (("--demand", "2x8b", "--storage-node", "f900", *DATA), "--storage-node 'f900' is not a known", "f210"),
        (("--demand", "2x8b", "--gpu", "h200:16", "--nodes", 1, *DATA), "a training run needs 16 GPUs", "--nodes 2"),
    ],
)
def test_wrong_input_is_refused(arguments: tuple[Any, ...], message: str, hint: str) -> None:
    with pytest.raises(TunelineError) as error:
        size(*arguments)
    assert message in error.value.message
    assert hint in error.value.hint
