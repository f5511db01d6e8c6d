"""A folder that looks like the quantization environment, for tests that must not calibrate."""

from __future__ import annotations

import sys
from pathlib import Path

from components.common.models import quantization_env


def make_environment(folder: Path, script: str, *packages: str) -> Path:
    """Write the files of a complete environment, with a shell script as the interpreter.

    Args:
        packages: "name-version" of the distributions that it seems to contain.
    """
    python = folder / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    site_packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for package in packages:
        (site_packages / f"{package}.dist-info").mkdir(parents=True)
    (folder / quantization_env.MARKER_FILENAME).write_text(quantization_env.describe_complete(), encoding="utf-8")
    return folder
