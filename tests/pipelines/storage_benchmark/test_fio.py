"""The utilization that the benchmark measures equals that of fio within 3 points, on the same files.

long: both measure for seconds. One case needs a device whose reads the kernel can throttle (cgroup v1, as root).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.operations.storage_benchmark.fio_check import MAX_DIFFERENCE_POINTS
from tests.pipelines.command import answer, refusal

BLKIO = Path("/sys/fs/cgroup/blkio")
# An accelerator reads 4 × 110,592 bytes per step.
WORKLOAD = """
dataset: {{num_files_train: 2, num_samples_per_file: 64, record_length: 110000}}
reader: {{batch_size: 4, read_threads: 0, sample_shuffle: seed}}
train: {{computation_time: {seconds}, epochs: 1000}}
metric: {{au: 0.001}}
"""
THROTTLED_BYTES_PER_SECOND = 6 << 20  # 2 accelerators of 0.1 s wait: 0.14 s per step

needs_fio = pytest.mark.skipif(not shutil.which("fio"), reason="fio is not installed")


@contextmanager
def throttle_reads(folder: Path) -> Iterator[None]:
    """Limit the rate at which this process and its children read from the device of a folder."""
    device = folder.stat().st_dev
    whole_disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/partition").exists()
    if whole_disk or not (BLKIO / "blkio.throttle.read_bps_device").exists() or not os.access(BLKIO, os.W_OK):
        pytest.skip("reads of the device cannot be throttled here")
    cgroup = BLKIO / f"tuneline-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {THROTTLED_BYTES_PER_SECOND}"
        try:
            (cgroup / "blkio.throttle.read_bps_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"reads of the device cannot be throttled here: {error}")
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        cgroup.rmdir()


def compare_with_fio(folder: Path, accelerators: int, seconds: float) -> tuple[float, float]:
    """Return the utilization that the benchmark and fio measure."""
    (folder / "workload.yaml").write_text(WORKLOAD.format(seconds=seconds))
    options = ("--accelerators", accelerators, "--workload", "workload.yaml", "--seconds", "4", "--fio")
    result = answer("storage", "benchmark", ".", *options, cwd=folder)
    assert result["direct"], "reads from memory would not be throttled"
    fio = result["fio"]
    assert fio["agrees"] is (fio["difference_points"] <= MAX_DIFFERENCE_POINTS)
    return fio["utilization"], fio["fio_utilization"]


@pytest.mark.long
@needs_fio
def test_fast_storage_gives_the_utilization_of_fio(tmp_path: Path) -> None:
    # The step is long, so that delays of a busy CPU are small.
    own, fio = compare_with_fio(tmp_path, accelerators=1, seconds=0.5)
    assert 100 * abs(own - fio) <= MAX_DIFFERENCE_POINTS
    assert own > 0.9


@pytest.mark.long
@needs_fio
def test_slow_storage_gives_the_utilization_of_fio(tmp_path: Path) -> None:
    with throttle_reads(tmp_path):
        own, fio = compare_with_fio(tmp_path, accelerators=2, seconds=0.1)
    assert 100 * abs(own - fio) <= MAX_DIFFERENCE_POINTS
    # The storage is the bottleneck: 2 × 4 × 110,592 bytes per step.
    assert own == pytest.approx(0.1 * THROTTLED_BYTES_PER_SECOND / (2 * 4 * 110_592), abs=0.05)


def test_missing_fio_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    error = refusal(1, "storage", "benchmark", tmp_path, "--accelerators", "1", "--fio", cwd=tmp_path)
    assert (error["kind"], error["message"]) == ("engine_missing", "fio is not installed")
