"""Which modules a step can come to import: read from the sources, without importing anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.pipelines.command import ROOT

OWN = ("components", "pipelines", "data")


def reached(source: str) -> set[str]:
    """Top-level names of the modules of others that this source imports, or anything of ours that it leads to; also within functions."""
    names, seen, others = set(_imported(ast.parse(source), "")), set[str](), set[str]()
    while names:
        name = names.pop()
        top = name.partition(".")[0]
        if top in OWN:
            ours = {module for module in _with_packages(name) if _file(module)} - seen
            seen |= ours
            names |= {found for module in ours for found in _imports_of(module)}
        elif top not in sys.stdlib_module_names:
            others.add(top)
    return others


def _with_packages(name: str) -> Iterator[str]:
    """A dotted name and the packages it is in: importing it runs them all."""
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _file(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


@cache
def _imports_of(module: str) -> frozenset[str]:
    file = _file(module)
    assert file is not None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(_imported(ast.parse(file.read_text(encoding="utf-8")), package))


def _imported(tree: ast.AST, package: str) -> Iterable[str]:
    """Every name an import statement names. `from a import b` may mean the module a.b: both count."""
    typing_only = {id(node) for test in _typing_blocks(tree) for node in ast.walk(test)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def _typing_blocks(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body
