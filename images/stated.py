"""What a Containerfile states: its ARGs, and so what its image holds."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ARGUMENT = re.compile(r'^ARG (\w+)="?([^"\n]*)"?$', re.MULTILINE)


def containerfile(image: str) -> Path:
    """The file of an image, by its name without `python-`."""
    return HERE / f"{image}.Containerfile"


def stated(file: Path) -> dict[str, str]:
    """The defaults of a Containerfile's arguments: BASE_IMAGE, EXTRAS, EMBEDDED, PROGRAMS."""
    return dict(ARGUMENT.findall(file.read_text(encoding="utf-8")))
