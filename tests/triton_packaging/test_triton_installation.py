"""Requirements of the embedded Triton server and the errors when they are not met."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from components.common.runtime.errors import EngineMissingError
from components.triton_packaging import serving_env, triton_installation, triton_server
from tests.pipelines.command import ROOT


def test_old_glibc_error_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    assert (
        triton_installation.unavailable_reason()
        == "the embedded Triton requires glibc 2.35 or newer; this machine has glibc 2.31"
    )


def test_other_c_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert "another C library" in (triton_installation.unavailable_reason() or "")


def test_unsupported_processor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "this machine is Linux aarch64" in (triton_installation.unavailable_reason() or "")


def test_missing_wheel_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton_installation, "find_wheel_folder", lambda: None)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert "nvidia-pytriton" in (triton_installation.unavailable_reason() or "")
    assert "nvidia-pytriton" in triton_installation.installation_hint()
    with (
        pytest.raises(EngineMissingError, match="nvidia-pytriton"),
        triton_server.running_server(tmp_path, log=tmp_path / "log"),
    ):
        pass


def test_missing_serving_environment_error_names_the_create_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNELINE_SERVING_ENV", str(tmp_path / "nowhere"))
    assert serving_env.missing_reason() == f"the serving environment in {tmp_path / 'nowhere'} does not exist"
    assert "components.triton_packaging.serving_env" in serving_env.CREATE_HINT


def test_python_without_numpy_1_wheel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    assert "no wheel for Python 3.13" in (serving_env.missing_reason() or "")
    with pytest.raises(EngineMissingError, match=r"3\.13"):
        serving_env.create_environment()


def test_incomplete_serving_environment_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNELINE_SERVING_ENV", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    assert serving_env.missing_reason() == f"the serving environment in {tmp_path} contains no numpy below 2"


@pytest.mark.triton
@pytest.mark.parametrize(
    ("content", "mode", "defect"),
    [
        ("#!/bin/sh\necho broken >&2; exit 1\n", 0o755, "broken"),
        ("#!/bin/sh\n", 0o644, "its interpreter does not start: Permission denied"),
        ("no program", 0o755, "its interpreter does not start: Exec format error"),
    ],
)
def test_serving_environment_with_a_defect_makes_packages_unproven(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, mode: int, defect: str
) -> None:
    """Its files exist, for example after an upgrade of Python. The doctor and the start of a run show the reason."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "lib" / version / "site-packages" / "numpy-1.26.4.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(content)
    (tmp_path / "bin" / "python3").chmod(mode)
    monkeypatch.setenv("TUNELINE_SERVING_ENV", str(tmp_path))
    reason = f"the serving environment in {tmp_path} does not work: {defect}"
    assert triton_installation.unprovable_reason("python") == reason
    assert triton_installation.installation_hint() == serving_env.CREATE_HINT


def test_images_create_the_serving_environment_by_its_function() -> None:
    calls = re.findall(r"serving_env\.(\w+)\(", (ROOT / "images" / "install.sh").read_text(encoding="utf-8"))
    assert calls
    assert all(hasattr(serving_env, name) for name in calls)


@pytest.mark.triton
def test_serving_environment_has_numpy_1_and_writes_no_bytecode() -> None:
    code = (
        "import numpy, sys, transformers; print(numpy.__version__, transformers.__version__, sys.dont_write_bytecode)"
    )
    process = subprocess.run(
        [str(serving_env.get_environment_folder() / "bin" / "python3"), "-I", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    import transformers

    assert process.stdout.split() == ["1.26.4", transformers.__version__, "True"]


def test_socket_folder_has_a_short_path_and_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long_folder = tmp_path / ("x" * 100)
    long_folder.mkdir()
    for folder in (tmp_path, long_folder):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with triton_server.open_socket_folder() as sockets:
            (sockets / triton_server.GRPC_SOCKET).touch()
            assert len(str(sockets / triton_server.GRPC_SOCKET)) <= 107
            assert list(folder.glob("tuneline-*"))
        assert not sockets.exists()
        assert not list(folder.glob("tuneline-*"))


@pytest.mark.triton
def test_only_shared_memory_of_ended_processes_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(triton_server, "SHARED_MEMORY_FOLDER", tmp_path)
    abandoned, living = tmp_path / f"tuneline_{ended.pid}_ab_region", tmp_path / f"tuneline_{os.getpid()}_cd_region"
    abandoned.touch()
    living.touch()
    triton_server._remove_abandoned_shared_memory()
    assert (abandoned.exists(), living.exists()) == (False, True)


def test_help_of_the_serving_environment_creates_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "components.triton_packaging.serving_env", "--help"]
    variables = {**os.environ, "TUNELINE_SERVING_ENV": str(tmp_path / "serving")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m components.triton_packaging.serving_env")
    assert not (tmp_path / "serving").exists()
