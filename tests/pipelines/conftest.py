"""One whole run of the tiny customization, shared by the tests of its results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.project import run, write_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with raw data and a tiny model."""
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def first(project: Path) -> dict[str, Any]:
    """The JSON result of the first run, whose workdir is `wd` in the project.

    `costs` is a copy of the artifacts' costs: a later run that makes the same artifact again overwrites them.
    """
    result = run(project, "wd")
    shutil.copytree(project / "wd" / "store" / "costs", project / "costs")
    return result
