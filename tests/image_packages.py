"""Environments that hold what an image would hold, and nothing else of the environment that the tests run in.

Such an environment is a virtual one whose packages are links to those installed here: the distributions that an image's extras ask for, and
what those ask for in turn, found by their metadata as pip finds them. Of a folder that several distributions share (google, nvidia) it has
all that is here.
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

HERE = Path(sysconfig.get_path("purelib"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def installed(folder: Path) -> Path:
    """tuneline as its wheel would be unpacked: the packages it names, and nothing of the checkout around them. Returns the folder."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def environment(folder: Path, tuneline: Path, extras: Iterable[str], more: Iterable[str] = ()) -> Path:
    """Make a virtual environment with tuneline and what its extras ask for. `more`: distributions installed without what they ask for.

    `tuneline` is the folder of `installed`. Returns the environment's folder; its python3 is bin/python3.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    entries = {entry for name in [*_closure(extras), *more] for entry in _entries(name)}
    for entry in sorted(entries):
        (site / entry).symlink_to(HERE / entry)
    for name in PACKAGES:
        (site / name).symlink_to(tuneline / name)
    return folder


def variables(folder: Path, home: Path) -> dict[str, str]:
    """What an image sets: where its programs are, and a home for whoever runs it."""
    return {"PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}


def _closure(extras: Iterable[str]) -> set[str]:
    """The installed distributions that tuneline asks for with these extras, and what those ask for."""
    found: dict[str, frozenset[str]] = {}
    waiting = _own(extras)
    while waiting:
        wanted = waiting.pop()
        name, asked = re.sub(r"[-_.]+", "-", wanted.name).lower(), frozenset(wanted.extras)
        if not _is_installed(name) or (name in found and asked <= found[name]):
            continue
        found[name] = asked | found.get(name, frozenset())
        waiting += _chosen(importlib.metadata.requires(name) or [], found[name])
    return set(found)


def _own(extras: Iterable[str]) -> list[Requirement]:
    """What tuneline asks for with these extras; an extra may name another."""
    optional, project = PROJECT["project"]["optional-dependencies"], PROJECT["project"]
    said = _chosen([*project["dependencies"], *(text for extra in extras for text in optional[extra])], frozenset())
    inner = [extra for one in said if one.name == "tuneline" for extra in one.extras]
    return [one for one in said if one.name != "tuneline"] + (_own(inner) if inner else [])


def _chosen(said: Iterable[str], extras: frozenset[str]) -> list[Requirement]:
    """The requirements that count on this machine, with these extras."""
    found = [Requirement(text) for text in said]
    return [one for one in found if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))]


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _entries(name: str) -> set[str]:
    """What a distribution has put into the folder of packages."""
    first = {file.parts[0] for file in importlib.metadata.files(name) or []}
    return {entry for entry in first if entry not in ("..", "__pycache__") and (HERE / entry).exists()}
