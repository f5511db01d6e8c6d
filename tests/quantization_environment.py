"""A folder that looks like the quantization environment, for tests that must not calibrate."""

from __future__ import annotations

import sys
from pathlib import Path

from components.common.models import quantization_env


def make_environment(folder: Path, script: str, versions: tuple[str, ...] = quantization_env.REQUIREMENTS) -> Path:
    """Write the files that `missing_reason` checks, with a shell script as the interpreter."""
    python = folder / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for requirement in versions:
        (packages / f"{requirement.replace('==', '-').replace('compressed-', 'compressed_')}.dist-info").mkdir(
            parents=True
        )
    return folder
