"""One whole run of the tiny customization, shared by the tests of its results, and its digests for all workers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from components.common.artifacts import artifact_folder
from tests.pipelines.project import run, write_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with raw data and a tiny model."""
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def digests_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the digests of the first run, shared by all workers. A lock on it is held during the run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "first_digests.json"


@pytest.fixture(scope="session")
def first(project: Path, digests_file: Path) -> dict[str, Any]:
    """The JSON result of the first run, whose workdir is `wd` in the project.

    Its umask is that of a team whose members share the workdir. `costs` is a copy of the artifacts' costs: a later run
    that makes the same artifact again overwrites them.
    """
    with FileLock(f"{digests_file}.lock"):
        umask = os.umask(0o002)
        try:
            result = run(project, "wd", preloaded=digests_file.exists())  # the first of the session as users do
        finally:
            os.umask(umask)
        artifacts = result["artifacts"].items()
        digests_file.write_text(json.dumps({k: artifact_folder.read(Path(path), k).sha256 for k, path in artifacts}))
    shutil.copytree(project / "wd" / "store" / "costs", project / "costs")
    return result


@pytest.fixture(scope="session")
def first_digests(request: pytest.FixtureRequest, digests_file: Path) -> dict[str, str]:
    """The digests of the first run's artifacts by kind, of this worker or another: they depend on no path."""

    def read() -> str:
        with FileLock(f"{digests_file}.lock"):  # waits for a run, and for the end of a write
            return digests_file.read_text() if digests_file.exists() else ""

    if not read():
        request.getfixturevalue("first")
    digests: dict[str, str] = json.loads(read())
    return digests
