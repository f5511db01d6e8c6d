"""The Triton Inference Server inside the nvidia-pytriton wheel, and the checks of its requirements on this machine.

tuneline does not import the wheel; it uses the server binary, the python backend and the stub in it as files.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from components.triton_packaging import serving_env
from components.triton_packaging.backends import BACKENDS

STUB_FILENAME = "triton_python_backend_stub"
# The wheel is tagged manylinux_2_35: its libraries do not load with an older C library.
MIN_GLIBC_VERSION = (2, 35)
VLLM_BACKEND_FOLDER = Path(__file__).parent / "vllm_backend"
# Without __init__.py, which would make the folder a package named vllm and hide vLLM itself.
VLLM_FILES = ("model.py", "tuneline_requests.py", "tuneline_tensors.py", "tuneline_vllm_engine.py")
INSTALL_COMMAND = "pip install --no-deps nvidia-pytriton==0.7.0"


def unavailable_reason() -> str | None:
    """Return the reason why Triton's python backend cannot run on this machine, or None if it can."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        return f"the embedded Triton requires Linux x86-64; this machine is {machine}"
    name, version = platform.libc_ver()
    try:
        is_supported = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= MIN_GLIBC_VERSION
    except ValueError:
        is_supported = False
    if not is_supported:
        library = f"{name or 'another C library'} {version}".rstrip()
        return f"the embedded Triton requires glibc 2.35 or newer; this machine has {library}"
    if importlib.util.find_spec("tritonclient") is None:
        return "the package tritonclient is not installed"
    if not _find_server_binary():
        return "the package nvidia-pytriton, which provides the Triton server, is not installed"
    if not get_stub_path().exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"the embedded Triton has no python backend for Python {version}"
    if reason := serving_env.missing_reason():
        return reason
    if defect := serving_env.find_defect():
        return f"the serving environment in {serving_env.get_environment_folder()} does not work: {defect}"
    # Some builds of Python lack the shared libpython that the stub needs.
    env = {**os.environ, "LD_LIBRARY_PATH": get_library_path()}
    try:
        ldd = subprocess.run(
            ["ldd", str(get_stub_path())], env=env, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # without ldd, the server's own log reports a missing library
    missing = [line.split("=>")[0].strip() for line in ldd.stdout.splitlines() if "not found" in line]
    if not missing:
        return None
    return f"Triton's python backend requires {', '.join(missing)}, which the dynamic linker does not find"


def unprovable_reason(backend: str) -> str | None:
    """Return the reason why a package for this backend cannot be proven on this machine, or None if it can."""
    return unavailable_reason() or BACKENDS[backend].missing_requirement()


def installation_hint() -> str:
    """Return the hint for the reason that `unavailable_reason` or `unprovable_reason` returns."""
    if not _find_server_binary():
        return f"Run `make`, or `{INSTALL_COMMAND}`."
    if serving_env.missing_reason() or serving_env.find_defect():
        return serving_env.CREATE_HINT
    if unavailable_reason() is None:
        return serving_env.INSTALL_VLLM_HINT
    return (
        "Package on a machine with x86-64 Linux, glibc 2.35 and Python 3.11 or 3.12; `tuneline doctor` lists the "
        "missing requirements."
    )


def find_wheel_folder() -> Path | None:
    """Return the site-packages folder that contains the wheel, or None if the wheel is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).parent


def get_triton_home() -> Path:
    """Return the server's folder inside the wheel. Requires that `unavailable_reason` returns None."""
    folder = find_wheel_folder()
    assert folder is not None, "check unavailable_reason first"
    return folder / "pytriton" / "tritonserver"


def get_stub_path() -> Path:
    """Return the path of the python backend's stub for this Python version."""
    return get_triton_home() / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}" / STUB_FILENAME


def get_library_path() -> str:
    """Return LD_LIBRARY_PATH: the folder of this interpreter's libpython, then the folder of the wheel's libraries."""
    bundled = (find_wheel_folder() or Path()) / "nvidia_pytriton.libs"
    return f"{sysconfig.get_config_var('LIBDIR')}:{bundled}"


def build_server_environment() -> dict[str, str]:
    """Return the server's environment variables: PATH begins with the serving environment, downloads are disabled.

    The stub ignores PYTHON* variables; a .pth file in the serving environment applies these settings.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env["PATH"] = f"{serving_env.get_environment_folder() / 'bin'}:{env.get('PATH', '')}"
    env["LD_LIBRARY_PATH"] = get_library_path()
    return {**env, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def create_backend_folder(folder: Path) -> Path:
    """Fill `folder` as a Triton backend directory and return it.

    The python backend's stub must be in the folder of its library. The vLLM backend consists of Python files, which
    the python backend's library runs. Files are copied: the server rejects links ("escapes backend directory").
    """
    library = get_triton_home() / "backends" / "python"
    python = (library / "libtriton_python.so", library / "triton_python_backend_utils.py", get_stub_path())
    vllm = (VLLM_BACKEND_FOLDER / name for name in VLLM_FILES)
    for name, files in {"python": python, "vllm": vllm}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, folder / name)
    return folder


def _find_server_binary() -> Path | None:
    folder = find_wheel_folder()
    binary = folder / "pytriton" / "tritonserver" / "bin" / "tritonserver" if folder else None
    return binary if binary and binary.exists() else None
