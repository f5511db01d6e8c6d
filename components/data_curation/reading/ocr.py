"""Text of scanned pages by the program tesseract."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from components.common.runtime import process_control
from components.common.runtime.errors import ConfigurationError, EngineMissingError

if TYPE_CHECKING:
    import pypdfium2

PROGRAM = "tesseract"
RESOLUTION_DPI = 300  # recommended by tesseract's documentation
MAX_PIXELS = 40_000_000  # of a rendered page; A3 at 300 dpi has 17 million
OCR_KEY = "data_curation.documents.ocr"


def check_program(languages: Sequence[str]) -> None:
    """Check that tesseract and its languages are installed.

    Raises:
        EngineMissingError: the program is not installed.
        ConfigurationError: a language is not installed.
    """
    if not shutil.which(PROGRAM):
        raise EngineMissingError(
            f"{OCR_KEY}: tesseract requires the program tesseract, which is not installed",
            hint=f"Install tesseract (on Debian, the package tesseract-ocr), or set {OCR_KEY} to none.",
        )
    listed = subprocess.run([PROGRAM, "--list-langs"], capture_output=True, text=True, check=False)
    installed = listed.stdout.split("\n")[1:]
    for language in languages:
        if language not in installed:
            found = ", ".join(sorted(filter(None, installed)))
            raise ConfigurationError(
                f"{OCR_KEY}_languages: {language!r} is not installed; installed: {found}",
                hint=f"Install the language (on Debian, the package tesseract-ocr-{language}), or set another "
                "language.",
            )


@cache
def read_version() -> str:
    """Return the version of tesseract, which the recognized text depends on; "" if it is not installed."""
    if not shutil.which(PROGRAM):
        return ""
    result = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=False)
    return (result.stdout or result.stderr).partition("\n")[0].removeprefix(PROGRAM).strip()


def recognize_text(page: pypdfium2.PdfPage, languages: Sequence[str]) -> str:
    """Return the text of a page, with blank lines between its paragraphs.

    Raises:
        OSError: tesseract failed.
    """
    width, height = page.get_size()
    scale = min(RESOLUTION_DPI / 72, math.sqrt(MAX_PIXELS / max(1.0, width * height)))
    bitmap = page.render(scale=scale, grayscale=True)
    rows = memoryview(bitmap.buffer).cast("B")
    image = b"".join(
        rows[start : start + bitmap.width] for start in range(0, bitmap.height * bitmap.stride, bitmap.stride)
    )
    result = subprocess.run(
        [PROGRAM, "stdin", "stdout", "-l", "+".join(languages)],
        input=f"P5\n{bitmap.width} {bitmap.height}\n255\n".encode() + image,  # a grayscale image in the format PGM
        capture_output=True,
        check=False,
        preexec_fn=process_control.die_with_parent,
    )
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {result.returncode}"]
        raise OSError(lines[-1])
    return result.stdout.decode(errors="replace").replace("\f", "").strip()
