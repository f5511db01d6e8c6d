"""Number of usable CPU cores under cgroup limits and affinity masks."""

from __future__ import annotations

import os
import platform

import pytest

from components.common.runtime import cpu_cores

MACHINE_CORES = 16


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MACHINE_CORES)))
    monkeypatch.delenv("TUNELINE_THREADS", raising=False)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 16),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("3200000 100000", 16),
        ("", 16),
    ],
)
def test_cgroup_v2_quota_is_rounded_up_to_cores(tmp_path, limit, expected):
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert cpu_cores.count_available_cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 16), (250000, 3)])
def test_cgroup_v1_quota_is_rounded_up_to_cores(tmp_path, quota, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_cores.count_available_cores(tmp_path) == expected


def test_without_cgroups_affinity_mask_counts(tmp_path):
    assert cpu_cores.count_available_cores(tmp_path) == MACHINE_CORES


def test_thread_variable_overrides_limits(monkeypatch):
    monkeypatch.setenv("TUNELINE_THREADS", "3")
    assert cpu_cores.get_thread_count() == 3


def test_processor_name_or_architecture(tmp_path):
    named = tmp_path / "named"
    named.write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t: fpu\n\nprocessor\t: 1\nmodel name\t: other\n"
    )
    assert cpu_cores.get_processor_name(named) == "AMD EPYC 7763 64-Core Processor"
    (tmp_path / "nameless").write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cpu_cores.get_processor_name(tmp_path / "nameless") == platform.machine()
    assert cpu_cores.get_processor_name(tmp_path / "none") == platform.machine()
