"""What Triton needs here, and how its absence is told."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.errors import EngineMissingError
from components.common.progress import Silent
from components.triton_packaging import engine, server, serving_env


def test_an_old_c_library_is_told_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    assert engine.availability() == "the embedded Triton needs glibc 2.35 or newer; this machine has glibc 2.31"


def test_another_c_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert "another C library" in (engine.availability() or "")


def test_another_processor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "not on Linux aarch64" in (engine.availability() or "")


def test_a_missing_wheel_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "site_packages", lambda: None)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert "nvidia-pytriton" in (engine.availability() or "")
    assert "nvidia-pytriton" in engine.hint()
    with pytest.raises(EngineMissingError, match="nvidia-pytriton"), server.running_server(tmp_path, log=tmp_path / "log"):
        pass


def test_a_missing_serving_environment_is_told_with_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNELINE_SERVING_ENV", str(tmp_path / "nowhere"))
    assert serving_env.missing() == f"there is no serving environment in {tmp_path / 'nowhere'}"
    assert "components.triton_packaging.serving_env" in serving_env.MAKE_IT


def test_a_python_without_numpy_below_2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    assert "no wheel for Python 3.13" in (serving_env.missing() or "")
    with pytest.raises(EngineMissingError, match=r"3\.13"):
        serving_env.create()


def test_a_half_made_serving_environment_is_not_taken_for_a_finished_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNELINE_SERVING_ENV", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    assert "not finished" in (serving_env.missing() or "")


@pytest.mark.triton
def test_the_serving_environment_has_numpy_1_and_the_rest_of_ours_and_writes_no_bytecode() -> None:
    code = "import numpy, sys, transformers; print(numpy.__version__, transformers.__version__, sys.dont_write_bytecode)"
    done = subprocess.run([str(serving_env.folder() / "bin" / "python3"), "-I", "-c", code], capture_output=True, text=True, check=True)
    import transformers

    assert done.stdout.split() == ["1.26.4", transformers.__version__, "True"]


@pytest.mark.triton
@pytest.mark.parametrize("service", ["http", "grpc", "metrics"])
def test_a_taken_port_is_told_before_the_server_starts(service: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = {f"{service}_port": port}
        starting = server.running_server(tmp_path, log=tmp_path / "log", reporter=Silent(), **wanted)  # type: ignore[arg-type]
        with pytest.raises(EngineMissingError, match=f"port {port} on 127.0.0.1 is already in use"), starting:
            pass
    assert not (tmp_path / "log").exists()


@pytest.mark.triton
def test_one_port_for_two_services_is_refused(tmp_path: Path) -> None:
    starting = server.running_server(tmp_path, log=tmp_path / "log", http_port=23456, grpc_port=23456)
    with pytest.raises(EngineMissingError, match="gRPC port 23456"), starting:
        pass


@pytest.mark.triton
def test_shared_memory_of_a_killed_process_is_removed_and_that_of_a_living_one_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(server, "SHARED_MEMORY", tmp_path)
    abandoned, living = tmp_path / f"tuneline_{ended.pid}_ab_region", tmp_path / f"tuneline_{os.getpid()}_cd_region"
    abandoned.touch()
    living.touch()
    server._remove_abandoned_shared_memory()
    assert (abandoned.exists(), living.exists()) == (False, True)
