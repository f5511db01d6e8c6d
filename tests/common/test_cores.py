"""The cores a process may use, under the limits that containers are given."""

from __future__ import annotations

import os
import platform

import pytest

from components.common import cores

MACHINE = 16


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MACHINE)))
    monkeypatch.delenv("TUNELINE_THREADS", raising=False)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("3200000 100000", 16), ("", 16)],
)
def test_a_quota_of_processor_time_is_told_in_whole_cores(tmp_path, limit, expected):
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert cores.available(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 16), (250000, 3)])
def test_so_is_that_of_the_first_version_of_control_groups(tmp_path, quota, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.available(tmp_path) == expected


def test_without_control_groups_all_cores_of_the_affinity_mask_count(tmp_path):
    assert cores.available(tmp_path) == MACHINE


def test_a_number_that_was_set_holds_whatever_the_limit_is(monkeypatch):
    monkeypatch.setenv("TUNELINE_THREADS", "3")
    assert cores.threads() == 3


def test_the_processor_is_called_as_it_calls_itself_and_else_by_its_architecture(tmp_path):
    named = tmp_path / "named"
    named.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t: fpu\n\nprocessor\t: 1\nmodel name\t: other\n")
    assert cores.processor(named) == "AMD EPYC 7763 64-Core Processor"
    (tmp_path / "nameless").write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cores.processor(tmp_path / "nameless") == platform.machine()
    assert cores.processor(tmp_path / "none") == platform.machine()
