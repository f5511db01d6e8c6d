"""Cross-check of the utilization with fio (https://fio.readthedocs.io), which reads and then thinks.

fio does not read ahead. Both measurements therefore read in the step.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace

from components.common.runtime import process_control
from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError, TunelineError, UsageError
from pipelines.operations.storage_benchmark.phases import (
    Benchmark,
    BenchmarkPlan,
    build_training_tasks,
    summarize_training,
)
from pipelines.operations.storage_benchmark.rank_worker import READ_BYTES, Json

MAX_DIFFERENCE_POINTS = 3.0
MAX_FILES = 512  # names of files on fio's command line


def find_fio() -> str:
    """Return the path of fio.

    Raises:
        EngineMissingError: fio is not installed.
    """
    if program := shutil.which("fio"):
        return program
    raise EngineMissingError("fio is not installed", hint="Install fio, or omit --fio.")


def check_workload(plan: BenchmarkPlan) -> None:
    """Refuse a comparison that fio cannot make.

    Raises:
        UsageError: there is no training, or its records are too large.
        EngineMissingError: fio is not installed.
    """
    if not plan.accelerators or plan.workload.stride > READ_BYTES:
        raise UsageError(
            f"--fio requires --accelerators, and records of at most {READ_BYTES >> 20} MiB",
            hint="Add --accelerators and choose a workload with smaller records, or omit --fio.",
        )
    find_fio()


def measure_with_fio(benchmark: Benchmark, accelerators: int) -> Json:
    """Measure a number of accelerators with tuneline and then with fio, both without read-ahead.

    Returns:
        {"accelerators", "utilization", "fio_utilization", "difference_points", "agrees", "fio"}.

    Raises:
        TunelineError: fio failed.
    """
    workload = replace(benchmark.plan.workload, read_threads=0)
    benchmark.reporter.step(f"comparing {format_count(accelerators, 'accelerator')} with fio")
    own = summarize_training(workload, benchmark.run(build_training_tasks(benchmark, workload, accelerators)).ranks)
    group = benchmark.group
    jobs = len(range(group.rank, accelerators, group.hosts))
    files = [path.replace(":", "\\:") for path in benchmark.files["training"][:MAX_FILES]]
    reads = (own["steps"] + 1) * workload.batch
    command = [
        find_fio(),
        "--name=training",
        f"--filename={':'.join(files)}",
        f"--rw={'randread' if workload.order == 'random' else 'read'}",
        f"--bs={workload.stride}",
        f"--io_size={reads * workload.stride}",
        f"--numjobs={jobs}",
        f"--thinktime={round(workload.computation_seconds * 1e6)}",
        f"--thinktime_blocks={workload.batch}",
        f"--direct={int(benchmark.direct)}",
        "--thread",  # a process per job would outlive fio if it is killed
        "--ioengine=psync", "--invalidate=1", "--allow_file_create=0", "--randrepeat=0", "--output-format=json",
    ]  # fmt: skip
    group.gather("fio")
    shares = _run_fio(command, reads // workload.batch * workload.computation_seconds) if jobs else ([], "")
    gathered = group.gather(shares)
    values = [share for host, _ in gathered for share in host]
    fio = sum(values) / len(values)
    difference = 100 * abs(own["utilization"] - fio)
    return {
        "accelerators": accelerators,
        "utilization": own["utilization"],
        "fio_utilization": round(fio, 4),
        "difference_points": round(difference, 2),
        "agrees": difference <= MAX_DIFFERENCE_POINTS,
        "fio": next(version for _, version in gathered if version),
    }


def _run_fio(command: list[str], computation_seconds: float) -> tuple[list[float], str]:
    """Return the utilization of each job, computation over run time, and the version of fio."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process only, which then kills fio
        preexec_fn=process_control.die_with_parent,
    )
    try:
        out, err = process.communicate()
    finally:
        process.kill()
        process.wait()
    try:
        output = json.loads(out[out.index("{") :])
        if process.returncode or any(job["error"] for job in output["jobs"]):
            raise ValueError
        return [computation_seconds / (job["job_runtime"] / 1000) for job in output["jobs"]], output["fio version"]
    except (ValueError, LookupError):
        failure = (err.strip() or out.strip())[-300:] or f"exit code {process.returncode}"
        raise TunelineError(f"fio failed: {failure}", hint="Omit --fio, or install another version of fio.") from None
