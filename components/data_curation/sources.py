"""The files a dataset is made from: found, ordered, and known by their digests before anything is read."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from components.common import hashing
from components.common.errors import ConfigurationError

COMPRESSED = (".gz", ".zst")
SUFFIXES = (".csv", ".json", ".jsonl", ".md", ".ndjson", ".parquet", ".text", ".tsv", ".txt")


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
    nothing, or a file that cannot be read.
    """
    paths: dict[Path, str] = {}
    for pattern in patterns:
        for path in _expand(pattern, base):
            paths.setdefault(path, pattern)
    return [_source(path, pattern) for path, pattern in paths.items()]


def suffix(path: Path) -> str:
    """.jsonl for rows.jsonl and for rows.jsonl.gz, in lower case."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _expand(pattern: str, base: Path) -> list[Path]:
    path = base.absolute() / Path(pattern).expanduser()
    if path.is_file():
        if suffix(path) not in SUFFIXES:
            raise _refused(
                pattern, f"has the suffix {suffix(path) or '(none)'!r}, which no reader knows", f"Known are {', '.join(SUFFIXES)}."
            )
        return [path.resolve()]
    found = sorted(_below(path) if path.is_dir() else _matches(path))
    if not found:
        what = "holds no file of a known kind" if path.is_dir() else "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise _refused(pattern, what, f"Looked in {base.absolute()}. Known are {', '.join(SUFFIXES)}, also with .gz or .zst.")
    return [p.resolve() for p in found]


def _below(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if _is_readable_kind(p) and not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _matches(pattern: Path) -> Iterator[Path]:
    return (Path(p) for p in glob.glob(str(pattern), recursive=True) if _is_readable_kind(Path(p)))  # noqa: PTH207 - absolute patterns


def _is_readable_kind(path: Path) -> bool:
    return path.is_file() and suffix(path) in SUFFIXES


def _source(path: Path, pattern: str) -> Source:
    try:
        return Source(uri=str(path), sha256=hashing.sha256_file(path), bytes=path.stat().st_size)
    except OSError as error:
        raise _refused(pattern, f"cannot be read: {error.strerror}: {path}", "Check the file's permissions.") from None


def _refused(pattern: str, what: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"data_curation.sources: {pattern!r} {what}", hint=hint)
