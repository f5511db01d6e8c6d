"""The serving environment: what Triton's python backend imports from.

The backend's stub was built against numpy 1 and crashes on strings under numpy 2, so it gets a thin virtual environment of its own:
numpy 1.26 and a .pth file that lends it everything else of the environment tuneline runs in. `make` creates it:

    python -m components.triton_packaging.serving_env

It lies in `<sys.prefix>/serving`, or where TUNELINE_SERVING_ENV says. Stages only look for it; none installs anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from components.common.errors import EngineMissingError, TunelineError

NUMPY = "numpy==1.26.4"  # the last release before 2; it has wheels for Python 3.9 to 3.12
NEWEST_PYTHON = (3, 12)
# Serving a package must not write into it, and the stub does not read PYTHONDONTWRITEBYTECODE.
PTH = "import sys; sys.dont_write_bytecode = True\n"
MAKE_IT = "Create it with: python -m components.triton_packaging.serving_env"
INSTALL_VLLM = (
    "Install vLLM in the environment that tuneline runs in (docs/vllm.md), or package on a machine that has it, or for the python backend."
)
# Only a package with code in it counts: the backend's own folder bears the name too.
FIND_VLLM = "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(0 if s and s.origin else 1)"
# What the served model imports, looked up without importing it: torch alone would take seconds.
CHECK = (
    "import importlib.util as u, numpy, sys; "
    "missing = [n for n in ('torch', 'transformers') if u.find_spec(n) is None]; "
    "bad = missing or numpy.__version__ >= '2' or not sys.dont_write_bytecode; "
    "sys.exit(f'numpy {numpy.__version__}, missing {missing}' if bad else 0)"
)


def folder() -> Path:
    """Where the serving environment lies on this machine, whether it is there or not."""
    return Path(os.environ.get("TUNELINE_SERVING_ENV") or Path(sys.prefix) / "serving").absolute()


def missing() -> str | None:
    """Why Triton's python backend has no environment to run in, or None when it has one. Takes no longer than a few file look-ups."""
    if sys.version_info[:2] > NEWEST_PYTHON:
        return (
            "the embedded Triton's python backend needs numpy below 2, which has no wheel for "
            f"Python {sys.version_info[0]}.{sys.version_info[1]}; use Python 3.11 or 3.12"
        )
    if not _python().exists():
        return f"there is no serving environment in {folder()}"
    if not any(_site_packages().glob("numpy-1.*.dist-info")):
        return f"the serving environment in {folder()} was not finished"
    return None


@cache
def missing_vllm() -> str | None:
    """Why the vLLM backend cannot run in the serving environment, as a sentence's end, or None when it can."""
    done = subprocess.run([str(_python()), "-I", "-c", FIND_VLLM], capture_output=True, timeout=120, check=False)
    return "vLLM is not installed here" if done.returncode else None


def create(lenders: Sequence[str] = ()) -> Path:
    """Create the serving environment, or repair it, and return its folder; one that works is left as it is.

    It lends from these folders of packages, by default from that of the environment tuneline runs in.

    Raises EngineMissingError where this Python has no numpy below 2, TunelineError when pip fails.
    """
    if missing() is None and _works() is None:
        return folder()
    if sys.version_info[:2] > NEWEST_PYTHON:
        raise EngineMissingError(missing() or "", hint="Everything else works here; packages stay unproven and cannot be promoted.")
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder())])
    (_site_packages() / "tuneline_environment.pth").write_text(
        "\n".join([*(lenders or [sysconfig.get_path("purelib")]), PTH]), encoding="utf-8"
    )
    _run([sys.executable, "-m", "pip", "--python", str(_python()), "install", "--quiet", "--disable-pip-version-check", "--no-deps", NUMPY])
    wrong = _works()
    if wrong:
        raise TunelineError(
            f"the serving environment in {folder()} does not work: {wrong}", hint="Install tuneline's packaging extra first."
        )
    return folder()


def _python() -> Path:
    return folder() / "bin" / "python3"


def _site_packages() -> Path:
    return folder() / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _works() -> str | None:
    """What its own interpreter finds wrong with it, or None."""
    done = subprocess.run([str(_python()), "-I", "-c", CHECK], capture_output=True, text=True, timeout=120, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it does not start"])[-1]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
        raise TunelineError(
            f"{' '.join(command[1:4])} failed: {last}", hint="Check that pip can reach its package index, then run this again."
        )


if __name__ == "__main__":
    try:
        print(f"serving environment: {create()}")
    except TunelineError as error:
        sys.exit(f"{error.message}\n{error.hint}")
