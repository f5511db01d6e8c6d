"""The code of docs/reference/python-api.md, as one program.

Long tier: a whole run, a second proof of its package and a server start.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import preloaded_server
from tests.pipelines.command import ROOT, environment
from tests.pipelines.project import CONFIGURATION, write_project

PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHECKS = """
import json
print(json.dumps({"run": result.as_dict(), "dataset": dataset.sha256, "model": model.sha256}, default=str))
"""


@pytest.mark.long
@pytest.mark.pipeline
def test_page_runs(tmp_path: Path) -> None:
    settings = yaml.safe_load(CONFIGURATION)
    settings["evaluation"] |= {"suite": "none", "generations": 0}
    settings["model_registry"] = {"name": "helper"}
    (write_project(tmp_path) / "customization.yaml").write_text(yaml.safe_dump(settings))
    blocks = PYTHON_BLOCK.findall((ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8"))
    assert len(blocks) == 5
    process = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join([*blocks, CHECKS])],
        cwd=tmp_path,
        env=environment(**preloaded_server.get_variables("PRELOADED_STEPS")),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    last = json.loads(process.stdout.splitlines()[-1])
    artifacts = last["run"]["artifacts"]
    assert (last["dataset"], last["model"]) == (Path(artifacts["dataset"]).name, Path(artifacts["model"]).name)
    assert last["run"]["verdict"] == "accepted"  # so that the page has served and packaged the model
    assert "True\nTrue\n" in process.stdout  # an intact lineage, and a clean audit
    assert Path(last["run"]["report"]).exists()
