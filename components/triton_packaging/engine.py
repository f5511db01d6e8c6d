"""The Triton Inference Server on this machine: the one inside the nvidia-pytriton wheel, and what it needs to start.

The wheel is never imported: its server binary, its python backend and the backend's stub for this Python are used as files.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

from components.triton_packaging import serving_env

STUB = "triton_python_backend_stub"
# The wheel is tagged manylinux_2_35: its libraries do not load on an older C library.
OLDEST_GLIBC = (2, 35)
# Without __init__.py: it would make the folder a package named vllm, and hide the real one.
HERE = Path(__file__).parent
VLLM_FILES = {
    **{
        name: HERE / "vllm_backend" / name
        for name in ("model.py", "tuneline_asking.py", "tuneline_engines.py", "tuneline_stand_in.py", "tuneline_tensors.py")
    },
    "tuneline_following.py": HERE / "python_backend" / "following.py",
}
INSTALL = "pip install --no-deps nvidia-pytriton==0.7.0"


def availability() -> str | None:
    """Why a Triton server with the python backend cannot run on this machine, as a sentence's end, or None when it can."""
    checks: tuple[Callable[[], str | None], ...] = (_machine, _glibc, _client, _wheel, _python, serving_env.missing, _libraries)
    return next((reason for check in checks if (reason := check())), None)


def unproven(backend: str) -> str | None:
    """Why a package for this backend cannot be proven on this machine, or None when it can."""
    return availability() or (serving_env.missing_vllm() if backend == "vllm" else None)


def hint() -> str:
    """What to do about the reason that availability() or unproven() gives."""
    if _wheel():
        return f"make installs it; by hand: {INSTALL}"
    if serving_env.missing():
        return serving_env.MAKE_IT
    if availability() is None:
        return serving_env.INSTALL_VLLM
    return "Package on a machine with x86-64 Linux, glibc 2.35 and Python 3.11 or 3.12. `tuneline doctor` says what is missing."


def site_packages() -> Path | None:
    """Where the wheel is installed, or None."""
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]).parent


def home() -> Path:
    """The server's folder inside the wheel. Only where availability() is None."""
    site = site_packages()
    assert site is not None, "availability() was not asked"
    return site / "pytriton" / "tritonserver"


def stub() -> Path:
    """The python backend's stub for this Python."""
    return home() / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}" / STUB


def library_path() -> str:
    """LD_LIBRARY_PATH: this interpreter's libpython before the one in the wheel, which is another Python's."""
    bundled = (site_packages() or Path()) / "nvidia_pytriton.libs"
    return f"{sysconfig.get_config_var('LIBDIR')}:{bundled}"


def environment() -> dict[str, str]:
    """The server's environment: the serving environment's python3 comes first, and nothing is fetched.

    The stub reads no PYTHON… variable: what they would set stands in the serving environment itself.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env["PATH"] = f"{serving_env.folder() / 'bin'}:{env.get('PATH', '')}"
    env["LD_LIBRARY_PATH"] = library_path()
    return {**env, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def make_backend_folder(folder: Path) -> Path:
    """Fill `folder` as a Triton backend directory: the stub must stand beside the backend's library. Returns it.

    The vLLM backend is one in Python: its files alone, served by the python backend's library. Copies, because the server refuses a library
    of such a backend that a link leads to, as one that "escapes backend directory".
    """
    library = home() / "backends" / "python"
    python = {file.name: file for file in (library / "libtriton_python.so", library / "triton_python_backend_utils.py", stub())}
    for name, files in {"python": python, "vllm": VLLM_FILES}.items():
        (folder / name).mkdir(parents=True)
        for called, file in files.items():
            shutil.copy(file, folder / name / called)
    return folder


def _machine() -> str | None:
    found = f"{platform.system()} {platform.machine()}"
    return None if found == "Linux x86_64" else f"the embedded Triton runs on Linux x86-64, not on {found}"


def _glibc() -> str | None:
    name, version = platform.libc_ver()
    try:
        enough = name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_GLIBC
    except ValueError:
        enough = False
    return (
        None
        if enough
        else f"the embedded Triton needs glibc 2.35 or newer; this machine has {name or 'another C library'} {version}".rstrip()
    )


def _client() -> str | None:
    found = importlib.util.find_spec("tritonclient")
    return None if found else "the package tritonclient is not installed"


def _wheel() -> str | None:
    site = site_packages()
    binary = site / "pytriton" / "tritonserver" / "bin" / "tritonserver" if site else None
    return None if binary and binary.exists() else "the package nvidia-pytriton, which carries the Triton server, is not installed"


def _python() -> str | None:
    return None if stub().exists() else f"the embedded Triton has no python backend for Python {sys.version_info[0]}.{sys.version_info[1]}"


@cache
def _libraries() -> str | None:
    """The shared libraries the stub would not find, as the loader sees it: libpython above all, which some Pythons are built without."""
    env = {**os.environ, "LD_LIBRARY_PATH": library_path()}
    try:
        listed = subprocess.run(["ldd", str(stub())], env=env, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None  # no ldd here: the server's own log will tell
    lost = [line.split("=>")[0].strip() for line in listed.splitlines() if "not found" in line]
    return f"Triton's python backend does not find {', '.join(lost)}; install this Python's shared library" if lost else None
