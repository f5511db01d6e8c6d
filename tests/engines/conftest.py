"""Skip tests whose engine is not installed, or fail them if TUNELINE_ENGINES is `required`, as in CI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data_versioning.conftest import make_dataset
from tests.engines import cluster as cluster_kit
from tests.engines import postgresql, slurm_cluster
from tests.engines.chromium import Page, running_chromium
from tests.engines.cluster import Cluster
from tests.engines.s3_server import S3, run_server
from tests.model_registry.conftest import empty_store
from tests.pipelines.conftest import digests_file, first, first_digests, project

ENGINES_REQUIRED = os.environ.get("TUNELINE_ENGINES") == "required"
REQUIRED_PROGRAMS = {
    "s3": ("weed", "git"),
    "postgresql": ("curl", "openssl", *postgresql.REQUIRED_PROGRAMS),
    "slurm": slurm_cluster.REQUIRED_PROGRAMS,
    "chromium": ("chromium",),
    "tesseract": ("tesseract",),
    "softhsm": ("softhsm2-util",),
    "cluster": cluster_kit.REQUIRED_PROGRAMS,
    "registry": ("buildah", "skopeo", "docker-registry", "busybox"),
}
REQUIRED_PROGRAMS["slurmrestd"] = slurm_cluster.REST_PROGRAMS
REQUIRED_MODULES = {
    "s3": ("dvc_s3", "boto3"),
    "ray": ("ray",),
    "presidio": ("presidio_analyzer", "spacy"),
    "deepspeed": ("deepspeed",),
}
REQUIRED_MODULES["postgresql"] = ("psycopg2", "flask_wtf", "adbc_driver_postgresql")
__all__ = ["digests_file", "empty_store", "first", "first_digests", "make_dataset", "project"]


def find_missing(marker: str) -> str | None:
    """Return the programs and modules that tests with this marker need and this machine lacks."""
    search_path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", ""), *postgresql.list_program_folders(), "/usr/sbin"]
    )
    programs = [name for name in REQUIRED_PROGRAMS.get(marker, ()) if not shutil.which(name, path=search_path)]
    modules = [name for name in REQUIRED_MODULES.get(marker, ()) if importlib.util.find_spec(name) is None]
    plugins = [slurm_cluster.JWT_PLUGIN] if marker == "slurmrestd" and not slurm_cluster.has_jwt_plugin() else []
    return ", ".join([*programs, *modules, *plugins]) or None


def skip_or_fail(missing: str) -> None:
    """Fail the test if engines are required, else skip it; both name the missing engine."""
    debian_packages = (
        "postgresql, curl, openssl, slurm-wlm, slurmrestd, slurm-wlm-jwt-plugin, munge, chromium, tesseract-ocr, "
        "softhsm2, buildah, skopeo, docker-registry and busybox-static, "
        f"for a cluster {cluster_kit.DEBIAN_PACKAGES}"
    )
    message = f"{missing} is not installed: make test-all installs what PyPI carries, Debian's packages {debian_packages} the rest"
    pytest.fail(message) if ENGINES_REQUIRED else pytest.skip(message)


@pytest.fixture(autouse=True)
def require_engines(request: pytest.FixtureRequest) -> None:
    """Check the engines of every marker of the test."""
    for marker in request.node.iter_markers():
        if missing := find_missing(marker.name):
            skip_or_fail(missing)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One S3 server per test worker."""
    folder = tmp_path_factory.mktemp("s3")
    if missing := find_missing("s3"):
        skip_or_fail(missing)
    with run_server(Path(folder) / "server") as server:
        yield server


@pytest.fixture(scope="module")
def new_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Page]]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")  # with TUNELINE_ENGINES=required, the marker fails the test first
    with running_chromium(program, tmp_path_factory.mktemp("profile")) as open_tab:
        yield open_tab


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Kubernetes cluster for the tests of a file, which `cluster_kit.REQUIRED` skips if it cannot be started."""
    if missing := find_missing("cluster"):
        skip_or_fail(missing)
    with cluster_kit.running_cluster(Path(os.environ[cluster_kit.KIT_VARIABLE])) as running:
        yield running
