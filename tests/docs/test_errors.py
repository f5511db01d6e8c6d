"""docs/errors.md names every kind of error, with its exit code."""

from __future__ import annotations

import importlib
import re

from components.common.errors import TunelineError
from tests.pipelines.command import ROOT

ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| ", re.MULTILINE)
BACKENDS = ("python_backend", "vllm_backend")  # imported by Triton only
SAID_IN_PLACE = {"system": 1, "unexpected": 1}  # given to an error where it is caught, not by a class


def every_class(parent: type[TunelineError]) -> set[type[TunelineError]]:
    return {parent}.union(*(every_class(child) for child in parent.__subclasses__()))


def test_every_kind_stands_on_the_page_with_its_exit_code() -> None:
    sources = [path for folder in ("components", "pipelines") for path in (ROOT / folder).rglob("*.py")]
    for path in sources:
        if path.parent.name not in BACKENDS and re.search(r"^class \w+Error\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    kinds = {
        found.kind: found.exit_code for found in every_class(TunelineError) if found.__module__.startswith(("components", "pipelines"))
    }
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").partition("## All kinds")[2]
    assert {kind: int(code) for kind, code in ROW.findall(page)} == {**kinds, **SAID_IN_PLACE}
