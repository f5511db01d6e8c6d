"""Compare the utilization of `tuneline storage benchmark` with fio's: `python -m benchmarks.storage_utilization`.

Writes docs/reference/benchmarks-storage.md. Needs fio; the slow storage needs root and the blkio controller of cgroup v1, which
throttles the reads of a device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances
from benchmarks.page import made_with, met, table_of
from pipelines.operations.storage_benchmark.fio_check import MAX_DIFFERENCE_POINTS

BLKIO = Path("/sys/fs/cgroup/blkio")
RECORD_BYTES, BATCH = 110_592, 4
WORKLOAD = """\
dataset: {{num_files_train: 2, num_samples_per_file: 64, record_length: {record}}}
reader: {{batch_size: {batch}, read_threads: 0, sample_shuffle: seed}}
train: {{computation_time: {seconds}, epochs: 1000}}
metric: {{au: 0.001}}
"""
# Accelerators, seconds of computation per step, and bytes per second of the throttled device; None: not throttled.
CASES = ((1, 0.5, None), (2, 0.1, None), (2, 0.02, None), (2, 0.1, 12 << 20), (2, 0.1, 6 << 20), (2, 0.1, 3 << 20))
HEAD = """# Storage benchmark, compared with fio

`make bench-storage` writes this page. It compares the accelerator utilization of `tuneline storage benchmark --fio` with
that of fio in the same folder: direct I/O, {batch} random records of {record:,} bytes per step, no read-ahead. tuneline measures
for {seconds:g} s, excluding the first step; fio then makes the same number of reads, including the first step. [Shared
storage](../how-to/storage.md#benchmark) describes the command.

"""
NOTES = """
- Utilization is computation ÷ total time, averaged over the accelerators. The difference is in percentage points.
- The expected utilization at a throttled rate is computation × rate ÷ bytes per step of all accelerators.
- The blkio controller of cgroup v1 throttles the device. A case that cannot be measured shows the reason.
- Other programs on the CPUs delay reads and sleeps. No test depends on these timings or repeats the comparison.
"""


@contextmanager
def throttle_reads(folder: Path, bytes_per_second: int) -> Iterator[None]:
    """Limit the rate at which this process and its children read from the device of a folder.

    Raises:
        OSError: the kernel cannot throttle the device, or this user must not.
    """
    device = folder.stat().st_dev
    cgroup = BLKIO / f"tuneline-benchmark-{os.getpid()}"
    cgroup.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_second}"
        (cgroup / "blkio.throttle.read_bps_device").write_text(limit)
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        cgroup.rmdir()


def compare(folder: Path, accelerators: int, computation_seconds: float, seconds: float) -> dict[str, Any]:
    """Return the "fio" section of a benchmark's result."""
    workload = folder / "workload.yaml"
    workload.write_text(WORKLOAD.format(record=RECORD_BYTES, batch=BATCH, seconds=computation_seconds))
    command = [sys.executable, "-P", "-m", "pipelines.cli", "storage", "benchmark", str(folder), "--json", "--fio"]
    command += ["--accelerators", str(accelerators), "--workload", str(workload), "--seconds", str(seconds)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(process.stdout)
    if not result["direct"]:
        raise SystemExit(f"{folder} does not support direct I/O; choose another --workdir")
    fio: dict[str, Any] = result["fio"]
    return fio


def measure_case(folder: Path, case: tuple[int, float, int | None], seconds: float) -> tuple[list[str], float | None]:
    """Return the row of a case, and its difference in percentage points; None if the case could not be measured."""
    accelerators, computation_seconds, limit = case
    rate = f"{limit / 1e6:.1f} MB/s" if limit else "not throttled"
    row = [str(accelerators), f"{computation_seconds:g} s", rate]
    try:
        if limit:
            with throttle_reads(folder, limit):
                fio = compare(folder, accelerators, computation_seconds, seconds)
        else:
            fio = compare(folder, accelerators, computation_seconds, seconds)
    except OSError as error:
        return [*row, "–", "–", "–", f"not measured: {error.strerror}"], None
    step_bytes = accelerators * BATCH * RECORD_BYTES
    expected = f"{min(1.0, computation_seconds * limit / step_bytes):.1%}" if limit else "–"
    difference = float(fio["difference_points"])
    measured = [f"{fio['utilization']:.1%}", f"{fio['fio_utilization']:.1%}", f"{difference:.2f}"]
    return [*row, expected, *measured], difference


def main() -> None:
    """Measure all cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True, help="Folder on the storage.")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="Duration of each measurement of tuneline in seconds."
    )
    parser.add_argument("--markdown", type=Path, required=True, help="Page to write.")
    arguments = parser.parse_args()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    facts = circumstances("benchmarks.storage_utilization")
    rows, differences = zip(
        *(measure_case(arguments.workdir.absolute(), case, arguments.seconds) for case in CASES), strict=True
    )
    close = [difference <= MAX_DIFFERENCE_POINTS for difference in differences if difference is not None]
    names = [
        "accelerators",
        "computation per step",
        "read rate of the device",
        "expected",
        "tuneline",
        "fio",
        "difference",
    ]
    goal = f"Goal: a difference of at most {MAX_DIFFERENCE_POINTS:g} percentage points in every case: {met(all(close) and len(close) == len(CASES))}"
    arguments.markdown.write_text(
        HEAD.format(batch=BATCH, record=RECORD_BYTES, seconds=arguments.seconds)
        + made_with(facts)
        + f"\n{goal} ({sum(close)} of {len(CASES)} cases).\n\n"
        + table_of(names, [list(row) for row in rows])
        + NOTES,
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
