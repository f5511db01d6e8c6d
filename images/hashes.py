"""Write hashes.txt: the pins of constraints.txt that images can install, each with the SHA-256 hashes of its files on the package index.

python -m images.hashes

uv resolves the extras of pyproject.toml for Linux on x86-64 and aarch64 with every supported Python. Run this command after a change of either file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "hashes.txt"
PYTHONS, MACHINES = ((3, 11), (3, 12), (3, 13)), ("x86_64", "aarch64")
NEWEST_GLIBC_MINOR = 39  # Ubuntu 24.04, the newest of the base images
NOT_IN_IMAGES = ("dev", "docs", "engines")
BUILD_TOOLS = ["pip", "setuptools", "wheel"]  # pip installs the packages; the others build those without a wheel
HEADER = """# `make hashes` writes this file: constraints.txt with hashes of the files for Linux on x86-64 and aarch64 with Python 3.11 to 3.13.
# pip 26 or later checks these hashes with -c hashes.txt --require-hashes.
"""


def read_constraints() -> list[str]:
    """Return the requirements of constraints.txt without comments."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line]


def write_project(folder: Path) -> None:
    """Write a project for uv that requires all extras of tuneline at the versions of constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: listed for name, listed in project["optional-dependencies"].items() if name not in NOT_IN_IMAGES}
    environments = [f"sys_platform == 'linux' and platform_machine == '{machine}'" for machine in MACHINES]
    # A JSON list of strings is also a TOML array.
    lines = ["[project]", 'name = "tuneline"', 'version = "0"', f'requires-python = "{project["requires-python"]}"']
    lines += [f"dependencies = {json.dumps(project['dependencies'] + BUILD_TOOLS)}", "[project.optional-dependencies]"]
    lines += [f"{name} = {json.dumps(listed)}" for name, listed in extras.items()]
    lines += ["[tool.uv]", f"constraint-dependencies = {json.dumps(read_constraints())}"]
    lines += [f"environments = {json.dumps(environments)}"]
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def list_target_tags() -> list[set[Tag]]:
    """Return the wheel tags that each combination of Python and machine accepts."""
    targets = []
    for version, machine in product(PYTHONS, MACHINES):
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, NEWEST_GLIBC_MINOR + 1)]
        platforms += [f"{name}_{machine}" for name in ("manylinux1", "manylinux2010", "manylinux2014", "linux")]
        interpreter = f"cp{version[0]}{version[1]}"
        specific = cpython_tags(version, [interpreter], platforms)
        targets.append({*specific, *compatible_tags(version, interpreter, platforms)})
    return targets


def list_hashes(package: dict[str, Any], targets: list[set[Tag]]) -> Iterator[str]:
    """Yield the hashes of the package's wheels for any target, and of its source archive if a target has no wheel."""
    uncovered = list(targets)
    for wheel in package.get("wheels", []):
        tags = parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]
        if any(tags & target for target in targets):
            yield wheel["hash"]
        uncovered = [target for target in uncovered if not tags & target]
    if uncovered and "sdist" in package:
        yield package["sdist"]["hash"]


def main() -> None:
    """Resolve with uv and write hashes.txt."""
    with tempfile.TemporaryDirectory() as folder:
        write_project(Path(folder))
        subprocess.run([str(Path(sys.executable).with_name("uv")), "lock", "--quiet", "--project", folder], check=True)
        packages = tomllib.loads((Path(folder) / "uv.lock").read_text(encoding="utf-8"))["package"]
    targets = list_target_tags()
    lines = []
    for package in packages:
        if package["name"] != "tuneline":
            hashes = sorted(set(list_hashes(package, targets)))
            lines.append(
                " ".join([f"{package['name']}=={package['version']}", *(f"--hash={digest}" for digest in hashes)])
            )
    OUTPUT.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
