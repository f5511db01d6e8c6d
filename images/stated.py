"""Read the ARGs of a Containerfile, which determine the contents of its image."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ARGUMENT = re.compile(r'^ARG (\w+)="?([^"\n]*)"?$', re.MULTILINE)


def containerfile(image: str) -> Path:
    """Return the Containerfile of an image, whose name is given without `python-`."""
    return HERE / f"{image}.Containerfile"


def stated(file: Path) -> dict[str, str]:
    """Return the defaults of a Containerfile's arguments: BASE_IMAGE, EXTRAS, EMBEDDED and PROGRAMS."""
    return dict(ARGUMENT.findall(file.read_text(encoding="utf-8")))
