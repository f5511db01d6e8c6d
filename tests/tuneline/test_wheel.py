"""The built distributions: their files, and an installation that sees neither the repository nor its working directory.

Long tier: the wheel is built from the source distribution, installed, and runs a whole pipeline and docs/python-api.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.pipelines.command import ROOT
from tests.pipelines.project import write_rows
from tests.tiny import tiny_model

PACKAGES = ("tuneline", "components", "pipelines")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETTINGS = {
    "data_curation": {
        "sources": ["raw.jsonl"],
        "answer_min_words": 1000,
        "near_duplicate_threshold": 0.95,
        "fractions": {"train": 0.6, "validation": 0.1, "test": 0.3},
    },
    "fine_tuning": {
        "base_model": "tiny", "max_steps": 30, "batch_size": 4, "micro_batch_size": 2, "warmup_steps": 4, "max_length": 96,
        "validation_rows": 4,
    },
    "evaluation": {"suite": "none", "generations": 0, "bootstrap_samples": 1000},
    "triton_packaging": {"golden_max_tokens": 2},
    "model_registry": {"name": "helper"},
}  # fmt: skip


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
    """Return the files of the packages that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(name for name in names if (ROOT / name).exists())


def test_wheel_has_every_file_of_the_packages_and_no_other(tmp_path: Path) -> None:
    files = list_package_files(build(ROOT, "wheel", tmp_path))
    assert files == list_source_files()
    assert {name.partition("/")[0] for name in files} == set(PACKAGES)
    suffixes = {Path(name).suffix for name in files}
    assert {".py", ".yaml", ".jsonl", ".html", ".css", ".js", ".typed"} <= suffixes


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, built from the source distribution, without its dependencies; return the environment's folder.

    The dependencies are those of this environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    archive = build(ROOT, "sdist", folder)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
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


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with rows, a tiny model and a configuration."""
    folder = tmp_path_factory.mktemp("user")
    write_rows(folder / "raw.jsonl")
    tiny_model(folder / "tiny")
    (folder / "customization.yaml").write_text(json.dumps(SETTINGS))
    return folder


def execute(installation: Path, *command: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the installation."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TUNELINE_", "MLFLOW_"))}
    serving = os.environ.get("TUNELINE_SERVING_ENV") or str(Path(sys.prefix) / "serving")
    variables = {**own, "TUNELINE_SERVING_ENV": serving, "TUNELINE_THREADS": "1", **extra}
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
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = metadata["project"]["version"]
    assert execute(installation, "tuneline", "--version", cwd=tmp_path).stdout == f"tuneline {version}\n"
    assert execute(installation, "tuneline", "init", "project", cwd=tmp_path).returncode == 0
    assert (tmp_path / "project" / "customization.yaml").exists()


@pytest.mark.long
@pytest.mark.parametrize("package", ["components", "pipelines"])
def test_package_of_another_project_is_reported_with_its_folder(
    installation: Path, tmp_path: Path, package: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    path = str(tmp_path)
    for command in (["tuneline", "--version"], ["python", "-P", "-c", "import tuneline"]):
        process = execute(installation, *command, cwd=installation, PYTHONPATH=path)
        assert process.returncode == 1
        problem = f"the package '{package}' of another project in {tmp_path / package} hides that of tuneline in"
        assert problem in process.stderr.splitlines()[-1]
        assert ("Traceback" in process.stderr) == (command[0] == "python")
    assert execute(installation, "tuneline", "--version", cwd=tmp_path).returncode == 0


@pytest.mark.long
def test_installation_runs_the_pipeline_and_the_python_api(installation: Path, user_folder: Path) -> None:
    """The API reuses the results of the command, so that the page adds only the single stages and the server."""
    changes = ("seed=7", "fine_tuning.learning_rate=1e-3", "model_registry.name=helper")
    options = ["-c", "customization.yaml", *(part for change in changes for part in ("--set", change))]
    options += ["--workdir", "my-project", "--json"]
    planned = execute(installation, "tuneline", "run", *options, "--dry-run", cwd=user_folder)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["steps"] == 30
    process = execute(installation, "tuneline", "run", *options, cwd=user_folder)
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(process.stdout)
    blocks = PYTHON_BLOCK.findall((ROOT / "docs" / "python-api.md").read_text(encoding="utf-8"))
    assert len(blocks) == 4
    script = user_folder / "page.py"
    checks = (
        "\nimport json\n"
        "print(json.dumps({'run': result.as_dict(), 'server': server.openai_url, 'model': model.sha256}, default=str))\n"
    )
    script.write_text("\n".join(blocks) + checks)
    page = execute(installation, "python", str(script), cwd=user_folder)
    assert page.returncode == 0, page.stdout + page.stderr
    last = json.loads(page.stdout.splitlines()[-1])
    assert last["run"]["artifacts"] == result["artifacts"]
    assert {stage["name"] for stage in last["run"]["stages"] if stage["cached"]} >= {"data_curation", "fine_tuning"}
    assert last["model"] == Path(result["artifacts"]["model"]).name
    assert "True\nTrue\n" in page.stdout  # an intact lineage, and a clean audit
    assert Path(last["run"]["report"]).exists()
