"""The same three shapes measured by fio (https://fio.readthedocs.io), where it is installed. Its figures are noted as its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from components.common import process
from pipelines.storage import rates
from pipelines.storage.side import Side

SHAPES = {
    "preparation": ["--rw=randrw", f"--bs={rates.SMALL}", "--numjobs=1"],
    "training": ["--rw=read", f"--bs={rates.STREAMED}", f"--numjobs={rates.STREAMS}"],
    "checkpoints": ["--rw=write", f"--bs={rates.LARGE}", "--numjobs=1", "--end_fsync=1"],
}
COMMON = ["--ioengine=psync", "--fallocate=none", "--group_reporting=1", "--output-format=json", "--invalidate=1", "--randrepeat=0"]


def measure(side: Side) -> dict[str, Any]:
    """Bytes and operations a second by shape, as fio tells them: {"shapes"}, empty without it."""
    program = shutil.which("fio") if side.plan.fio else None
    side.meet("begin")
    found: dict[str, Any] = {}
    for shape in SHAPES if program else ():
        found[shape] = _run(side, str(program), shape)
    return {"shapes": found}


def _run(side: Side, program: str, shape: str) -> dict[str, Any]:
    """One job. What it says on a failure is told as its result: a strange fio is no fault of the storage."""
    size = side.plan.size // (rates.STREAMS if shape == "training" else 1)
    timed = ["--time_based=1"] if shape != "checkpoints" else []
    where = [f"--name={shape}", f"--directory={side.room()}", f"--size={size}", f"--runtime={max(1, round(side.plan.seconds))}", *timed]
    done = subprocess.run(
        [program, *where, *SHAPES[shape], *COMMON],
        capture_output=True,
        text=True,
        check=False,
        cwd=side.room(),
        preexec_fn=process.die_with_parent,
    )
    for file in side.room().glob(f"{shape}.*"):
        file.unlink()
    return _read(done)


def _read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """{"version", "ways"} of a job that worked, else {"failed"}: one that failed prints figures as well, which say nothing."""
    try:
        told = json.loads(done.stdout[done.stdout.index("{") :])
        job, version = {"error": 0, **told["jobs"][0]}, told["fio version"]
        moved = {way: job[way] for way in ("read", "write") if job[way]["io_bytes"]}
        ways = {way: {"bytes_per_second": said["bw_bytes"], "per_second": said["iops"]} for way, said in moved.items()}
    except (ValueError, LookupError):
        return _failed(done, done.stdout)
    if done.returncode or job["error"] or not ways:
        return _failed(done, os.strerror(job["error"]) if job["error"] else "" if ways else "it read and wrote nothing")
    return {"version": version, "ways": ways}


def _failed(done: subprocess.CompletedProcess[str], otherwise: str) -> dict[str, Any]:
    return {"failed": (done.stderr.strip() or otherwise.strip() or f"exit code {done.returncode}")[-300:]}
