"""Lists the source files that match the configured patterns, sorted and with their digests."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from components.common.artifacts import hashing
from components.common.runtime import url_credentials
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError, EngineMissingError
from components.data_curation.reading import remote_files
from components.data_curation.reading.document_extractors import BINARY_EXTRACTORS
from components.data_curation.reading.file_readers import READERS, SETTING_SUFFIXES
from components.data_curation.reading.raw_records import (
    COMPRESSION_SUFFIXES,
    FileLocation,
    Source,
    file_suffix,
    is_utf8,
    to_source_path,
    to_source_uri,
)
from components.data_curation.reading.source_settings import SourceEntry, SourceSettings

SOURCES_KEY, SETS_KEY = "data_curation.sources", "data_curation.decontamination.sets"
SUPPORTED_SUFFIXES = f"a supported suffix: {', '.join(READERS)}, optionally with {' or '.join(COMPRESSION_SUFFIXES)}"
UNSUPPORTED_SUFFIX_HINTS = {
    ".doc": "Save the file as .docx.",
    ".ppt": "Save the file as .pptx.",
    ".wat": "Use the WARC or WET file of the same crawl; a WAT file contains no text.",
}
NOT_A_FILE_HINT = "Use a regular file that the current user can read."
MAX_SUFFIXES = 10  # in a note
FILE, FOLDER, MISSING = "file", "folder", "missing"
DVC_ADDRESS = re.compile(r"dvc://(?P<repository>.+)@(?P<revision>[^@:]+):(?P<path>[^:]+)")
DvcFetcher = Callable[[str], Path]


def list_sources(entries: Sequence[str | SourceEntry], base: Path, obtain: DvcFetcher | None = None) -> list[Source]:
    """Return the distinct files of the sources, with digests, sorted by name and digest.

    A file of several sources is read once for each different settings, and without settings only if no source has any.

    Args:
        entries: files, globs (** descends into folders) or folders with supported files, local or as s3://bucket/key
            and hf://datasets/org/name@revision/path; or dvc://repository@revision:path; each with optional settings.
        base: the base folder of relative patterns.
        obtain: fetches a dvc:// address and returns the local file or folder. None to reject dvc:// addresses.

    Raises:
        ConfigurationError: a pattern matches no file, or a file that is not regular or not readable; or a store does
            not respond; or a setting applies to no file of its source.
        EngineMissingError: the package that reads a document is not installed.
    """
    found: dict[str, tuple[FileLocation, str, list[SourceSettings]]] = {}
    for entry in entries:
        pattern, settings = (entry, SourceSettings()) if isinstance(entry, str) else (entry.path, entry.settings)
        locations = _expand_pattern(pattern, base, obtain)
        _check_settings(pattern, settings, locations)
        for location in locations:
            _, _, several = found.setdefault(location.uri, (location, pattern, []))
            if settings not in several:
                several.append(settings)
    _check_packages([location for location, _, _ in found.values()])
    sources = []
    for location, pattern, several in found.values():
        source = _digest_source(location, pattern)
        stated = [settings for settings in several if settings != SourceSettings()]
        sources += [source.model_copy(update={"settings": settings}) for settings in stated or several]
    return sorted(
        sources, key=lambda source: (source.name, source.sha256, source.uri, source.settings.model_dump_json())
    )


def _check_settings(pattern: str, settings: SourceSettings, locations: Sequence[FileLocation]) -> None:
    suffixes = {file_suffix(Path(location.name)) for location in locations}
    for name, allowed in SETTING_SUFFIXES.items():
        if getattr(settings, name) and not suffixes & allowed:
            raise _source_error(
                pattern,
                f"has the setting {name}, which applies to {', '.join(sorted(allowed))}",
                f"Remove {name} from this source, or set its path to a file with one of these suffixes.",
            )


def _check_packages(locations: Sequence[FileLocation]) -> None:
    """Raise EngineMissingError if the package that reads a document is not installed."""
    for suffix, extractor in BINARY_EXTRACTORS.items():
        names = [location.name for location in locations if file_suffix(Path(location.name)) == suffix]
        if names and (missing := extractor.find_missing()):
            raise EngineMissingError(
                f"{SOURCES_KEY}: reading {names[0]} requires the package {missing}, which is not installed",
                hint="Run: pip install 'tuneline[documents]'",
            )


def list_evaluation_sets(patterns: Sequence[str], base: Path) -> list[Source]:
    """Return the files of the evaluation sets. Errors refer to data_curation.decontamination.sets.

    Raises:
        ConfigurationError: a set does not exist or cannot be read.
    """
    return list_files_of_key(patterns, base, SETS_KEY)


def list_files_of_key(patterns: Sequence[str], base: Path, key: str) -> list[Source]:
    """Return the files that match the patterns, as `list_sources` does. Errors refer to the configuration key.

    Raises:
        ConfigurationError: a file does not exist or cannot be read.
    """
    try:
        return list_sources(patterns, base)
    except ConfigurationError as error:
        message = error.message.replace(SOURCES_KEY, key, 1)
        raise ConfigurationError(message, hint=error.hint.replace(SOURCES_KEY, key)) from None


def find_sources_by_name(
    name: str, patterns: Sequence[str], base: Path, obtain: DvcFetcher | None = None
) -> list[Source]:
    """Return the readable files with this name that match the patterns, with their current digests.

    `patterns` are the paths of sources, `base` and `obtain` the arguments of `list_sources`. Invalid patterns are ignored.
    """
    locations: dict[str, tuple[FileLocation, str]] = {}
    for pattern in patterns:
        with contextlib.suppress(ConfigurationError):
            expanded = _expand_pattern(pattern, base, obtain)
            locations.update({location.uri: (location, pattern) for location in expanded if location.name == name})
    sources = []
    for location, pattern in locations.values():
        with contextlib.suppress(ConfigurationError):
            sources.append(_digest_source(location, pattern))
    return sources


def _expand_pattern(pattern: str, base: Path, obtain: DvcFetcher | None) -> list[FileLocation]:
    if not is_utf8(pattern):
        glob_pattern = "".join(glob.escape(character) if is_utf8(character) else "?" for character in pattern)
        hint = f"Use the file's folder, or a glob with ? for each of these bytes: {glob_pattern!r}."
        raise _source_error(pattern, "contains bytes that are not UTF-8", hint)
    if remote_files.is_remote(pattern):
        return _expand_remote(pattern)
    if pattern.startswith("dvc://"):
        address = DVC_ADDRESS.fullmatch(pattern)
        if address is None:
            hint = "Write dvc://repository@revision:path, with the path in the repository."
            raise _source_error(pattern, "is not a valid DVC address", hint)
        if obtain is None:
            hint = "Set the local path of a fetched file or folder."
            raise _source_error(pattern, "is in a DVC repository, which this command does not fetch", hint)
        path = obtain(pattern)
        if not path.is_dir():
            name = Path(address["path"]).name
            _check_suffix(pattern, Path(name))
            return [FileLocation(to_source_uri(path.resolve()), path.stat().st_size, name)]
        pattern, base = str(path), Path.cwd()
    elif scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", pattern):
        raise _source_error(
            pattern,
            f"has the unsupported scheme {scheme[0]}",
            "Use a local path, or an s3://, hf:// or dvc:// address.",
        )
    return [FileLocation(to_source_uri(path), path.stat().st_size) for path in _expand_local(pattern, base)]


def _expand_remote(pattern: str) -> list[FileLocation]:
    files = remote_files.list_files(pattern)
    if [file.uri for file in files] == [pattern]:
        _check_suffix(pattern, Path(pattern))
    locations = [
        file
        for file in files
        if file_suffix(Path(file.uri)) in READERS
        and not any(part.startswith(".") for part in file.uri.removeprefix(pattern).split("/"))  # hidden files
    ]
    if not locations:
        verb = "matches" if remote_files.GLOB_CHARACTERS.search(pattern) else "contains"
        raise _source_error(pattern, f"{verb} no supported file", f"Use files with {SUPPORTED_SUFFIXES}.")
    return locations


def _check_suffix(pattern: str, path: Path) -> None:
    suffix = file_suffix(path)
    if suffix not in READERS:
        hint = UNSUPPORTED_SUFFIX_HINTS.get(suffix, f"Convert or rename the file to {SUPPORTED_SUFFIXES}.")
        raise _source_error(pattern, f"has the unsupported suffix {suffix!r}" if suffix else "has no suffix", hint)


def _expand_local(pattern: str, base: Path) -> list[Path]:
    path = base.absolute() / Path(pattern).expanduser()
    state = _classify_path(path)
    if state == MISSING and not glob.has_magic(pattern):
        raise _source_error(pattern, "does not exist", _suggest_path(path))
    if state == FILE:
        _check_suffix(pattern, path)
    files, problem = [path], "matches no supported file"
    if state == FOLDER:
        files = [file for file in _walk_folder(pattern, path) if file_suffix(file) in READERS]
        problem = "is a folder without a supported file"
    elif state == MISSING:
        matches = (Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns
        files = [match for match in matches if file_suffix(match) in READERS and _classify_path(match) != FOLDER]
    if not files:
        raise _source_error(pattern, f"{problem}; searched {path}", f"Use files with {SUPPORTED_SUFFIXES}.")
    for file in files:
        if (state := _classify_path(file)) != FILE:
            problem = state if file == path else f"includes {file}, which {state}"
            raise _source_error(pattern, problem, NOT_A_FILE_HINT)
    return [file.resolve() for file in sorted(files)]


def _classify_path(path: Path) -> str:
    """Return FILE, FOLDER or MISSING, or a description of another type, because reading a pipe or device may block."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"is a link to {path.readlink()}, which does not exist" if path.is_symlink() else MISSING
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    states = {
        stat.S_IFREG: FILE,
        stat.S_IFDIR: FOLDER,
        stat.S_IFIFO: "is a named pipe, not a file",
        stat.S_IFSOCK: "is a socket, not a file",
    }
    return states.get(stat.S_IFMT(mode), "is a device, not a file")


def _suggest_path(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"Check the whole path: the folder {folder} does not exist either."
    similar = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.75)
    if similar:
        return f"Use {folder / similar[0]}, or correct the path."
    return f"Check the spelling: {folder} contains no file or folder with that name."


def _walk_folder(pattern: str, folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, except hidden files."""

    def raise_error(error: OSError) -> None:
        problem = f"contains {error.filename}, which cannot be read: {error.strerror}"
        raise _source_error(pattern, problem, "Grant the current user read access, or move the folder.")

    files = []
    for parent, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return files


def describe_skipped_files(entries: Sequence[SourceEntry], base: Path) -> str:
    """Return a note about the files in local folders whose suffix is not supported; "" without such files."""
    folders = {base.absolute() / Path(entry.path).expanduser() for entry in entries if "://" not in entry.path}
    files = {file for folder in folders if folder.is_dir() for file in _walk_folder(str(folder), folder)}
    skipped = Counter(suffix for file in files if (suffix := file_suffix(file)) not in READERS)
    if not skipped:
        return ""
    by_count = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{suffix or 'no suffix'} ({count:,})" for suffix, count in by_count[:MAX_SUFFIXES])
    rest = (
        f" and {format_count(len(skipped) - MAX_SUFFIXES, 'more suffix', 'more suffixes')}"
        if len(skipped) > MAX_SUFFIXES
        else ""
    )
    return f"skipped files with unsupported suffixes in source folders: {listed}{rest}"


def _digest_source(location: FileLocation, pattern: str) -> Source:
    if remote_files.is_remote(location.uri):
        return Source(**vars(location), sha256=remote_files.digest_file(location.uri))
    try:
        sha256 = hashing.sha256_file(to_source_path(location.uri))
    except OSError as error:
        subject = "" if Path(pattern).name == location.name else f"includes {location.uri}, which "
        hint = f"Grant the current user read access to {location.uri}."
        raise _source_error(pattern, f"{subject}cannot be read: {error.strerror}", hint) from None
    return Source(**vars(location), sha256=sha256)


def _source_error(pattern: str, problem: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"{SOURCES_KEY}: {url_credentials.remove_password(pattern)!r} {problem}", hint=hint)
