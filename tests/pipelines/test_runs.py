"""One run at a time in a workdir, and a killed one is recognised."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common import process
from components.common.errors import UsageError
from components.common.places import Workdir
from pipelines import runs


def test_a_second_run_in_a_workdir_is_refused_with_the_process_that_holds_it(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from components.common.places import Workdir; from pipelines import runs\n"
        "with runs.exclusive(Workdir(Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    environment = process.python_environment(PYTHONPATH=str(root))
    child = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"another run \\(process {child.pid}\\)") as error, runs.exclusive(Workdir(tmp_path)):
            pass
        assert "--workdir" in error.value.hint
        child.kill()
        while Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
        with runs.exclusive(Workdir(tmp_path)):  # killed, and not yet waited for: a zombie holds nothing
            assert (tmp_path / "lock.json").exists()
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("left", ['{"pid": 1, "started": 0.0}', "", "{", '{"pid": 4194303, "started": 1.0}'])
def test_a_lock_that_a_dead_process_left_is_taken_over(tmp_path: Path, left: str) -> None:
    (tmp_path / "lock.json").write_text(left)
    with runs.exclusive(Workdir(tmp_path)):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] > 0
