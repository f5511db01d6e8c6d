"""Checks of output paths given on the command line, and atomic writes to them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.runtime.errors import UsageError


def check_folder(folder: Path, *, must_exist: bool) -> None:
    """Raise UsageError if `folder` is not and cannot become a folder, or (with `must_exist`) does not exist."""
    if folder.is_dir():
        return
    obstacle = next((path for path in (folder, *folder.parents) if path.is_symlink() or path.exists()), None)
    if obstacle and not obstacle.is_dir():
        reason = "is not a folder" if obstacle == folder else f"cannot be created: {obstacle} is not a folder"
        raise UsageError(f"{folder} {reason}", hint="Choose another folder.")
    if must_exist:
        raise UsageError(
            f"the folder {folder} does not exist",
            hint=f"Create the folder (mkdir -p {folder}), or choose another file.",
        )


def check_file(output: Path, *, inputs: Iterable[Path], example: str = "pipeline.yaml") -> None:
    """Check that `output` can be written.

    Args:
        output: The file to write.
        inputs: The files that were read; `output` must not be one of them.
        example: File name for the hint.

    Raises:
        UsageError: `output` is a folder, a pipe, a device or one of the `inputs`, or its folder does not exist.
    """
    check_folder(output.parent, must_exist=True)
    hint = "Choose another file with -o."
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"output {output} is also an input", hint=hint)
    if output.is_dir():
        raise UsageError(f"{output} is a folder", hint=f"Choose a file in it, for example -o {output / example}.")
    if output.exists() and not output.is_file():
        raise UsageError(f"{output} is a pipe or a device, not a file", hint=hint)


def write_file(path: Path, text: str) -> None:
    """Write the file atomically.

    Raises:
        OSError: the file cannot be written; the error contains `path` instead of the path of the temporary file.
    """
    try:
        artifact_folder.write_atomically(path, text)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
