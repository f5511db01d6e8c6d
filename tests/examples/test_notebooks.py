"""The notebooks in `examples/notebooks`: the committed outputs, and an execution by a Jupyter kernel.

Fast tier: the committed files. Long tier: the sizes, because the kernel is in the extra `engines`. Stress tier: the
customization, which trains the embedded model twice (10 minutes).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.command import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users)/")
MAX_BYTES, CELL_SECONDS = 500_000, 900
Json = dict[str, Any]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read_code_cells(path: Path) -> list[Json]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def execute(path: Path) -> list[Json]:
    """Execute a notebook in its folder, with a kernel of this environment, and return the code cells."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=CELL_SECONDS, record_timing=False, resources=resources).execute()
    nbformat.write(notebook, path)
    return read_code_cells(path)


def show(cell: Json) -> str:
    """Return the outputs of a cell, as HTML where they have it."""
    bundles = (output.get("data") or {"text/plain": output["text"]} for output in cell["outputs"])
    return "".join("".join(bundle.get("text/html") or bundle["text/plain"]) for bundle in bundles)


@each_notebook
def test_notebook_was_executed_once_from_top_to_bottom(path: Path) -> None:
    cells = read_code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert all(cell["outputs"] for cell in cells), "each cell shows something"
    assert not MACHINE_PATH.search(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.long
def test_sizes_in_the_notebook_are_those_of_the_code(tmp_path: Path) -> None:
    path = ROOT / "examples" / "notebooks" / "size.ipynb"
    executed = execute(Path(shutil.copy(path, tmp_path)))
    assert [cell["outputs"] for cell in executed] == [cell["outputs"] for cell in read_code_cells(path)]


@pytest.mark.stress
@pytest.mark.pipeline
@pytest.mark.timeout(4 * CELL_SECONDS)
def test_customize_notebook_runs_compares_and_serves(tmp_path: Path) -> None:
    for name in ("notebooks", "support-chat"):
        shutil.copytree(ROOT / "examples" / name, tmp_path / name, ignore=shutil.ignore_patterns("tickets"))
    _, _, run, comparison, versions, answer = execute(tmp_path / "notebooks" / "customize.ipynb")
    assert re.search("<td>verdict</td><td[^>]*>accepted</td>", show(run))
    assert "<td>fine_tuning.learning_rate</td>" in show(comparison)
    assert show(versions).count("<td>proven</td>") == 2
    assert len(show(answer).split()) > 5
