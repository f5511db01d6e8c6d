"""What work cost is counted and kept beside the artifact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from components.common import cost

BUSY = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def test_cpu_time_counts_children_that_were_waited_for() -> None:
    clock = cost.Clock()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    spent = clock.read()
    assert spent["cpu_seconds"] >= 0.3
    assert spent["seconds"] > 0
    assert spent["gpu_seconds"] == 0, "nothing here used a GPU"


def test_a_cost_is_found_again_by_the_artifact_and_unknown_otherwise(tmp_path: Path) -> None:
    cost.keep(tmp_path, "fine_tuning", "a" * 64, {"seconds": 2.0, "cpu_seconds": 3.5, "gpu_seconds": 0.0})
    assert cost.known(tmp_path, "a" * 64) == {"seconds": 2.0, "cpu_seconds": 3.5, "gpu_seconds": 0.0}
    assert cost.known(tmp_path, "b" * 64) is None
