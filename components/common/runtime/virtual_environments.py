"""Virtual environments beside that of tuneline, for packages whose requirements conflict with its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from components.common.runtime.errors import ConfigurationError, TunelineError

PTH_FILENAME = "tuneline_environment.pth"


def get_python(folder: Path) -> Path:
    """Return the interpreter of an environment; it may not exist."""
    return folder / "bin" / "python3"


def get_site_packages(folder: Path) -> Path:
    """Return the folder of an environment's own packages; it may not exist."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def create(folder: Path, lines: str) -> None:
    """Create an environment without pip, or replace an earlier one.

    Args:
        lines: content of the .pth file, which adds other folders to the environment's own packages.

    Raises:
        ConfigurationError: the folder has other content. One in tuneline's own environment may be an interrupted creation.
        TunelineError: venv fails.
    """
    is_other = (
        folder.exists() and any(folder.iterdir()) and not list(folder.glob(f"lib/*/site-packages/{PTH_FILENAME}"))
    )
    if is_other and not folder.is_relative_to(sys.prefix):
        raise ConfigurationError(
            f"{folder} is not empty and not an environment of tuneline",
            hint="Choose a new folder, or delete this folder.",
        )
    run_command([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
    (get_site_packages(folder) / PTH_FILENAME).write_text(lines, encoding="utf-8")


def run_command(command: list[str]) -> None:
    """Run a command of Python.

    Raises:
        TunelineError: the command fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
        raise TunelineError(
            f"python {' '.join(command[1:4])} failed: {last}",
            hint="Check that pip can reach its package index.",
        )
