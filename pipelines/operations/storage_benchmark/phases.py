"""Phases of a benchmark: training, checkpoints, model loading, small files, and all teams at the same time."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import Reporter
from pipelines.operations.storage_benchmark.host_group import HostGroup
from pipelines.operations.storage_benchmark.rank_processes import PhaseResult, run_ranks
from pipelines.operations.storage_benchmark.rank_worker import Json, supports_direct_io
from pipelines.operations.storage_benchmark.workloads import Workload

WRITERS_PER_HOST = 4
SMALL_FILE_BYTES = 32 * 1024  # a text document
# Bytes per parameter: weights in 16 bits, and three values of Adam in 32 bits (weights and two moments), as DLIO writes.
CHECKPOINT_BYTES_PER_PARAMETER, WEIGHT_BYTES_PER_PARAMETER = 14, 2
MEMORY_FACTOR = 5  # a dataset of fewer times the memory can be cached (MLPerf Storage rules)
MAX_SPACE_SHARE = 0.9  # of the free space
ASSUMED_BYTES_PER_SECOND = 1e9  # of writing, in the dry run


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to measure; all hosts of a group have the same plan.

    Attributes:
        accelerators: emulated accelerators; 0 for no training.
        parameters: parameters of the model whose checkpoint is written; 0 for no checkpoints.
        ranks: processes that write the checkpoint.
        readers: processes that read small files; 0 for none.
        small_files: number of small files.
        seconds: duration of each timed measurement.
        mix: measure the three teams at the same time as well.
        buffered: read through the page cache.
        fio: compare with fio.
    """

    workload: Workload
    accelerators: int = 0
    parameters: int = 0
    ranks: int = 8
    readers: int = 0
    small_files: int = 2000
    seconds: float = 30.0
    mix: bool = False
    buffered: bool = False
    fio: bool = False

    def list_files(self) -> dict[str, int]:
        """Return the bytes to write, by phase."""
        sizes = {
            "training": self.workload.dataset_bytes if self.accelerators else 0,
            "checkpoint": self.checkpoint_bytes,
            "small files": self.small_files * SMALL_FILE_BYTES if self.readers else 0,
        }
        return {name: size for name, size in sizes.items() if size}

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoint of all ranks."""
        return math.ceil(self.parameters * CHECKPOINT_BYTES_PER_PARAMETER / self.ranks) * self.ranks

    def estimate_seconds(self) -> float:
        """Return the duration at ASSUMED_BYTES_PER_SECOND, if every measurement of the search is needed."""
        search = 1 + math.ceil(math.log2(self.accelerators)) if self.accelerators else 0
        timed = search + bool(self.readers) + self.mix + 2 * self.fio
        read = self.checkpoint_bytes + self.ranks * self.parameters * WEIGHT_BYTES_PER_PARAMETER
        warmup = (search + self.mix) * self.workload.warmup_steps * self.workload.computation_seconds
        return timed * self.seconds + warmup + (sum(self.list_files().values()) + read) / ASSUMED_BYTES_PER_SECOND


@dataclass
class Benchmark:
    """A running benchmark: its hosts and plan, and whether reads bypass the page cache."""

    group: HostGroup
    plan: BenchmarkPlan
    reporter: Reporter
    memory_bytes: int = 0  # of all hosts
    direct: bool = False
    files: dict[str, list[str]] = field(default_factory=dict)

    def run(self, tasks: list[Json]) -> PhaseResult:
        """Run the tasks on all hosts."""
        return run_ranks(self.group, tasks)

    def describe_cache(self, size: int) -> str:
        """Return "direct", "dropped" or "cached": how a phase avoids the page cache for `size` bytes of files."""
        if self.direct:
            return "direct"
        return "dropped" if size >= MEMORY_FACTOR * self.memory_bytes else "cached"


def prepare(benchmark: Benchmark) -> None:
    """Check the free space, and whether the storage allows direct I/O.

    Raises:
        UsageError: the storage has too little free space.
    """
    group, plan = benchmark.group, benchmark.plan
    benchmark.memory_bytes = sum(group.gather(psutil.virtual_memory().total))
    check_space(group.folder.parent, plan)
    probe = group.folder / f"probe.{group.rank}"
    probe.write_bytes(bytes(4096))
    benchmark.direct = not plan.buffered and all(group.gather(supports_direct_io(str(probe))))
    probe.unlink(missing_ok=True)


def check_plan(plan: BenchmarkPlan) -> None:
    """Refuse a workload with too little data for a measurement.

    Raises:
        UsageError: an accelerator has no step after the warm-up.
    """
    workload = plan.workload
    steps = workload.limit_steps(plan.accelerators) if plan.accelerators else 0
    if 0 < steps <= workload.warmup_steps:
        raise UsageError(
            f"{workload.name} has {format_count(steps, 'step')} per accelerator with "
            f"{format_count(plan.accelerators, 'accelerator')}; expected more than {workload.warmup_steps}, because "
            "the warm-up is not measured",
            hint="Raise the number of files or epochs, or lower --accelerators.",
        )


def check_space(folder: Path, plan: BenchmarkPlan) -> None:
    """Refuse a plan that needs more than MAX_SPACE_SHARE of the free space.

    Raises:
        UsageError: the storage has too little free space.
    """
    space, needed = os.statvfs(folder), sum(plan.list_files().values())
    free = space.f_bavail * space.f_frsize
    if needed > MAX_SPACE_SHARE * free:
        raise UsageError(
            f"the benchmark writes {needed / 1e9:.1f} GB; expected at most {MAX_SPACE_SHARE:.0%} of the "
            f"{free / 1e9:.1f} GB free in {folder}",
            hint="Free some space, lower --size, or choose a smaller model for --checkpoint.",
        )


def write_dataset(benchmark: Benchmark) -> None:
    """Write the files of the training."""
    workload = benchmark.plan.workload
    folder = benchmark.group.folder / "training"
    folder.mkdir(exist_ok=True)
    files = benchmark.files["training"] = [str(folder / str(number)) for number in range(workload.files)]
    writers = WRITERS_PER_HOST * benchmark.group.hosts
    shares = [files[number::writers] for number in range(min(writers, len(files)))]
    benchmark.run([{"kind": "write", "files": share, "bytes": workload.file_bytes, "seconds": 0} for share in shares])


def build_training_tasks(benchmark: Benchmark, workload: Workload, accelerators: int) -> list[Json]:
    """Return a task per emulated accelerator."""
    return [
        {
            "kind": "train",
            "files": benchmark.files["training"],
            "direct": benchmark.direct,
            "seconds": benchmark.plan.seconds,
            "max_steps": workload.limit_steps(accelerators),
            "ranks": accelerators,
            "rank": rank,
            **{
                name: getattr(workload, name)
                for name in (
                    "samples_per_file", "stride", "batch", "computation_seconds", "order", "read_threads", "prefetch",
                )
            },
        }
        for rank in range(accelerators)
    ]  # fmt: skip


def summarize_training(workload: Workload, ranks: list[Json]) -> Json:
    """Return utilization and rates of a training run. The utilization is the mean over accelerators, as in DLIO."""
    shares = [rank["steps"] * workload.computation_seconds / rank["seconds"] for rank in ranks]
    utilization = sum(shares) / len(shares)
    rate = sum(rank["bytes"] / rank["seconds"] for rank in ranks)
    return {
        "accelerators": len(ranks),
        "utilization": round(utilization, 4),
        "worst_utilization": round(min(shares), 4),
        "passes": utilization >= workload.target_utilization,
        "read_bytes_per_second": round(rate),
        "samples_per_second": round(rate / workload.stride, 1),
        "steps": min(rank["steps"] for rank in ranks),
        "first_step_seconds": round(max(rank["first_step_seconds"] for rank in ranks), 4),
    }


def measure_training(benchmark: Benchmark, accelerators: int) -> Json:
    """Emulate a number of accelerators; see `summarize_training`."""
    workload = benchmark.plan.workload
    benchmark.reporter.step(f"training on {format_count(accelerators, 'accelerator')}")
    result = benchmark.run(build_training_tasks(benchmark, workload, accelerators))
    return {**summarize_training(workload, result.ranks), "cpu_busy": round(result.cpu_busy, 3)}


def search_accelerators(benchmark: Benchmark) -> Json:
    """Measure the requested number of accelerators and, if it fails, the largest number that passes, by bisection.

    Returns:
        {"accelerators", "passes", "utilization", "largest_passing", "runs": [see `summarize_training`]}.
    """
    highest = benchmark.plan.accelerators
    runs = [requested := measure_training(benchmark, highest)]
    passing, failing = (highest, highest + 1) if requested["passes"] else (0, highest)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        runs.append(measure_training(benchmark, middle))
        passing, failing = (middle, failing) if runs[-1]["passes"] else (passing, middle)
    return {
        "accelerators": highest,
        "passes": requested["passes"],
        "utilization": requested["utilization"],
        "largest_passing": passing,
        "runs": sorted(runs, key=lambda run: int(run["accelerators"])),
        "cache": benchmark.describe_cache(benchmark.plan.workload.dataset_bytes),
    }
