"""Discrete-event simulation of customizations that share GPUs and storage.

A customization is a sequence of stages. A stage waits in one queue until all its GPUs are free at the same time (gang
scheduling), and then computes, reads and writes. Transfers share the rates of the storage equally. Equal input gives
equal results: all random numbers are drawn before the simulation.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# Kueue's queueing strategies: with StrictFIFO, a workload that does not fit blocks those behind it; with BestEffortFIFO,
# later ones that fit start (kueue.sigs.k8s.io, ClusterQueue, "Queueing strategy").
QUEUES = ("BestEffortFIFO", "StrictFIFO")
PhaseKind = Literal["compute", "read", "write"]


class Phase(NamedTuple):
    """Seconds of computing, or bytes that are read or written while the GPUs wait."""

    kind: PhaseKind
    amount: float


@dataclass(frozen=True)
class Stage:
    """A part of a customization that holds its GPUs until it ends; 0 GPUs: it never waits."""

    name: str
    gpus: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Job:
    """A customization of a kind, such as a model, with its arrival in seconds; a team ignores the arrival."""

    kind: str
    stages: tuple[Stage, ...]
    arrival: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """GPUs by node, and the storage that the nodes share.

    Attributes:
        nodes: number of GPUs of each node.
        read_rate: bytes per second that all reads share.
        write_rate: bytes per second that all writes share.
        client_rate: bytes per second of one stage at most.
        queue: one of QUEUES.
    """

    nodes: tuple[int, ...]
    read_rate: float
    write_rate: float
    client_rate: float = math.inf
    queue: str = "BestEffortFIFO"

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return sum(self.nodes)


@dataclass(slots=True)
class JobRecord:
    """What happened to a customization; times in seconds, without those of other customizations."""

    kind: str
    arrival: float
    finish: float = math.nan
    wait: float = 0.0
    transfer: float = 0.0
    gpu_seconds: float = 0.0
    gpu_transfer_seconds: float = 0.0


@dataclass(slots=True)
class SharedRate:
    """A rate that transfers share equally: processor sharing.

    Each transfer ends when the bytes that every transfer has received since the start (`received`) reach its target, so
    that an arrival or a departure changes no other transfer.
    """

    rate: float
    client_rate: float
    received: float = 0.0
    updated: float = 0.0
    delivered: float = 0.0
    targets: list[tuple[float, int]] = field(default_factory=list)

    def advance(self, now: float) -> None:
        """Account for the bytes up to a time."""
        if self.targets:
            received = min(self.client_rate, self.rate / len(self.targets)) * (now - self.updated)
            self.received += received
            self.delivered += received * len(self.targets)
        self.updated = now

    def start(self, now: float, size: float, job: int) -> None:
        """Start a transfer of a number of bytes."""
        self.advance(now)
        heapq.heappush(self.targets, (self.received + size, job))

    def get_next_end(self) -> float:
        """Return the time at which the next transfer ends; infinity without transfers."""
        if not self.targets:
            return math.inf
        share = min(self.client_rate, self.rate / len(self.targets))
        return self.updated + max(0.0, self.targets[0][0] - self.received) / share

    def end(self, now: float) -> int:
        """End the transfer that ends first, and return its job."""
        self.advance(now)
        target, job = heapq.heappop(self.targets)
        self.received = max(self.received, target)  # rounding must not delay the next transfer
        return job


@dataclass
class SimulationResult:
    """Records of the customizations that ended, and integrals over the time until `end`.

    Attributes:
        records: the customizations in the order of their arrival; those that did not end have no finish, and the
            GPU-seconds until `end`.
        end: the time of the last event, or at which a team had no further customization.
        in_system_seconds: number of customizations in the system, integrated over time.
        read_bytes: bytes that were read.
        write_bytes: bytes that were written.
        peak: largest number of customizations of a kind that held GPUs at the same time.
    """

    records: list[JobRecord]
    end: float
    in_system_seconds: float
    read_bytes: float
    write_bytes: float
    peak: dict[str, int]


@dataclass(slots=True)
class _Progress:
    """Position of a customization: its stage, its phase, the GPUs that it holds by node, and the start of the phase."""

    stage: int = 0
    phase: int = -1
    held: list[tuple[int, int]] = field(default_factory=list)
    stage_start: float = 0.0
    phase_start: float = 0.0


class Simulation:
    """One run of the simulation; see `simulate`."""

    def __init__(self, cluster: Cluster, jobs: Sequence[Job], teams: int) -> None:
        self.cluster, self.jobs, self.teams = cluster, jobs, teams
        self.free = list(cluster.nodes)
        self.pools = {
            "read": SharedRate(cluster.read_rate, cluster.client_rate),
            "write": SharedRate(cluster.write_rate, cluster.client_rate),
        }
        self.events: list[tuple[float, int, str, int]] = []
        self.numbers = itertools.count()
        self.waiting: dict[int, deque[tuple[int, float, int]]] = {}  # by GPUs: number, time and job
        self.records: list[JobRecord | None] = [None] * len(jobs)
        self.progress = [_Progress() for _ in jobs]
        self.in_system, self.in_system_seconds, self.updated = 0, 0.0, 0.0
        self.running: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.next_job = 0

    def run(self) -> SimulationResult:
        """Process the events in chronological order."""
        if self.teams:
            for _ in range(min(self.teams, len(self.jobs))):
                self._submit_next(0.0)
        else:
            for index, job in enumerate(self.jobs):
                self._schedule(job.arrival, "arrive", index)
        reads, writes = self.pools["read"], self.pools["write"]
        while not (self.teams and self.next_job > len(self.jobs)):
            own = self.events[0][0] if self.events else math.inf
            read_end, write_end = reads.get_next_end(), writes.get_next_end()
            pool, transferred = (reads, read_end) if read_end <= write_end else (writes, write_end)
            if (now := min(own, transferred)) == math.inf:
                break
            self.in_system_seconds += self.in_system * (now - self.updated)
            self.updated = now
            if transferred <= own:
                self._advance(now, pool.end(now))
            else:
                self._process(now)
        for pool in self.pools.values():
            pool.advance(self.updated)
        for job, record, progress in zip(self.jobs, self.records, self.progress, strict=True):
            if record and progress.held:  # only teams leave customizations unfinished
                record.gpu_seconds += job.stages[progress.stage].gpus * (self.updated - progress.stage_start)
        read, write = (self.pools[kind].delivered for kind in ("read", "write"))
        records = [record for record in self.records if record]
        return SimulationResult(records, self.updated, self.in_system_seconds, read, write, self.peak)

    def _process(self, now: float) -> None:
        _, _, kind, index = heapq.heappop(self.events)
        if kind == "arrive":
            self.in_system += 1
            self.records[index] = JobRecord(self.jobs[index].kind, now)
            self._enqueue(now, index)
        else:
            self._advance(now, index)

    def _schedule(self, time: float, kind: str, index: int) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), kind, index))

    def _submit_next(self, now: float) -> None:
        """Let a team submit its next customization; the simulation ends when there is none."""
        if self.next_job < len(self.jobs):
            self._schedule(now, "arrive", self.next_job)
        self.next_job += 1

    def _enqueue(self, now: float, index: int) -> None:
        progress = self.progress[index]
        gpus = self.jobs[index].stages[progress.stage].gpus
        if gpus == 0:
            self._start_stage(now, index, [], 0.0)
            return
        self.waiting.setdefault(gpus, deque()).append((next(self.numbers), now, index))
        self._dispatch(now)

    def _dispatch(self, now: float) -> None:
        """Start waiting stages, oldest first; a size that does not fit is skipped, or blocks with StrictFIFO."""
        sizes = set(self.waiting)
        while sizes := {size for size in sizes if self.waiting[size]}:
            gpus = min(sizes, key=lambda size: self.waiting[size][0][0])
            held = self._place(gpus)
            if held is None:
                if self.cluster.queue == "StrictFIFO":
                    return
                sizes.discard(gpus)
                continue
            _, since, index = self.waiting[gpus].popleft()
            for node, count in held:
                self.free[node] -= count
            self._start_stage(now, index, held, now - since)

    def _place(self, gpus: int) -> list[tuple[int, int]] | None:
        """Return the GPUs by node: the node with the least free GPUs that fits, or else whole free nodes."""
        fitting = [(free, node) for node, free in enumerate(self.free) if free >= gpus]
        if fitting:
            return [(min(fitting)[1], gpus)]
        if gpus <= max(self.cluster.nodes):
            return None
        held, missing = [], gpus
        for node, size in sorted(enumerate(self.cluster.nodes), key=lambda item: -item[1]):
            if self.free[node] == size and missing > 0:
                held.append((node, min(size, missing)))
                missing -= size
        return held if missing <= 0 else None

    def _start_stage(self, now: float, index: int, held: list[tuple[int, int]], wait: float) -> None:
        record, progress, kind = self._get_record(index), self.progress[index], self.jobs[index].kind
        record.wait += wait
        progress.held, progress.stage_start, progress.phase_start, progress.phase = held, now, now, -1
        if held:
            self.running[kind] = self.running.get(kind, 0) + 1
            self.peak[kind] = max(self.peak.get(kind, 0), self.running[kind])
        self._start_phase(now, index)

    def _start_phase(self, now: float, index: int) -> None:
        progress = self.progress[index]
        progress.phase += 1
        progress.phase_start = now
        phases = self.jobs[index].stages[progress.stage].phases
        if progress.phase == len(phases):
            self._end_stage(now, index)
        elif (phase := phases[progress.phase]).kind == "compute":
            self._schedule(now + phase.amount, "computed", index)
        else:
            self.pools[phase.kind].start(now, phase.amount, index)

    def _advance(self, now: float, index: int) -> None:
        """Account for the phase that ended, and start the next."""
        progress, record = self.progress[index], self._get_record(index)
        stage = self.jobs[index].stages[progress.stage]
        if stage.phases[progress.phase].kind != "compute":
            record.transfer += now - progress.phase_start
            record.gpu_transfer_seconds += stage.gpus * (now - progress.phase_start)
        self._start_phase(now, index)

    def _end_stage(self, now: float, index: int) -> None:
        progress, record, job = self.progress[index], self._get_record(index), self.jobs[index]
        record.gpu_seconds += job.stages[progress.stage].gpus * (now - progress.stage_start)
        for node, count in progress.held:
            self.free[node] += count
        if progress.held:
            self.running[job.kind] -= 1
        progress.held = []
        progress.stage += 1
        if progress.stage < len(job.stages):
            self._enqueue(now, index)
        else:
            record.finish = now
            self.in_system -= 1
            if self.teams:
                self._submit_next(now)
        self._dispatch(now)

    def _get_record(self, index: int) -> JobRecord:
        record = self.records[index]
        assert record is not None  # set at the arrival
        return record


def simulate(cluster: Cluster, jobs: Sequence[Job], teams: int = 0) -> SimulationResult:
    """Simulate the customizations until all have ended.

    Args:
        cluster: GPUs and storage.
        jobs: customizations; each stage must fit the empty cluster.
        teams: teams that each have one customization in progress, and submit the next one when it ends. The simulation
            then ends when a team has none left. 0: customizations arrive at their own times.

    Raises:
        ValueError: a stage needs more GPUs than the cluster can give.
    """
    simulation = Simulation(cluster, jobs, teams)
    for gpus in {stage.gpus for job in jobs for stage in job.stages}:
        if gpus and simulation._place(gpus) is None:
            raise ValueError(f"a stage needs {gpus} GPUs; the nodes have {cluster.nodes}")
    return simulation.run()
