"""Files that a person told a command to write: what stands in the way is said first, in the words that the person used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from components.common import artifacts
from components.common.errors import UsageError


def check_folder(folder: Path, *, must_exist: bool) -> None:
    """Raises UsageError naming `folder` where it is no folder, can be none, or (with `must_exist`) is not there."""
    if folder.is_dir():
        return
    in_the_way = next((place for place in (folder, *folder.parents) if place.is_symlink() or place.exists()), None)
    if in_the_way and not in_the_way.is_dir():
        what = f"{folder} is not a folder" if in_the_way == folder else f"{folder} cannot be a folder: {in_the_way} is none"
        raise UsageError(what, hint="Name another folder.")
    if must_exist:
        raise UsageError(f"the folder {folder} does not exist", hint=f"Make it (mkdir -p {folder}), or name another file.")


def check_file(output: Path, *, inputs: Iterable[Path]) -> None:
    """Raises UsageError where `output` cannot be a new file or replace an old one: a folder, a pipe, a device, one of the `inputs`."""
    check_folder(output.parent, must_exist=True)
    hint = "Name another file with -o."
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is what is read: it would be overwritten", hint=hint)
    if output.is_dir():
        raise UsageError(f"{output} is a folder", hint=f"Name a file in it, for example -o {output / 'pipeline.yaml'}.")
    if output.exists() and not output.is_file():
        raise UsageError(f"{output} is a pipe or a device, not a file", hint=hint)


def write(path: Path, text: str) -> None:
    """The whole file or none; an error of the system names it, not the draft that becomes it."""
    try:
        artifacts.write_atomically(path, text)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
