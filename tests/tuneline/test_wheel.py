"""The built distributions: their files, and an installation that sees neither the repository nor its working directory.

Long tier: the wheel is built from the source distribution and installed, and its programs start as those of a user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.pipelines.command import ROOT
from tests.pipelines.project import write_project
from tuneline import release_version

PACKAGES = ("tuneline", "components", "pipelines")
PAGES = ("docs/how-to", "docs/reference")


def build(source: Path, target: str, folder: Path) -> Path:
    """Build a distribution of the project in `source` and return its file."""
    command = [sys.executable, "-P", "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


def list_package_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def list_source_files() -> list[str]:
    """Return the files of the packages and the pages that git tracks or does not ignore, as they are in the wheel."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES, *PAGES]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(name if name.startswith(PACKAGES) else f"tuneline/{name}" for name in names if (ROOT / name).exists())


def test_wheel_has_every_file_of_the_packages_and_no_other(tmp_path: Path) -> None:
    files = list_package_files(build(ROOT, "wheel", tmp_path))
    assert files == list_source_files()
    assert {name.partition("/")[0] for name in files} == set(PACKAGES)
    suffixes = {Path(name).suffix for name in files}
    assert {".py", ".yaml", ".jsonl", ".html", ".css", ".js", ".typed"} <= suffixes


@pytest.mark.parametrize(
    ("description", "version"),
    [
        ("v1.2.0-0-g5f3a01c", "1.2.0"),
        ("v1.2.0rc1-0-g5f3a01c", "1.2.0rc1"),
        ("v1.2.0-14-g5f3a01c", "1.2.0.post14+g5f3a01c"),
        ("", release_version.WITHOUT_TAGS),
        ("vnext-0-g5f3a01c", release_version.WITHOUT_TAGS),
    ],
)
def test_version_is_that_of_the_last_tag(description: str, version: str) -> None:
    assert release_version.build_version(description) == version


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, built from the source distribution, without its dependencies; return the environment's folder.

    The dependencies are those of this environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    archive = build(ROOT, "sdist", folder)
    shutil.unpack_archive(archive, folder)
    wheel = build(folder / archive.name.removesuffix(".tar.gz"), "wheel", folder)
    assert list_package_files(wheel) == list_source_files()
    home = folder / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def execute(installation: Path, *command: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the installation."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TUNELINE_", "MLFLOW_"))}
    variables = {**own, "TUNELINE_THREADS": "1", **extra}
    program = [str(installation / "bin" / command[0]), *command[1:]]
    return subprocess.run(program, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.long
def test_installation_imports_its_own_packages(installation: Path, tmp_path: Path) -> None:
    script = f"import {', '.join(PACKAGES)}; print(*(m.__path__[0] for m in ({', '.join(PACKAGES)})))"
    process = execute(installation, "python", "-c", script, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    folders = [Path(folder).parent for folder in process.stdout.split()]
    assert len(set(folders)) == 1
    assert installation in folders[0].parents
    version = execute(installation, "tuneline", "--version", cwd=tmp_path).stdout
    assert version == f"tuneline {release_version.read_version()}\n"
    assert execute(installation, "tuneline", "init", "project", cwd=tmp_path).returncode == 0
    assert (tmp_path / "project" / "customization.yaml").exists()
    error = json.loads(execute(installation, "tuneline", "run", "--set", "a.b=1", "--json", cwd=tmp_path).stdout)
    page = re.search(r"See (\S+\.md)", error["error"]["hint"])
    assert page is not None
    assert installation in Path(page[1]).parents
    assert Path(page[1]).exists()


@pytest.mark.long
@pytest.mark.parametrize("package", ["components", "pipelines"])
def test_package_of_another_project_is_reported_with_its_folder(
    installation: Path, tmp_path: Path, package: str
) -> None:
    (tmp_path / package).mkdir()
    path = str(tmp_path)
    process = execute(installation, "python", "-c", "import tuneline", cwd=tmp_path, PYTHONPATH=path)
    assert process.returncode == 0, process.stderr  # a folder that is not a package hides nothing
    (tmp_path / package / "__init__.py").touch()
    for command in (["tuneline", "--version"], ["python", "-P", "-c", "import tuneline"]):
        process = execute(installation, *command, cwd=installation, PYTHONPATH=path)
        assert process.returncode == 1
        problem = f"the package '{package}' of another project in {tmp_path / package} hides that of tuneline in"
        assert problem in process.stderr.splitlines()[-1]
        assert ("Traceback" in process.stderr) == (command[0] == "python")
    assert execute(installation, "tuneline", "--version", cwd=tmp_path).returncode == 0


@pytest.mark.long
def test_installation_plans_a_run_and_curates(installation: Path, tmp_path: Path) -> None:
    """The folder contains packages that must not be imported; the curation starts a Python of its own."""
    write_project(tmp_path)
    options = ["-c", "customization.yaml", "--json"]
    planned = execute(installation, "tuneline", "run", *options, "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["steps"] == 30
    curated = execute(installation, "tuneline", "curate", "-o", "dataset", *options, cwd=tmp_path)
    assert curated.returncode == 0, curated.stdout + curated.stderr
    script = "import tuneline; print(tuneline.curate(None, 'api', 'customization.yaml').sha256)"
    process = execute(installation, "python", "-P", "-c", script, cwd=tmp_path)
    assert process.stdout.strip() == json.loads(curated.stdout)["sha256"], process.stderr
