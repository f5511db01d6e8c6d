"""The files a dataset is made from: found, ordered, and known by their digests before anything is read."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from components.common import addresses, hashing
from components.common.errors import ConfigurationError
from components.data_curation import remote

COMPRESSED = (".gz", ".zst")
SUFFIXES = (
    ".csv", ".htm", ".html", ".json", ".jsonl", ".md", ".ndjson", ".parquet", ".text", ".tsv", ".txt", ".warc", ".wet",
)  # fmt: skip
KNOWN = f"Known are {', '.join(SUFFIXES)}, also with {' or '.join(COMPRESSED)}"
INSTEAD = {".wat": "A WAT file holds a crawl's metadata and no text: name the WARC or WET file of the same crawl."}
UNUSABLE = "Name a file that holds its rows itself: a copy, or the file that is meant."
FILE, FOLDER, NOTHING = "file", "folder", "nothing"
DVC = re.compile(r"dvc://(?P<repository>.+)@(?P<revision>[^@:]+):(?P<path>[^:]+)")
Obtain = Callable[[str], Path]


class Source(BaseModel):
    """A raw file: where it lies (an absolute path, or an s3:// or hf:// address) and what it held when it was listed.

    `called` is its name where the path says another, as that of a cached file does.
    """

    model_config = ConfigDict(frozen=True)

    uri: str
    sha256: str
    bytes: int
    called: str = ""

    @property
    def name(self) -> str:
        """The file's name, which is all that artifacts say of where it lay."""
        return self.called or Path(self.uri).name


@dataclass(frozen=True)
class _Place:
    """A file that a pattern names, not yet looked into."""

    uri: str
    bytes: int
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or Path(self.uri).name


def list_sources(patterns: Sequence[str], base: Path, obtain: Obtain | None = None) -> list[Source]:
    """The files that the patterns name, each once, with their digests, sorted by name and digest whatever order they were named in.

    A pattern is a file, a glob (** goes into folders) or a folder, of which every readable kind of file counts, here (relative ones start
    at `base`) or as s3://bucket/key and hf://datasets/org/name@revision/path; or dvc://repository@revision:path, of which `obtain` makes
    a local file or folder. Raises ConfigurationError for a pattern that names nothing, something that is no regular file, a file that
    cannot be read, or a store that cannot be asked.
    """
    places: dict[str, tuple[_Place, str]] = {}
    for pattern in patterns:
        for place in _expand(pattern, base, obtain):
            places.setdefault(place.uri, (place, pattern))
    return sorted((_source(place, pattern) for place, pattern in places.values()), key=lambda s: (s.name, s.sha256, s.uri))


def named(name: str, patterns: Sequence[str], base: Path, obtain: Obtain | None = None) -> list[Source]:
    """The files of this name among those the patterns mean now, with their present digests; none where they are gone or unreadable."""
    places: dict[str, tuple[_Place, str]] = {}
    for pattern in patterns:
        with contextlib.suppress(ConfigurationError):
            places.update({place.uri: (place, pattern) for place in _expand(pattern, base, obtain) if place.name == name})
    found = []
    for place, pattern in places.values():
        with contextlib.suppress(ConfigurationError):
            found.append(_source(place, pattern))
    return found


def suffix(path: Path) -> str:
    """.jsonl for rows.jsonl and for rows.jsonl.gz, in lower case."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _expand(pattern: str, base: Path, obtain: Obtain | None) -> list[_Place]:
    if remote.is_remote(pattern):
        return _far(pattern)
    if pattern.startswith("dvc://"):
        return _versioned(pattern, obtain)
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", pattern):
        raise _refused(pattern, f"begins with {scheme[0]}, from where nothing is read", "Read are files, s3://, hf:// and dvc://.")
    return [_Place(str(path), path.stat().st_size) for path in _local(pattern, base)]


def _far(pattern: str) -> list[_Place]:
    """The files of known kinds that an address elsewhere means."""
    found = remote.found(pattern)
    if [one.uri for one in found] == [pattern] and suffix(Path(pattern)) not in SUFFIXES:
        raise _unknown(pattern, suffix(Path(pattern)))
    known = [_Place(one.uri, one.bytes) for one in found if _is_wanted(one.uri.removeprefix(pattern)) and suffix(Path(one.uri)) in SUFFIXES]
    if not known:
        what = "matches no file of a known kind" if remote.MAGIC.search(pattern) else "holds no file of a known kind"
        raise _refused(pattern, what, f"{KNOWN}.")
    return known


def _is_wanted(path: str) -> bool:
    """Whether no part of a path below what was named is hidden."""
    return not any(part.startswith(".") for part in path.split("/"))


def _versioned(pattern: str, obtain: Obtain | None) -> list[_Place]:
    """The files of a DVC repository's revision, once they are here."""
    address = DVC.fullmatch(pattern)
    if address is None:
        raise _refused(
            pattern, "does not name a file of a revision", "Write dvc://repository@revision:path, the path as in the repository."
        )
    if obtain is None:
        raise _refused(
            pattern, "is in a DVC repository, from which nothing is fetched here", "Fetch it first, and name the file or the folder."
        )
    path = obtain(pattern)
    if path.is_dir():
        return [_Place(str(file), file.stat().st_size) for file in _local(str(path), Path.cwd())]
    called = Path(address["path"]).name
    if suffix(Path(called)) not in SUFFIXES:
        raise _unknown(pattern, suffix(Path(called)))
    return [_Place(str(path.resolve()), path.stat().st_size, called)]


def _unknown(pattern: str, kind: str) -> ConfigurationError:
    hint = INSTEAD.get(kind, f"{KNOWN}; convert or rename it.")
    return _refused(pattern, f"has the suffix {kind or '(none)'!r}, which no reader knows", hint)


def _local(pattern: str, base: Path) -> list[Path]:
    path = base.absolute() / Path(pattern).expanduser()
    state = _state(path)
    if state == NOTHING and not glob.has_magic(pattern):
        raise _refused(pattern, "does not exist", _instead(path))
    if state == FILE and suffix(path) not in SUFFIXES:
        raise _unknown(pattern, suffix(path))
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


def _source(place: _Place, pattern: str) -> Source:
    if remote.is_remote(place.uri):
        return Source(uri=place.uri, sha256=remote.sha256(place.uri), bytes=place.bytes)
    try:
        sha256 = hashing.sha256_file(Path(place.uri))
    except OSError as error:
        which = "" if Path(pattern).name == place.name else f"names {place.uri}, which "
        hint = f"Let this user read it; `ls -l {place.uri}` shows who may."
        raise _refused(pattern, f"{which}cannot be read: {error.strerror}", hint) from None
    return Source(uri=place.uri, sha256=sha256, bytes=place.bytes, called=place.called)


def _refused(pattern: str, what: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"data_curation.sources: {addresses.without_password(pattern)!r} {what}", hint=hint)
