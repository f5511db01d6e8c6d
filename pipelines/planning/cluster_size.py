"""Size of a cluster that several models share: nodes, waiting times, storage and a bill of materials.

The training runs are those of `sizing`; `cluster_simulation` adds the queue and the shared storage.
"""

from __future__ import annotations

import bisect
import math
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from components.common.models import resource_formulas
from components.common.models.accelerators import Accelerator
from components.common.models.resource_formulas import BFLOAT16_BYTES, MAX_MEMORY_FRACTION
from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from pipelines.planning import sizing
from pipelines.planning.cluster_simulation import (
    QUEUES,
    Cluster,
    Job,
    Phase,
    SimulationResult,
    Stage,
    simulate,
)
from pipelines.planning.sizing import NODE_POWER_FACTOR, SizingRequest
from pipelines.planning.storage_nodes import choose_storage_cluster, find_storage_node
from pipelines.planning.storage_size import MODEL_LOAD_SECONDS, PREPARED_COPIES
from pipelines.planning.throughput import CASES

Json = dict[str, Any]
HOUR, WEEK = 3600.0, 7 * 24 * 3600.0
WEEKS_PER_MONTH = 365.25 / 12 / 7
SIMULATED_JOBS = 2000  # of the waiting times: years of customizations at the rate of the demand
CAPACITY_JOBS = 1000  # of the throughput, which varies less
CAPACITY_JOBS_PER_TEAM = 3  # at least: with fewer, many teams would have ended before the cluster is full
WARM_UP_SHARE = 0.1  # of the customizations, which start in an empty cluster
MAX_NODES = 512
SAMPLE_NODES = 16  # of larger clusters, whose capacity per node and share of the storage is the same within NOISE_SHARE
SAMPLE_TRAININGS = 4  # of the largest kind that the sample holds at the same time, at least
SATURATING_TEAMS_PER_GPU = 2  # one customization uses GPUs while another transfers its results
NOISE_SHARE = 0.03  # of the capacity: the order in which large and small training runs start changes it as much
BUSY_SHARE = 0.9  # of a rate or of the GPUs, above which they limit the throughput
DEMAND_PATTERN = re.compile(r"(\d{1,6})x(.+)")


@dataclass(frozen=True)
class ClusterRequest:
    """A cluster to size.

    Attributes:
        demand: customizations per month of each training run.
        nodes: nodes of the cluster. None: the smallest number that meets `max_wait_hours`.
        teams: teams that always have one customization in progress, for the capacity. 0: enough to use every GPU.
        max_wait_hours: limit of the time that 9 of 10 customizations wait for GPUs.
        queue: one of cluster_simulation.QUEUES.
        read_rate: bytes per second of the storage. None: what the training runs require.
        write_rate: bytes per second of the storage. None: what the training runs require.
        held_out_share: rows of the test split per training row, which the evaluation reads.
        storage_node: kind of the storage nodes. "": not chosen.
        storage_node_rate: measured bytes per second of a storage node. None: the line rate of its ports.
        seed: seed of the arrivals and durations.
    """

    demand: tuple[tuple[int, SizingRequest], ...]
    nodes: int | None = None
    teams: int = 0
    max_wait_hours: float = 24.0
    queue: str = QUEUES[0]
    read_rate: float | None = None
    write_rate: float | None = None
    held_out_share: float = 0.0
    storage_node: str = ""
    storage_node_rate: float | None = None
    seed: int = 42


@dataclass(frozen=True)
class Workload:
    """The customizations of one model: the request, its result, and what one of them reads and writes."""

    count: int
    request: SizingRequest
    size: Json
    evaluation_gpus: int
    evaluation_hours: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.request.architecture.name

    @property
    def gpus(self) -> int:
        """GPUs of one training run."""
        return int(self.size["gpus"])

    @property
    def weight_bytes(self) -> int:
        """Weights of the base model in 16 bits."""
        return self.request.architecture.parameters * BFLOAT16_BYTES

    @property
    def gpu_hours(self) -> float:
        """Mean GPU-hours of a customization, with durations drawn as in `draw_factor`."""
        training, evaluation = self.size["hours"], self.evaluation_hours
        return float(
            sum(training[case] * self.gpus + evaluation[case] * self.evaluation_gpus for case in CASES) / len(CASES)
        )


def parse_demands(texts: Sequence[str]) -> dict[str, int]:
    """Return the number of customizations per month by model, of texts COUNTxMODEL; those of one model are added.

    Raises:
        UsageError: a text has another form.
    """
    counts: dict[str, int] = {}
    for text in texts:
        match = DEMAND_PATTERN.fullmatch(text.strip())
        if match is None or int(match[1]) == 0:
            hint = "Specify customizations per month, such as 20x8b."
            raise UsageError(f"--demand {text!r} is not COUNTxMODEL", hint=hint)
        counts[match[2]] = counts.get(match[2], 0) + int(match[1])
    return counts


def size_cluster(request: ClusterRequest) -> Json:
    """Return the cluster for a demand, its waiting times and utilization, what limits it, and the bill of materials.

    Raises:
        UsageError: a training run has no time, needs more than the cluster's GPUs, or no cluster meets the demand.
    """
    if request.queue not in QUEUES:
        raise UsageError(
            f"--queue is {request.queue!r}; expected {' or '.join(QUEUES)}", hint=f"Use --queue {QUEUES[0]}."
        )
    if request.storage_node:
        find_storage_node(request.storage_node)
    workloads = [_measure_workload(count, training, request) for count, training in request.demand]
    device = workloads[0].request.device
    cluster, arrivals = _choose_cluster(request, workloads, device)
    result = simulate(cluster, arrivals)
    waits = _summarize(result, arrivals)
    sample, factor = _take_sample(request, workloads, cluster)
    capacity = {case: factor * _measure_capacity(request, workloads, sample, factor, case)[0] for case in CASES}
    drawn, saturated = _measure_capacity(request, workloads, sample, factor)
    demand = sum(workload.count for workload in workloads) / WEEKS_PER_MONTH
    return {
        "demand": [_describe_workload(workload) for workload in workloads],
        "gpu": device.name,
        "nodes": len(cluster.nodes),
        "gpus": cluster.gpus,
        "queue": request.queue,
        "teams": request.teams,
        "seed": request.seed,
        "customizations_per_week": {
            "demand": _round(demand),
            "completed": _round(waits["completed_per_week"]),
            "capacity": {**{case: _round(value) for case, value in capacity.items()}, "drawn": _round(factor * drawn)},
        },
        "keeps_up": _keeps_up(waits, workloads, cluster),
        "wait_hours": {name: _round(waits[name] / HOUR) for name in ("mean", "p50", "p90", "p99")},
        "utilization": _measure_utilization(result, cluster),
        "utilization_at_capacity": _measure_utilization(saturated, sample),
        "transfer_share": _round(waits["transfer_share"]),
        "binds": _find_bound(request, _measure_utilization(saturated, sample)),
        "rates": {"read": round(cluster.read_rate), "write": round(cluster.write_rate)},
        "gains": _list_gains(request, workloads, cluster, drawn, waits["p90"]),
        "bill_of_materials": _list_materials(request, workloads, cluster, result, waits),
        "usable_gib_per_gpu": workloads[0].size["usable_gib_per_gpu"],
        "formulas": _list_formulas(workloads),
        "assumptions": _list_assumptions(workloads, sample, factor),
    }


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _measure_workload(count: int, training: SizingRequest, request: ClusterRequest) -> Workload:
    size = sizing.size(training)
    if size["hours"] is None:
        raise UsageError(
            f"--demand {count}x{training.architecture.name} requires the amount of data",
            hint="Add --tokens, --dataset, or --rows and --mean-length.",
        )
    weights = training.architecture.parameters * BFLOAT16_BYTES
    capacity = MAX_MEMORY_FRACTION * (training.device.memory_bytes or math.inf)
    gpus = 2 ** max(0, math.ceil(math.log2(weights / capacity)))
    # Candidate and base read the held-out rows: two forward passes, at the rate of the training.
    forward = resource_formulas.estimate_forward_flops(training.shape, training.row_tokens)
    trained = resource_formulas.estimate_training_flops(training.shape, training.row_tokens)
    share = request.held_out_share * 2 * forward / trained / training.epochs
    hours = {case: value * share * size["gpus"] / gpus for case, value in size["hours"].items()}
    return Workload(count, training, size, gpus, hours)


def _describe_workload(workload: Workload) -> Json:
    size = workload.size
    return {
        "model": workload.name,
        "per_month": workload.count,
        "gpus": workload.gpus,
        "memory_gib_per_gpu": size["memory_gib_per_gpu"],
        "memory": size["memory"],
        "hours": size["hours"],
        "gpu_hours": size["gpu_hours"],
        "evaluation_gpus": workload.evaluation_gpus,
        "binds": size["binds"],
    }


def _build_job(workload: Workload, hours: Callable[[Mapping[str, float]], float], arrival: float) -> Job:
    """Return a customization: each stage reads its input and writes its result on the shared storage."""
    training, size = workload.request, workload.size
    raw, weights = training.storage.raw_bytes, workload.weight_bytes
    nodes = math.ceil(workload.gpus / training.device.node)
    seconds, interval = hours(size["hours"]) * HOUR, training.storage.checkpoint_minutes * 60
    checkpoint = size["storage"]["checkpoint_bytes"]
    phases = [Phase("read", weights * nodes)]  # the processes of a node share its page cache
    while seconds > interval:
        phases += [Phase("compute", interval), Phase("write", checkpoint)]
        seconds -= interval
    model = resource_formulas.estimate_model_bytes(training.shape, whole=training.adapter is None)
    phases += [Phase("compute", seconds), Phase("write", model)]
    curation = (Phase("read", raw), Phase("write", raw * PREPARED_COPIES)) if raw else ()
    evaluation = (Phase("read", weights), Phase("compute", hours(workload.evaluation_hours) * HOUR))
    return Job(
        workload.name,
        (
            Stage("data_curation", 0, curation),
            Stage("fine_tuning", workload.gpus, tuple(phases)),
            Stage("evaluation", workload.evaluation_gpus, evaluation),
            Stage("triton_packaging", 0, (Phase("read", weights), Phase("write", weights))),
        ),
        arrival,
    )


def _draw_jobs(
    request: ClusterRequest, workloads: Sequence[Workload], case: str = "drawn", count: int | None = None
) -> list[Job]:
    """Return customizations with Poisson arrivals; each has one place between the best and the slowest case.

    Durations have a triangular distribution: low, typical and best are its ends and its mode. The number of random
    numbers per customization is fixed, so that the same seed gives the same customizations on every cluster.
    """
    generator = random.Random(request.seed)  # noqa: S311 - a simulation
    counts = [workload.count for workload in workloads]
    rate = sum(counts) / WEEKS_PER_MONTH / WEEK
    jobs, time = [], 0.0
    for _ in range(count or SIMULATED_JOBS):
        time += generator.expovariate(rate)
        (workload,) = generator.choices(workloads, counts)
        place = generator.random()
        choose = partial(_invert_triangle, place=place) if case == "drawn" else itemgetter(case)
        jobs.append(_build_job(workload, choose, time))
    return jobs


def _invert_triangle(hours: Mapping[str, float], place: float) -> float:
    """Return the hours below which a share `place` of a triangular distribution lies."""
    shortest, mode, longest = hours["best"], hours["typical"], hours["low"]
    if longest <= shortest:
        return mode
    share = (mode - shortest) / (longest - shortest)
    if place < share:
        return shortest + math.sqrt(place * (longest - shortest) * (mode - shortest))
    return longest - math.sqrt((1 - place) * (longest - shortest) * (longest - mode))


def _require_rates(request: ClusterRequest, workloads: Sequence[Workload]) -> tuple[float, float]:
    """Return the read and write rate: those given, or what the largest customization requires."""
    loading = max(
        workload.weight_bytes * math.ceil(workload.gpus / workload.request.device.node) for workload in workloads
    )
    writing = max(workload.size["storage"]["write_bytes_per_second"] for workload in workloads)
    published = max(workload.weight_bytes for workload in workloads)
    read = request.read_rate or loading / MODEL_LOAD_SECONDS
    return read, request.write_rate or max(writing, published / MODEL_LOAD_SECONDS)


def measure_nodes(request: ClusterRequest, numbers: int) -> list[Json]:
    """Return waiting times in hours and the capacity per week for the smallest node counts that keep up."""
    workloads = [_measure_workload(count, training, request) for count, training in request.demand]
    device, least, rates = (
        workloads[0].request.device,
        _count_least_nodes(workloads),
        _require_rates(request, workloads),
    )
    arrivals, measured = _draw_jobs(request, workloads), []
    for nodes in range(least, least + numbers):
        cluster = Cluster((device.node,) * nodes, *rates, queue=request.queue)
        waits = _summarize(simulate(cluster, arrivals), arrivals)
        sample, factor = _take_sample(request, workloads, cluster)
        capacity = {case: factor * _measure_capacity(request, workloads, sample, factor, case)[0] for case in CASES}
        measured.append({"nodes": nodes, **{name: waits[name] / HOUR for name in ("p50", "p90")}, **capacity})
    return measured


def _count_least_nodes(workloads: Sequence[Workload]) -> int:
    """Return the number of nodes below which a training run does not fit, or the queue grows without limit."""
    node = workloads[0].request.device.node
    largest = max(max(workload.gpus, workload.evaluation_gpus) for workload in workloads)
    load = sum(workload.count * workload.gpu_hours for workload in workloads) / WEEKS_PER_MONTH / (WEEK / HOUR)
    return max(math.ceil(largest / node), math.ceil(load / node), 1)


def _choose_cluster(
    request: ClusterRequest, workloads: Sequence[Workload], device: Accelerator
) -> tuple[Cluster, list[Job]]:
    """Return the smallest cluster whose waiting time meets the limit, and the customizations that arrive."""
    read, write = _require_rates(request, workloads)
    arrivals = _draw_jobs(request, workloads)
    largest = max(max(workload.gpus, workload.evaluation_gpus) for workload in workloads)
    least = _count_least_nodes(workloads)
    if request.nodes is not None:
        if request.nodes < math.ceil(largest / device.node):
            raise UsageError(
                f"--nodes {request.nodes}: a training run needs {largest} GPUs, but a node has {device.node}",
                hint=f"Use --nodes {math.ceil(largest / device.node)} or more.",
            )
        return Cluster((device.node,) * request.nodes, read, write, queue=request.queue), arrivals

    def is_enough(nodes: int) -> bool:
        cluster = Cluster((device.node,) * nodes, read, write, queue=request.queue)
        waits = _summarize(simulate(cluster, arrivals), arrivals)
        return waits["p90"] <= request.max_wait_hours * HOUR and _keeps_up(waits, workloads, cluster)

    too_small, nodes = least - 1, least
    while nodes <= MAX_NODES and not is_enough(nodes):
        too_small, nodes = nodes, nodes + 2 * (nodes - too_small)
    candidates = range(too_small + 1, min(nodes, MAX_NODES) + 1)
    found = bisect.bisect_left(candidates, True, key=is_enough)
    if found < len(candidates):
        return Cluster((device.node,) * candidates[found], read, write, queue=request.queue), arrivals
    raise UsageError(
        f"no cluster of up to {MAX_NODES} nodes meets the demand with a P90 wait of at most {request.max_wait_hours:g} hours",
        hint="Lower --demand, or raise --max-wait-hours, --read-rate or --write-rate.",
    )


def _keeps_up(waits: Mapping[str, float], workloads: Sequence[Workload], cluster: Cluster) -> bool:
    """Return whether the GPUs that the demand holds on average exist; otherwise the queue grows without limit."""
    per_second = sum(workload.count for workload in workloads) / WEEKS_PER_MONTH / WEEK
    return waits["gpu_seconds"] * per_second <= cluster.gpus


def _summarize(result: SimulationResult, jobs: Sequence[Job]) -> dict[str, float]:
    """Return waiting times, GPU-seconds and shares per customization without the warm-up, and those that ended per week."""
    records = result.records[round(WARM_UP_SHARE * len(jobs)) :]
    waits = sorted(record.wait for record in records)
    span = max(record.finish for record in records) - records[0].arrival
    return {
        "mean": statistics.fmean(waits),
        "p50": _pick(waits, 0.5),
        "p90": _pick(waits, 0.9),
        "p99": _pick(waits, 0.99),
        "completed_per_week": len(records) / span * WEEK,
        "gpu_seconds": statistics.fmean(record.gpu_seconds for record in records),
        "transfer_share": sum(record.gpu_transfer_seconds for record in records)
        / sum(record.gpu_seconds for record in records),
    }


def _pick(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values: the smallest value that a share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _take_sample(request: ClusterRequest, workloads: Sequence[Workload], cluster: Cluster) -> tuple[Cluster, float]:
    """Return a part of a large cluster with its share of the storage, and the number of such parts.

    The customizations that keep a cluster busy grow with its GPUs, and the time of their simulation with them.
    """
    largest = max(math.ceil(workload.gpus / workload.request.device.node) for workload in workloads)
    nodes = max(SAMPLE_NODES, SAMPLE_TRAININGS * largest)
    if request.teams or len(cluster.nodes) <= nodes:
        return cluster, 1.0
    factor = len(cluster.nodes) / nodes
    read, write = cluster.read_rate / factor, cluster.write_rate / factor
    return replace(cluster, nodes=cluster.nodes[:nodes], read_rate=read, write_rate=write), factor


def _measure_capacity(
    request: ClusterRequest, workloads: Sequence[Workload], cluster: Cluster, factor: float, case: str = "drawn"
) -> tuple[float, SimulationResult]:
    """Return customizations per week while every team always has one in progress, and the simulation.

    An unfinished customization counts with the share of its GPU-seconds that it has had. Otherwise the few large ones
    that happen to be unfinished would hide what a change of the cluster gains.

    Args:
        request: the demand.
        workloads: the customizations of each model.
        cluster: a cluster, or the sample of a large one.
        factor: the number of samples in the whole: each has its share of the customizations, so that the start, when all
            teams read at the same time, weighs as much as in the whole.
        case: one of CASES, or "drawn" for a mixture.
    """
    teams = request.teams or SATURATING_TEAMS_PER_GPU * cluster.gpus
    jobs = _draw_jobs(request, workloads, case, max(round(CAPACITY_JOBS / factor), CAPACITY_JOBS_PER_TEAM * teams))
    result = simulate(cluster, jobs, teams)
    done = 0.0
    for job, record in zip(jobs, result.records, strict=False):
        alone = sum(stage.gpus * _measure_alone(stage, cluster) for stage in job.stages)
        done += min(1.0, record.gpu_seconds / alone) if math.isnan(record.finish) else 1.0
    return done / result.end * WEEK, result


def _measure_alone(stage: Stage, cluster: Cluster) -> float:
    """Return the seconds of a stage that has the storage for itself."""
    rates = {"compute": 1.0, "read": cluster.read_rate, "write": cluster.write_rate}
    return sum(phase.amount / rates[phase.kind] for phase in stage.phases)


def _measure_utilization(result: SimulationResult, cluster: Cluster) -> dict[str, float]:
    """Return the share of the time that GPUs are held, and of the rates of the storage that is used."""
    return {
        "gpus": _round(sum(record.gpu_seconds for record in result.records) / (cluster.gpus * result.end)),
        "read": _round(result.read_bytes / (cluster.read_rate * result.end)),
        "write": _round(result.write_bytes / (cluster.write_rate * result.end)),
    }


def _find_bound(request: ClusterRequest, shares: Mapping[str, float]) -> dict[str, str]:
    """Return what limits the capacity: the storage's rates, the GPUs, or the number of teams."""
    for name, title in (("write", "write rate"), ("read", "read rate")):
        if shares[name] >= BUSY_SHARE:
            return {"bound": title, "reason": f"{shares[name]:.0%} of the {title} of the storage is in use"}
    if request.teams and shares["gpus"] < BUSY_SHARE:
        return {
            "bound": "teams",
            "reason": f"{request.teams} teams keep only {shares['gpus']:.0%} of the GPUs allocated",
        }
    return {"bound": "GPUs", "reason": f"{shares['gpus']:.0%} of the GPUs are allocated"}


def _list_gains(
    request: ClusterRequest, workloads: Sequence[Workload], cluster: Cluster, capacity: float, wait: float
) -> list[Json]:
    """Return what one more GPU, one more node, and one more GB/s change, with the same customizations.

    Args:
        capacity: customizations per week of the sample.
        wait: seconds that 9 of 10 customizations wait at most.
    """
    sample, factor = _take_sample(request, workloads, cluster)
    # the number of teams stays that of the cluster, so that only one thing changes
    teams = request.teams or SATURATING_TEAMS_PER_GPU * sample.gpus
    part = 1e9 / factor  # of a GB/s, for the sample
    changes = {  # the cluster and the sample after the change, and the gain of the cluster by that of the sample
        "one more GPU": (replace(cluster, nodes=(*cluster.nodes, 1)), replace(sample, nodes=(*sample.nodes, 1)), 1.0),
        "one more node": (
            replace(cluster, nodes=(*cluster.nodes, cluster.nodes[0])),
            replace(sample, nodes=(*sample.nodes, sample.nodes[0])),
            1.0,
        ),
        "1 GB/s more read bandwidth": (
            replace(cluster, read_rate=cluster.read_rate + 1e9),
            replace(sample, read_rate=sample.read_rate + part),
            factor,
        ),
        "1 GB/s more write bandwidth": (
            replace(cluster, write_rate=cluster.write_rate + 1e9),
            replace(sample, write_rate=sample.write_rate + part),
            factor,
        ),
    }
    arrivals, gains = _draw_jobs(request, workloads), []
    for change, (changed, changed_sample, weight) in changes.items():
        rate, _ = _measure_capacity(replace(request, teams=teams), workloads, changed_sample, factor)
        gain = weight * (rate - capacity)
        shorter = _summarize(simulate(changed, arrivals), arrivals)["p90"] if wait else 0.0
        gains.append(
            {
                "change": change,
                "customizations_per_week": _round(gain),
                "is_noise": abs(gain) < NOISE_SHARE * capacity * factor,
                "p90_wait_hours": _round((shorter - wait) / HOUR),
            }
        )
    return gains


def _list_materials(
    request: ClusterRequest,
    workloads: Sequence[Workload],
    cluster: Cluster,
    result: SimulationResult,
    waits: Mapping[str, float],
) -> list[Json]:
    """Return the items to buy or reserve, with quantity, unit and reason."""
    device, largest = workloads[0].request.device, max(workloads, key=lambda workload: workload.gpus)
    wait, share = waits["p90"] / HOUR, _measure_utilization(result, cluster)["gpus"]
    decided = (
        f"training {largest.name} needs {format_count(largest.gpus, 'GPU')} at the same time"
        if request.nodes is None and largest.gpus > (len(cluster.nodes) - 1) * device.node
        else "as given"
        if request.nodes is not None
        else f"with one node fewer, the P90 wait would exceed {request.max_wait_hours:g} hours"
    )
    parts = {
        "datasets": sum(w.count * w.size["storage"]["parts"]["datasets"] for w in workloads),
        "published models": sum(w.count * w.size["storage"]["parts"]["models"] for w in workloads),
        "base models": sum(w.weight_bytes for w in workloads),
        "checkpoints": sum(result.peak.get(w.name, 0) * w.size["storage"]["parts"]["checkpoints"] for w in workloads),
    }
    capacity = sum(parts.values())
    reason = ", ".join(f"{name} {size / 1e12:,.2f}" for name, size in parts.items())
    materials = [
        _item(f"nodes with {device.node} × {device.name}", len(cluster.nodes), "",
              f"{decided}; on average, {share:.0%} of the GPUs are allocated; P90 wait {wait:,.1f} hours"),
        _item("host memory of a GPU node", _count_host_memory(workloads, device), "GiB",
              "for the training processes that load the weights, and for packaging, which merges an adapter in float32 and starts a server"),
        _item("network of a GPU node", max(w.weight_bytes for w in workloads) / MODEL_LOAD_SECONDS * 8 / 1e9, "Gbit/s",
              f"to read the largest base model in {MODEL_LOAD_SECONDS / 60:g} minutes; traffic between GPUs of different nodes is not included"),
        _item("usable storage", capacity / 1e12, "TB", reason),
        _item("storage, read", cluster.read_rate / 1e9, "GB/s",
              "as given" if request.read_rate else f"a single training run reads its base model in {MODEL_LOAD_SECONDS / 60:g} minutes; "
              f"allocated GPUs spend {waits['transfer_share']:.1%} of the time waiting for storage"),
        _item("storage, write", cluster.write_rate / 1e9, "GB/s",
              "as given" if request.write_rate else "a single training run writes checkpoints within the stall budget, and a model in "
              f"{MODEL_LOAD_SECONDS / 60:g} minutes"),
    ]  # fmt: skip
    if request.storage_node:
        node = find_storage_node(request.storage_node)
        rate = cluster.read_rate + cluster.write_rate
        chosen = choose_storage_cluster(node, capacity, rate, request.storage_node_rate)
        measured = "" if request.storage_node_rate else "; the port rate is an upper limit: set --storage-node-rate"
        materials.append(
            _item(f"PowerScale {node.name.upper()} nodes with {node.drives} × {chosen.drive_tb:g} TB", chosen.nodes, "",
                  f"{chosen.bound}: {chosen.usable_bytes / 1e12:,.1f} TB usable with protection +2d:1n and 10% free{measured}")
        )  # fmt: skip
    if device.watts:
        kilowatts = NODE_POWER_FACTOR * cluster.gpus * device.watts / 1000
        materials.append(
            _item("power of the GPU nodes", kilowatts, "kW", f"{NODE_POWER_FACTOR:g} × GPUs × design power, all busy")
        )
    hours = {case: sum(w.count * w.size["gpu_hours"][case] for w in workloads) for case in CASES}
    text = " – ".join(f"{hours[case]:,.0f} {case}" for case in CASES)
    price = workloads[0].request.gpu_hour_price
    cost = "" if price is None else f"; at {price:g} per GPU-hour: {hours['typical'] * price:,.0f} typical"
    return [*materials, _item("GPU-hours of training", hours["typical"], "per month", f"{text}{cost}")]


def _item(item: str, quantity: float, unit: str, reason: str) -> Json:
    return {"item": item, "quantity": _round(quantity), "unit": unit, "reason": reason}


def _count_host_memory(workloads: Sequence[Workload], device: Accelerator) -> float:
    """Return the host memory in GiB that the training runs of a full node need, or the packaging of the largest model."""
    needed = []
    for workload in workloads:
        local = min(workload.gpus, device.node)
        loading = resource_formulas.estimate_loading_memory(
            workload.request.shape,
            processes=local,
            sharded=workload.size["layout"]["zero_stage"] == 3,
            full=workload.request.adapter is None,
        )
        needed += [
            loading * (device.node // local),
            resource_formulas.estimate_packaging_memory(workload.request.shape, proven=True),
        ]
    return max(needed) / MAX_MEMORY_FRACTION / sizing.GIB


def _list_formulas(workloads: Sequence[Workload]) -> list[Json]:
    """Return formula and source of the training runs' figures, and how the simulation finds those of the cluster."""
    formulas = [formula for workload in workloads for formula in workload.size["formulas"]]
    source = "discrete-event simulation; see docs/reference/cluster-emulation.md"
    return [
        *(formula for n, formula in enumerate(formulas) if formula not in formulas[:n]),
        {"quantity": "waiting time", "formula": f"{SIMULATED_JOBS:,} customizations in one queue; a stage starts when all its GPUs are free",
         "source": source},
        {"quantity": "capacity", "formula": "customizations per week while each team always has one in progress", "source": source},
        {"quantity": "usable storage", "formula": "datasets, models and base models of all customizations of a month; "
         "checkpoints of those that train concurrently", "source": "docs/how-to/sizing.md"},
    ]  # fmt: skip


def _list_assumptions(workloads: Sequence[Workload], sample: Cluster, factor: float) -> list[str]:
    """Return a sentence for each fact that the simulation takes for granted."""
    assumptions = [
        "customizations arrive at random (Poisson) with the same mean over the whole month",
        "durations follow a triangular distribution from the best to the low case, with the typical case as its mode",
        "each customization of a month is a separate model with its own data, and its versions are kept",
        "concurrent transfers share the storage bandwidth equally, and GPUs wait for them",
        "curation takes the time of its reads and writes, and evaluation reads held-out rows without generating answers",
        "GPUs, nodes and runs do not fail",
    ]
    if factor > 1:
        assumptions.append(
            f"the capacity is {factor:.3g} times that of {format_count(len(sample.nodes), 'node')} "
            "with a proportional share of the storage"
        )
    others = {text for workload in workloads for text in workload.size["assumptions"]}
    return assumptions + sorted(others)
