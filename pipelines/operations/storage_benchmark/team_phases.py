"""Phases of the other teams: checkpoints, model loading and small files, and all teams at the same time."""

from __future__ import annotations

from pathlib import Path

from pipelines.operations.storage_benchmark.phases import (
    SMALL_FILE_BYTES,
    WEIGHT_BYTES_PER_PARAMETER,
    Benchmark,
    build_training_tasks,
    summarize_training,
)
from pipelines.operations.storage_benchmark.rank_worker import Json


def measure_checkpoint(benchmark: Benchmark) -> Json:
    """Write and flush a checkpoint from all ranks, read it on the next host, and load the model in all ranks.

    The duration is that of the slowest rank, and the rate is all bytes divided by it (MLPerf Storage).

    Returns:
        {"checkpoint_write", "checkpoint_read", "model_loading"}: see `_summarize_transfer`.
    """
    plan, group = benchmark.plan, benchmark.group
    benchmark.reporter.step("writing a checkpoint")
    write = benchmark.run(build_checkpoint_tasks(benchmark, 0)).ranks
    benchmark.reporter.step("reading the checkpoint")
    files = benchmark.files["checkpoint"]
    share = plan.checkpoint_bytes // plan.ranks
    read = benchmark.run(
        [
            {"kind": "read", "files": [file], "bytes": share, "direct": benchmark.direct, "host": rank + 1}
            for rank, file in enumerate(files)
        ]
    ).ranks
    benchmark.reporter.step("loading the model")
    weights = plan.parameters * WEIGHT_BYTES_PER_PARAMETER
    loading = benchmark.run(
        [{"kind": "read", "files": files, "bytes": weights, "direct": benchmark.direct} for _ in range(plan.ranks)]
    ).ranks
    cache = benchmark.describe_cache(plan.checkpoint_bytes)
    return {
        "checkpoint_write": _summarize_transfer(write, "write"),
        "checkpoint_read": {**_summarize_transfer(read, "read"), "other_host": group.hosts > 1, "cache": cache},
        "model_loading": {**_summarize_transfer(loading, "read"), "cache": cache},
    }


def build_checkpoint_tasks(benchmark: Benchmark, seconds: float) -> list[Json]:
    """Return a task per rank that writes its checkpoint, repeatedly for `seconds`."""
    plan, folder = benchmark.plan, benchmark.group.folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    files = benchmark.files["checkpoint"] = [str(folder / str(rank)) for rank in range(plan.ranks)]
    share = plan.checkpoint_bytes // plan.ranks
    return [{"kind": "write", "files": [file], "bytes": share, "seconds": seconds} for file in files]


def _summarize_transfer(ranks: list[Json], way: str) -> Json:
    """Return {"ranks", "bytes", "seconds", "<way>_bytes_per_second", "slowest_rank_bytes_per_second"}."""
    seconds, total = max(rank["seconds"] for rank in ranks), sum(rank["bytes"] for rank in ranks)
    return {
        "ranks": len(ranks),
        "bytes": total,
        "seconds": round(seconds, 4),
        f"{way}_bytes_per_second": round(total / seconds),
        "slowest_rank_bytes_per_second": round(min(rank["bytes"] / rank["seconds"] for rank in ranks)),
    }


def measure_small_files(benchmark: Benchmark) -> Json:
    """Write small files, and read random ones with all readers.

    Returns:
        {"readers", "files", "files_written_per_second", "files_read_per_second", "read_bytes_per_second", "cache"}.
    """
    plan, folder = benchmark.plan, benchmark.group.folder / "small"
    benchmark.reporter.step("writing small files")
    count = max(1, plan.small_files // plan.readers)
    folders = benchmark.files["small"] = [str(folder / str(number)) for number in range(plan.readers)]
    for path in (folder, *map(Path, folders)):
        path.mkdir(exist_ok=True)
    benchmark.group.gather("folders")
    written = benchmark.run(
        [{"kind": "write small files", "folder": path, "count": count, "bytes": SMALL_FILE_BYTES} for path in folders]
    ).ranks
    benchmark.reporter.step("reading small files")
    read = benchmark.run(build_reader_tasks(benchmark)).ranks
    return {
        "readers": plan.readers,
        "files": count * plan.readers,
        "files_written_per_second": round(sum(rank["files"] / rank["seconds"] for rank in written), 1),
        **_summarize_readers(read),
        "cache": benchmark.describe_cache(count * plan.readers * SMALL_FILE_BYTES),
    }


def build_reader_tasks(benchmark: Benchmark) -> list[Json]:
    """Return a task per reader of small files."""
    plan = benchmark.plan
    task = {
        "kind": "read small files",
        "folders": benchmark.files["small"],
        "count": max(1, plan.small_files // plan.readers),
        "bytes": SMALL_FILE_BYTES,
        "direct": benchmark.direct,
        "seconds": plan.seconds,
    }
    return [task] * plan.readers


def _summarize_readers(ranks: list[Json]) -> Json:
    return {
        "files_read_per_second": round(sum(rank["files"] / rank["seconds"] for rank in ranks), 1),
        "read_bytes_per_second": round(sum(rank["bytes"] / rank["seconds"] for rank in ranks)),
    }


def measure_mix(benchmark: Benchmark, accelerators: int) -> Json:
    """Let one team train, one write checkpoints and one read small files at the same time.

    Returns:
        {"accelerators", "utilization", "passes", "checkpoint_write_bytes_per_second", "files_read_per_second"}.
    """
    plan = benchmark.plan
    benchmark.reporter.step("all phases at the same time")
    training = build_training_tasks(benchmark, plan.workload, accelerators)
    checkpoint = build_checkpoint_tasks(benchmark, plan.seconds)
    ranks = benchmark.run([*training, *checkpoint, *build_reader_tasks(benchmark)]).ranks
    trained = summarize_training(plan.workload, ranks[:accelerators])
    written = ranks[accelerators : accelerators + plan.ranks]
    return {
        "accelerators": accelerators,
        "utilization": trained["utilization"],
        "passes": trained["passes"],
        "checkpoint_write_bytes_per_second": round(sum(rank["bytes"] / rank["seconds"] for rank in written)),
        "files_read_per_second": _summarize_readers(ranks[accelerators + plan.ranks :])["files_read_per_second"],
    }
