"""One whole run of the tiny customization, shared by all who look at what came of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.project import run, write_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder."""
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def first(project: Path) -> dict[str, Any]:
    """The object that the first run printed; its workdir is `wd` in the project. What its artifacts cost is kept in `costs`, because a
    later run that makes the same artifact once more says what it cost then."""
    result = run(project, "wd")
    shutil.copytree(project / "wd" / "store" / "costs", project / "costs")
    return result
