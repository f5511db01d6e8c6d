"""Packages that a step can import, determined from the sources without importing them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.pipelines.command import ROOT

FIRST_PARTY = ("components", "pipelines")
# Modules that run with the packages of an environment of their own.
OTHER_ENVIRONMENTS = {"components.common.models.calibration_worker"}


def third_party_imports(source: str) -> set[str]:
    """Return the third-party packages that a source imports directly or through first-party modules, also inside functions."""
    pending, visited, third_party = set(_imported_names(ast.parse(source), "")), set[str](), set[str]()
    while pending:
        name = pending.pop()
        top = name.partition(".")[0]
        if top in FIRST_PARTY:
            own_modules = (
                {module for module in _with_packages(name) if _source_file(module)} - visited - OTHER_ENVIRONMENTS
            )
            visited |= own_modules
            pending |= {imported for module in own_modules for imported in _imports_of(module)}
        elif top not in sys.stdlib_module_names:
            third_party.add(top)
    return third_party


def _with_packages(name: str) -> Iterator[str]:
    """Yield a dotted name and its parent packages, which an import runs too."""
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _source_file(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


@cache
def _imports_of(module: str) -> frozenset[str]:
    file = _source_file(module)
    assert file is not None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(_imported_names(ast.parse(file.read_text(encoding="utf-8")), package))


def _imported_names(tree: ast.AST, package: str) -> Iterable[str]:
    """Yield all imported names. `from a import b` may import the module a.b, so both count."""
    typing_only = {id(node) for statement in _typing_blocks(tree) for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parent, *filter(None, [node.module])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("components."):
            yield node.value  # a module that a child process runs


def _typing_blocks(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body
