"""Measurement of the workloads of `throughput` with fio (https://fio.readthedocs.io), if it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from components.common.runtime import process_control
from pipelines.operations.storage_probe import throughput
from pipelines.operations.storage_probe.participant import Figures, Participant

WORKLOADS = {  # by name: the number of jobs, and the options
    "preparation": (1, ["--rw=randrw", f"--bs={throughput.RANDOM_BLOCK_BYTES}", "--time_based=1"]),
    "training": (throughput.STREAM_COUNT, ["--rw=read", f"--bs={throughput.STREAM_BLOCK_BYTES}", "--time_based=1"]),
    "checkpoints": (1, ["--rw=write", f"--bs={throughput.CHECKPOINT_BLOCK_BYTES}", "--end_fsync=1"]),
}
COMMON_OPTIONS = [
    "--ioengine=psync", "--fallocate=none", "--group_reporting=1", "--output-format=json", "--invalidate=1",
    "--randrepeat=0",
]  # fmt: skip


def run_fio(side: Participant) -> Figures:
    """Run the workloads with fio.

    Returns:
        {"shapes": {workload: {"version", "ways"} or {"failed"}}}; without workloads if fio is not available. "ways" has
        the bytes and operations per second of reads and writes. A failure of fio is a result, not an error, because the
        failure does not indicate a fault of the storage.
    """
    program = shutil.which("fio") if side.plan.fio else None
    side.exchange("begin")
    if not program:
        return {"shapes": {}}
    folder, shapes = side.folder_for(), {}
    for shape, (jobs, options) in WORKLOADS.items():
        command = [
            program,
            f"--name={shape}",
            f"--directory={folder}",
            f"--size={side.plan.size // jobs}",
            f"--numjobs={jobs}",
            f"--runtime={max(1, round(side.plan.seconds))}",
            *options,
            *COMMON_OPTIONS,
        ]
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            preexec_fn=process_control.die_with_parent,
        )
        for file in folder.glob(f"{shape}.*"):
            file.unlink(missing_ok=True)
        try:
            output = json.loads(completed.stdout[completed.stdout.index("{") :])
            job, version = {"error": 0, **output["jobs"][0]}, output["fio version"]
            ways = {
                way: {"bytes_per_second": job[way]["bw_bytes"], "per_second": job[way]["iops"]}
                for way in ("read", "write")
                if job[way]["io_bytes"]
            }
            if not completed.returncode and not job["error"] and ways:
                shapes[shape] = {"version": version, "ways": ways}
                continue
            failure = os.strerror(job["error"]) if job["error"] else "" if ways else "fio read and wrote no data"
        except (ValueError, LookupError):
            failure = completed.stdout
        failure = completed.stderr.strip() or failure.strip() or f"exit code {completed.returncode}"
        shapes[shape] = {"failed": failure[-300:]}
    return {"shapes": shapes}
