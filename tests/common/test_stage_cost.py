"""Measurement and storage of the cost of a stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from components.common.cost import stage_cost

BUSY_PROGRAM = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def test_cpu_time_includes_waited_children() -> None:
    clock = stage_cost.CostClock()
    subprocess.run([sys.executable, "-c", BUSY_PROGRAM], check=True)
    spent = clock.read()
    assert spent["cpu_seconds"] >= 0.3
    assert spent["seconds"] > 0
    assert spent["gpu_seconds"] == 0, "nothing here used a GPU"


def test_recorded_cost_is_read_back_by_artifact(tmp_path: Path) -> None:
    stage_cost.record_cost(tmp_path, "fine_tuning", "a" * 64, {"seconds": 2.0, "cpu_seconds": 3.5, "gpu_seconds": 0.0})
    assert stage_cost.read_cost(tmp_path, "a" * 64) == {"seconds": 2.0, "cpu_seconds": 3.5, "gpu_seconds": 0.0}
    assert stage_cost.read_cost(tmp_path, "b" * 64) is None
