"""hashes.txt: its agreement with constraints.txt, and the files that pip refuses. `make images-check` builds images with it.

The test marked `long` installs the pip of hashes.txt from the package index.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.tags import Tag
from packaging.utils import canonicalize_name

from images import hashes, sbom
from tests.pipelines.command import ROOT

LINE = re.compile(r"([a-z0-9-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")


def read_versions() -> dict[str, str]:
    """Return the versions in hashes.txt by canonical name; every line must contain a hash."""
    lines = [line for line in (ROOT / "hashes.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    matches = [LINE.fullmatch(line) for line in lines]
    assert len(lines) > 300
    assert [line for line, match in zip(lines, matches, strict=True) if not match] == []
    return {match[1]: match[2] for match in matches if match}


def test_hashes_and_constraints_have_the_same_versions() -> None:
    constraints = {
        canonicalize_name(name): version for name, version in (line.split("==") for line in hashes.read_constraints())
    }
    versions = read_versions()
    assert {name: (version, constraints.get(name)) for name, version in versions.items()} == {
        name: (version, version) for name, version in versions.items()
    }, "run make hashes, or pin the new packages in constraints.txt"


def test_all_packages_of_tuneline_have_hashes() -> None:
    required = set(sbom.resolve_packages("tuneline[all]")) - {"tuneline"}
    assert required - set(read_versions()) == set()


def test_source_archive_is_allowed_only_without_a_wheel_for_a_target() -> None:
    targets = [{Tag("cp311", "cp311", "manylinux_2_17_x86_64")}, {Tag("cp311", "cp311", "manylinux_2_17_aarch64")}]
    wheel = "https://files.example/a-1-cp311-cp311-manylinux_2_17_{}.whl"
    wheels = [{"url": wheel.format(machine), "hash": machine} for machine in ("x86_64", "aarch64", "riscv64")]
    package = {"wheels": wheels, "sdist": {"hash": "source"}}
    assert list(hashes.list_hashes(package, targets)) == ["x86_64", "aarch64"]
    assert list(hashes.list_hashes(package | {"wheels": wheels[:1]}, targets)) == ["x86_64", "source"]


def make_wheel(folder: Path, name: str, requires: str = "") -> Path:
    """Write a wheel of one module."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


Install = Callable[[], subprocess.CompletedProcess[str]]


@pytest.fixture
def pinned_install(tmp_path: Path) -> Install:
    """Install an unpinned package whose dependency is only in the constraints, as install.sh does."""
    (line,) = [text for text in (ROOT / "hashes.txt").read_text().splitlines() if text.startswith("pip==")]
    (tmp_path / "pip.txt").write_text(line)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--target", str(tmp_path / "pip"), "-r", str(tmp_path / "pip.txt")], check=True, timeout=300)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        **{"PYTHONPATH": str(tmp_path / "pip"), "PIP_CONFIG_FILE": os.devnull, "PIP_REQUIRE_HASHES": "1"},
        **{"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    }
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--target",
        str(tmp_path / "site"),
        "-c",
        str(tmp_path / "hashes.txt"),
    ]
    return lambda: subprocess.run(
        [*command, "first"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.long
def test_pip_refuses_a_dependency_with_another_hash_or_without_one(tmp_path: Path, pinned_install: Install) -> None:
    (tmp_path / "wheels").mkdir()
    wheels = [make_wheel(tmp_path / "wheels", "first", "second>=1"), make_wheel(tmp_path / "wheels", "second")]
    lines = [
        f"{wheel.name[:-21]}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n" for wheel in wheels
    ]
    (tmp_path / "hashes.txt").write_text(lines[0] + "second==1.0\n")
    result = pinned_install()
    assert result.returncode != 0
    assert "In --require-hashes mode, all requirements must have their versions pinned" in result.stderr

    (tmp_path / "hashes.txt").write_text("".join(lines))
    original = wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[1], "a") as archive:
        archive.writestr("second_tampered.py", "")
    result = pinned_install()
    assert result.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in result.stderr
    assert "second==1.0" in result.stderr or "second>=1" in result.stderr

    wheels[1].write_bytes(original)
    result = pinned_install()
    assert result.returncode == 0, result.stderr
