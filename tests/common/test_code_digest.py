"""Cache keys cover the import closure of a stage. The tests parse a copy of the sources."""

from __future__ import annotations

import ast
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from components.common.artifacts import code_digest

STAGES = ("data_curation", "data_versioning", "fine_tuning", "evaluation", "triton_packaging", "model_registry")
CHECKOUT = code_digest.ROOT
parse_file = code_digest._find_imported_names.__wrapped__


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the first-party sources and compute digests from the copy."""
    for package in code_digest.FIRST_PARTY:
        shutil.copytree(CHECKOUT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    monkeypatch.setattr(code_digest, "_find_imported_names", lambda path: find_imported_names(path.read_bytes()))
    yield tmp_path
    code_digest.code_sha256.cache_clear()


@cache
def find_imported_names(content: bytes) -> frozenset[str]:
    """Parse equal content once: most files are equal in all digests of these tests."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return parse_file(Path(file.name))


def compute_digest(stage: str) -> str:
    code_digest.code_sha256.cache_clear()
    return code_digest.code_sha256(stage)


def list_modules_called_by_component(stage: str) -> list[Path]:
    """Return the modules of the stage that its component function imports."""
    folder = CHECKOUT / "components" / stage
    nodes = ast.walk(ast.parse((folder / "component.py").read_text()))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return [
        CHECKOUT.joinpath(*name.split(".")).with_suffix(".py")
        for name in names
        if name.startswith(f"components.{stage}.")
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_change_inside_import_closure_changes_key(stage: str, sources: Path) -> None:
    before = compute_digest(stage)
    files, _ = code_digest.import_closure(stage)
    first_party_below_common = sorted(path for path in files if path.is_relative_to(sources / "components" / "common"))
    called = [sources / path.relative_to(CHECKOUT) for path in list_modules_called_by_component(stage)]
    assert called
    component = sources / "components" / stage / "component.py"
    for path in (component, *called, first_party_below_common[-1]):
        text = path.read_text()
        path.write_text(text + "# one more byte\n")
        assert compute_digest(stage) != before, path
        path.write_text(text)
    assert compute_digest(stage) == before


@pytest.mark.parametrize("stage", STAGES)
def test_change_outside_import_closure_keeps_key(stage: str, sources: Path) -> None:
    before = compute_digest(stage)
    files, _ = code_digest.import_closure(stage)
    outside = [path for path in sorted((sources / "components").rglob("*.py")) if path not in files]
    assert outside, "the closure holds every module"
    for path in outside:
        path.write_text(path.read_text() + "# one more byte\n")
    assert compute_digest(stage) == before


def test_slurm_modules_are_in_training_closure_only(sources: Path) -> None:
    slurm = sources / "components" / "common" / "launch" / "slurm"
    users = {stage for stage in STAGES if any(slurm in path.parents for path in code_digest.import_closure(stage)[0])}
    assert users == {"fine_tuning"}
    launch = sources / "components" / "common" / "launch"
    names = {path.name for path in code_digest.import_closure("fine_tuning")[0] if path.parent == launch}
    assert "array_submission.py" in names  # imported by the sweep only


def test_names_found_by_patterns_include_those_of_the_syntax_tree() -> None:
    for path in (file for package in code_digest.FIRST_PARTY for file in (CHECKOUT / package).rglob("*.py")):
        expected: set[str] = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Import():
                    expected.update(alias.name for alias in node.names)
                case ast.ImportFrom(module=str(module), level=0):
                    expected.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
                case ast.Constant(value=str(text)) if text.startswith("components.") and not text.endswith("."):
                    expected.add(text)
                case ast.Call(func=ast.Attribute(attr=function)) if function in code_digest.LOADERS:
                    expected.update(str(value.value) for value in node.args if isinstance(value, ast.Constant))
        found = code_digest._find_imported_names(path)
        assert found >= expected, path
        first_party = {name for name in found - expected if name.startswith(("components.", "pipelines.", "data."))}
        assert not any(CHECKOUT.joinpath(*name.split(".")).with_suffix(".py").exists() for name in first_party), path


def test_imports_inside_functions_and_modules_run_by_name_are_followed(sources: Path) -> None:
    files, packages = code_digest.import_closure("data_curation")
    names = {path.relative_to(sources).as_posix() for path in files}
    assert "components/data_curation/engine.py" in names  # started with `python -m`
    assert {"daft", "pyarrow", "ftfy"} <= packages  # imported inside functions


def test_every_recorded_package_is_in_the_key_of_some_stage() -> None:
    closures = set().union(*(code_digest.import_closure(stage)[1] for stage in STAGES))
    imported = {name.replace("_", "-").lower() for name in closures}
    runtime_packages = {"kfp"}  # runs the steps and computes nothing
    assert set(code_digest.RESULT_PACKAGES) - imported == runtime_packages


def test_backends_that_triton_imports_by_path_are_in_the_packaging_key(sources: Path) -> None:
    before = compute_digest("triton_packaging")
    model = sources / "components" / "triton_packaging" / "python_backend" / "model.py"
    model.write_text(model.read_text() + "# one more byte\n")
    assert compute_digest("triton_packaging") != before


def test_installed_versions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compute_digest("fine_tuning")
    monkeypatch.setattr(code_digest, "get_installed_versions", lambda names: dict.fromkeys(names, "0"))
    assert compute_digest("fine_tuning") != before
    code_digest.code_sha256.cache_clear()
