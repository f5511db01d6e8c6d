"""The serving environment: the virtual environment that Triton's python backend imports from.

The backend's stub was built against numpy 1 and crashes on strings with numpy 2. The backend therefore uses a separate
environment: numpy 1.26, and a .pth file that adds all other packages of tuneline's environment.
"""

# `make` creates the environment with `python -m components.triton_packaging.serving_env`, in `<sys.prefix>/serving` or
# in the folder in TUNELINE_SERVING_ENV. Stages do not install the environment.

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from components.common.runtime import virtual_environments
from components.common.runtime.errors import EngineMissingError, TunelineError

NUMPY_REQUIREMENT = "numpy==1.26.4"  # the last release before 2; it has wheels for Python 3.9 to 3.12
NUMPY_HASHES = (  # of the wheels for Linux on x86-64 and aarch64, with Python 3.11 and 3.12
    "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",
    "675d61ffbfa78604709862923189bad94014bef562cc35cf61d3a07bba02a7ed",
    "7ab55401287bfec946ced39700c053796e7cc0e3acbef09993a9ad2adba6ca6e",
    "9fad7dcb1aac3c7f0584a5a8133e3a43eeb2fe127f47e3632d43d677c66c102b",
)
MAX_PYTHON_VERSION = (3, 12)
# Serving must not write bytecode into a package, and the stub ignores PYTHONDONTWRITEBYTECODE.
PTH_LINE = "import sys; sys.dont_write_bytecode = True\n"
SCRIPT_SECONDS = 120
CREATE_HINT = "Run: python -m components.triton_packaging.serving_env"
INSTALL_VLLM_HINT = (
    "Install vLLM in tuneline's environment (see docs/reference/vllm.md), or set triton_packaging.backend to python."
)
# Requires an origin: the backend's folder has the same name, and is found as a namespace package.
FIND_VLLM_SCRIPT = "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(0 if s and s.origin else 1)"
# Locates the packages of the served model without importing them: importing torch takes seconds.
CHECK_SCRIPT = (
    "import importlib.util as u, numpy, sys; "
    "missing = [n for n in ('torch', 'transformers') if u.find_spec(n) is None]; "
    "bad = missing or numpy.__version__ >= '2' or not sys.dont_write_bytecode; "
    "sys.exit(f'numpy {numpy.__version__}, missing {missing}' if bad else 0)"
)


def get_environment_folder() -> Path:
    """Return the folder of the serving environment on this machine; it may not exist."""
    return Path(os.environ.get("TUNELINE_SERVING_ENV") or Path(sys.prefix) / "serving").absolute()


def missing_reason() -> str | None:
    """Return the reason why the serving environment cannot be used, or None. Checks only whether files exist."""
    if sys.version_info[:2] > MAX_PYTHON_VERSION:
        return (
            "the embedded Triton's python backend requires numpy below 2, which has no wheel for "
            f"Python {sys.version_info[0]}.{sys.version_info[1]}; supported: Python 3.11 and 3.12"
        )
    if not _get_python().exists():
        return f"the serving environment in {get_environment_folder()} does not exist"
    if not any(virtual_environments.get_site_packages(get_environment_folder()).glob("numpy-1.*.dist-info")):
        return f"the serving environment in {get_environment_folder()} contains no numpy below 2"
    return None


def missing_vllm_reason() -> str | None:
    """Return the reason why the vLLM backend cannot run in the serving environment, or None if it can."""
    return "vLLM is not installed" if _run_script(FIND_VLLM_SCRIPT).returncode else None


def create_environment(package_folders: Sequence[str] = ()) -> Path:
    """Create or repair the serving environment and return its folder; a working environment is not changed.

    Args:
        package_folders: folders of the other packages. Default: site-packages of tuneline's environment.

    Raises:
        EngineMissingError: no numpy below 2 exists for this Python.
        ConfigurationError: the folder has other content.
        TunelineError: pip fails, or the environment does not work.
    """
    if missing_reason() is None and find_defect() is None:
        return get_environment_folder()
    if sys.version_info[:2] > MAX_PYTHON_VERSION:
        raise EngineMissingError(
            missing_reason() or "", hint="Install tuneline with Python 3.11 or 3.12 to prove and promote packages."
        )
    folder = get_environment_folder()
    virtual_environments.create(folder, "\n".join([*(package_folders or [sysconfig.get_path("purelib")]), PTH_LINE]))
    pip = [sys.executable, "-m", "pip", "--python", str(_get_python())]
    requirements = folder / "requirements.txt"
    requirements.write_text(" ".join([NUMPY_REQUIREMENT, *(f"--hash=sha256:{digest}" for digest in NUMPY_HASHES)]))
    virtual_environments.run_command(
        [
            *pip,
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(requirements),
        ]
    )
    if defect := find_defect():
        raise TunelineError(
            f"the serving environment in {get_environment_folder()} does not work: {defect}",
            hint="Install tuneline's packaging extra.",
        )
    return get_environment_folder()


def _get_python() -> Path:
    return virtual_environments.get_python(get_environment_folder())


def find_defect() -> str | None:
    """Return the problem that the environment's interpreter reports, or None. Starting the interpreter takes a second."""
    try:
        done = _run_script(CHECK_SCRIPT)
    except OSError as error:
        return f"its interpreter does not start: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"its interpreter does not answer within {SCRIPT_SECONDS} seconds"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["its interpreter fails"])[-1]


def _run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the environment's interpreter."""
    return subprocess.run(
        [str(_get_python()), "-I", "-c", script], capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=False
    )


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m components.triton_packaging.serving_env",
        description=f"Create or repair the serving environment in {get_environment_folder()}. TUNELINE_SERVING_ENV "
        "sets another folder.",
    ).parse_args()
    try:
        print(f"serving environment: {create_environment()}")
    except TunelineError as error:
        sys.exit(f"{error.message}\n{error.hint}")
