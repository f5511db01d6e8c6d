"""Virtual environments with the packages of an image and no others.

The packages are symlinks to those of the test environment: the distributions that an image's extras require, directly or indirectly,
resolved from their metadata. A namespace folder that several distributions share (google, nvidia) is linked as a whole.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from tests.pipelines.command import ROOT

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def copy_packages(folder: Path) -> Path:
    """Copy the packages of the tuneline wheel into `folder` and return it."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def create_environment(folder: Path, tuneline: Path, extras: Iterable[str], more: Iterable[str] = ()) -> Path:
    """Create a virtual environment with tuneline and the requirements of its extras; return its folder.

    `tuneline` is the folder of `copy_packages`. `more` names distributions to add without their requirements.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    entries = {entry for name in [*_required_distributions(extras), *more] for entry in _site_entries(name)}
    for entry in sorted(entries):
        (site / entry).symlink_to(SITE_PACKAGES / entry)
    for name in PACKAGES:
        (site / name).symlink_to(tuneline / name)
    return folder


def image_variables(folder: Path, home: Path) -> dict[str, str]:
    """Return the environment variables that an image sets."""
    return {"PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}


def _required_distributions(extras: Iterable[str]) -> set[str]:
    """Return the installed distributions that tuneline with these extras requires, directly or indirectly."""
    extras_by_name: dict[str, frozenset[str]] = {}
    pending = _direct_requirements(extras)
    while pending:
        requirement = pending.pop()
        name, requested_extras = re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras)
        if not _is_installed(name) or (name in extras_by_name and requested_extras <= extras_by_name[name]):
            continue
        extras_by_name[name] = requested_extras | extras_by_name.get(name, frozenset())
        pending += _applicable_requirements(importlib.metadata.requires(name) or [], extras_by_name[name])
    return set(extras_by_name)


def _direct_requirements(extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements of tuneline with these extras; an extra may include another."""
    optional, project = PROJECT["project"]["optional-dependencies"], PROJECT["project"]
    requirements = _applicable_requirements(
        [*project["dependencies"], *(text for extra in extras for text in optional[extra])], frozenset()
    )
    nested_extras = [
        extra for requirement in requirements if requirement.name == "tuneline" for extra in requirement.extras
    ]
    return [requirement for requirement in requirements if requirement.name != "tuneline"] + (
        _direct_requirements(nested_extras) if nested_extras else []
    )


def _applicable_requirements(texts: Iterable[str], extras: frozenset[str]) -> list[Requirement]:
    """Return the requirements whose markers apply on this machine with these extras."""
    requirements = [Requirement(text) for text in texts]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _site_entries(name: str) -> set[str]:
    """Return the entries of a distribution in site-packages."""
    top_level = {file.parts[0] for file in importlib.metadata.files(name) or []}
    return {entry for entry in top_level if entry not in ("..", "__pycache__") and (SITE_PACKAGES / entry).exists()}
