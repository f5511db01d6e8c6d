"""docs/reference/errors.md lists every error kind with its exit code."""

from __future__ import annotations

import importlib
import re

from components.common.runtime.errors import TunelineError
from tests.pipelines.command import ROOT

ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| ", re.MULTILINE)
BACKENDS = ("python_backend", "vllm_backend")  # imported by Triton only
KINDS_WITHOUT_CLASS = {"system": 1, "unexpected": 1}  # assigned where the error is caught, not by a class


def collect_classes(parent: type[TunelineError]) -> set[type[TunelineError]]:
    return {parent}.union(*(collect_classes(child) for child in parent.__subclasses__()))


def test_page_lists_every_kind_with_its_exit_code() -> None:
    sources = [path for folder in ("components", "pipelines") for path in (ROOT / folder).rglob("*.py")]
    for path in sources:
        if path.parent.name not in BACKENDS and re.search(
            r"^class \w+Error\(", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    kinds = {
        error_class.kind: error_class.exit_code
        for error_class in collect_classes(TunelineError)
        if error_class.__module__.startswith(("components", "pipelines"))
    }
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8").partition("## All kinds")[2]
    assert {kind: int(code) for kind, code in ROW.findall(page)} == {**kinds, **KINDS_WITHOUT_CLASS}
