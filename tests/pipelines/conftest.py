"""One whole run of the tiny customization, shared by all who look at what came of it."""

from __future__ import annotations

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
    """The object that the first run printed; its workdir is `wd` in the project."""
    return run(project, "wd")
