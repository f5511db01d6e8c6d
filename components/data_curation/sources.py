"""The files a dataset is made from: found, ordered, and known by their digests before anything is read."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from components.common import hashing
from components.common.errors import ConfigurationError

COMPRESSED = (".gz", ".zst")
SUFFIXES = (".csv", ".json", ".jsonl", ".md", ".ndjson", ".parquet", ".text", ".tsv", ".txt")
KNOWN = f"Known are {', '.join(SUFFIXES)}, also with {' or '.join(COMPRESSED)}"
UNUSABLE = "Name a file that holds its rows itself: a copy, or the file that is meant."
FILE, FOLDER, NOTHING = "file", "folder", "nothing"


class Source(BaseModel):
    """A raw file: where it lies (an absolute path) and what it held when it was listed."""

    model_config = ConfigDict(frozen=True)

    uri: str
    sha256: str
    bytes: int

    @property
    def name(self) -> str:
        """The file's name, which is all that artifacts say of where it lay."""
        return Path(self.uri).name


def list_sources(patterns: Sequence[str], base: Path) -> list[Source]:
    """The files that the patterns name, each once, with their digests.

    A pattern is a file, a glob (** goes into folders) or a folder, of which every readable kind of file counts; relative ones start at
    `base`. Files keep the order of the patterns and are sorted by path within one. Raises ConfigurationError for a pattern that names
    nothing, something that is no regular file, or a file that cannot be read.
    """
    paths: dict[Path, str] = {}
    for pattern in patterns:
        for path in _expand(pattern, base):
            paths.setdefault(path, pattern)
    return [_source(path, pattern) for path, pattern in paths.items()]


def named(name: str, patterns: Sequence[str], base: Path) -> list[Source]:
    """The files of this name among those the patterns mean now, with their present digests; none where they are gone or unreadable."""
    paths: dict[Path, str] = {}
    for pattern in patterns:
        with contextlib.suppress(ConfigurationError):
            paths.update({path: pattern for path in _expand(pattern, base) if path.name == name})
    found = []
    for path, pattern in paths.items():
        with contextlib.suppress(ConfigurationError):
            found.append(_source(path, pattern))
    return found


def suffix(path: Path) -> str:
    """.jsonl for rows.jsonl and for rows.jsonl.gz, in lower case."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _expand(pattern: str, base: Path) -> list[Path]:
    path = base.absolute() / Path(pattern).expanduser()
    state = _state(path)
    if state == NOTHING and not glob.has_magic(pattern):
        raise _refused(pattern, "does not exist", _instead(path))
    if state == FILE and suffix(path) not in SUFFIXES:
        raise _refused(pattern, f"has the suffix {suffix(path) or '(none)'!r}, which no reader knows", f"{KNOWN}; convert or rename it.")
    found = _below(pattern, path) if state == FOLDER else _matches(path) if state == NOTHING else [path]
    if not found:
        what = "is a folder that holds no file of a known kind" if state == FOLDER else "matches no file of a known kind"
        raise _refused(pattern, what, f"{KNOWN}. Looked in {path if state == FOLDER else base.absolute()}.")
    for file in found:
        if (state := _state(file)) != FILE:
            raise _refused(pattern, state if file == path else f"names {file}, which {state}", UNUSABLE)
    return [file.resolve() for file in sorted(found)]


def _state(path: Path) -> str:
    """FILE, FOLDER, NOTHING, or in words why nothing can be read there: a pipe would be waited for, a device may never end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"is a link to {path.readlink()}, which does not exist" if path.is_symlink() else NOTHING
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    named = {
        stat.S_IFREG: FILE,
        stat.S_IFDIR: FOLDER,
        stat.S_IFIFO: "is a named pipe, not a file",
        stat.S_IFSOCK: "is a socket, not a file",
    }
    return named.get(stat.S_IFMT(mode), "is a device, not a file")


def _instead(path: Path) -> str:
    """What to do about a path that is not there."""
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {folder} either: check the whole path."
    near = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.75)
    return f"Did you mean {near[0]}? It lies in {folder}." if near else f"{folder} holds no file of that name: check the spelling."


def _below(pattern: str, folder: Path) -> list[Path]:
    """The files of known kinds in a folder and below, hidden ones left out. A folder that cannot be read is no empty one."""

    def refuse(error: OSError) -> None:
        raise _refused(
            pattern, f"holds {error.filename}, which cannot be read: {error.strerror}", "Let this user read it, or move it away."
        )

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".") and suffix(Path(name)) in SUFFIXES]
    return found


def _matches(pattern: Path) -> list[Path]:
    paths = (Path(p) for p in glob.glob(str(pattern), recursive=True))  # noqa: PTH207 - absolute patterns
    return [p for p in paths if suffix(p) in SUFFIXES and _state(p) != FOLDER]


def _source(path: Path, pattern: str) -> Source:
    try:
        return Source(uri=str(path), sha256=hashing.sha256_file(path), bytes=path.stat().st_size)
    except OSError as error:
        which = "" if Path(pattern).name == path.name else f"names {path}, which "
        hint = f"Let this user read it; `ls -l {path}` shows who may."
        raise _refused(pattern, f"{which}cannot be read: {error.strerror}", hint) from None


def _refused(pattern: str, what: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"data_curation.sources: {pattern!r} {what}", hint=hint)
