"""The comparison with fio, with a program in its place whose output is known. benchmarks/storage_utilization.py runs fio."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from components.common.runtime.errors import EngineMissingError, TunelineError, UsageError
from components.common.runtime.reporters import SilentReporter
from pipelines.operations.storage_benchmark import fio_check
from pipelines.operations.storage_benchmark.host_group import HostGroup
from pipelines.operations.storage_benchmark.phases import Benchmark, BenchmarkPlan
from pipelines.operations.storage_benchmark.rank_processes import PhaseResult
from pipelines.operations.storage_benchmark.rank_worker import READ_BYTES
from pipelines.operations.storage_benchmark.workloads import Workload

TINY = Workload("tiny", "test", 1, 16, 4096, 2, 0.005, "random", max_steps=6)


def measure_with_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, object]:
    """Compare a measured utilization of 0.5 with a script in the place of fio."""
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(fio_check, "find_fio", lambda: str(program))
    measured = {"steps": 5, "seconds": 0.05, "bytes": 40960, "first_step_seconds": 0.01}
    monkeypatch.setattr(Benchmark, "run", lambda _, tasks: PhaseResult([measured] * len(tasks), 0.0))
    benchmark = Benchmark(HostGroup(folder), BenchmarkPlan(TINY, 2), SilentReporter(), files={"training": ["a", "b:c"]})
    return fio_check.measure_with_fio(benchmark, 2)


@pytest.mark.parametrize(
    ("milliseconds", "fio", "points", "agrees"), [(120, 0.375, 12.5, False), (61, 0.4959, 0.41, True)]
)
def test_utilization_of_fio_is_computation_over_run_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, milliseconds: int, fio: float, points: float, agrees: bool
) -> None:
    """A job makes 6 steps of 5 ms, with the first one."""
    jobs = [{"error": 0, "job_runtime": 60}, {"error": 0, "job_runtime": milliseconds}]
    output = json.dumps({"fio version": "fio-3.33", "jobs": jobs})
    result = measure_with_fake(tmp_path, monkeypatch, f"echo \"$@\" > '{tmp_path}/options'; echo 'note {output}'")
    assert result == {
        "accelerators": 2,
        "utilization": 0.5,
        "fio_utilization": fio,
        "difference_points": points,
        "agrees": agrees,
        "fio": "fio-3.33",
    }
    options = (tmp_path / "options").read_text().split()
    expected = {"--io_size=49152", "--bs=4096", "--numjobs=2", "--thinktime=5000", "--thinktime_blocks=2"}
    assert expected <= set(options), "6 steps of 2 records per job"
    assert "--filename=a:b\\:c" in options


def test_failure_of_fio_is_reported_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TunelineError, match="fio failed: bad option"):
        measure_with_fake(tmp_path, monkeypatch, "echo bad option >&2; exit 1")


def test_comparison_that_fio_cannot_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in (BenchmarkPlan(TINY, readers=1), BenchmarkPlan(replace(TINY, record_bytes=READ_BYTES + 1), 1)):
        with pytest.raises(UsageError, match="--fio requires --accelerators, and records of at most 4 MiB"):
            fio_check.check_workload(plan)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(EngineMissingError, match="fio is not installed"):
        fio_check.check_workload(BenchmarkPlan(TINY, 1))
