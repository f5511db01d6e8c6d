"""Finding a row in every revision: by its id, by text it holds, by the source it was read from.

An answer that leaves something out must say so: what could not be searched is named, with the reason.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

from components.common.artifacts import Artifact
from components.common.errors import TunelineError, UsageError
from components.common.progress import Reporter
from components.data_versioning import repository, rows
from components.data_versioning.place import Place, Version

By = Literal["row", "text", "source"]
OWN_SOURCE = "own_source"  # of a rejected row, whose `source` is its file; datasets of earlier versions lack it
Obtained = Callable[[Version, Place, Reporter], AbstractContextManager[Artifact]]


@dataclass(frozen=True)
class Query:
    """What is looked for. Its value stays out of every message: it may be the very text that somebody wants forgotten."""

    by: By
    value: str = field(repr=False)

    def __post_init__(self) -> None:
        if not normal(self.value):
            raise UsageError(f"--{self.by} is empty", hint="Say what to look for; a blank text would be found in every row.")


@dataclass
class Places:
    """Where a dataset holds it: rows of a split, rows among the rejected, or lines that could not be read.

    `sources` are what these were read from; `at` says file and line, of what was rejected or not readable.
    """

    table: str
    rows: int = 0
    ids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    at: list[str] = field(default_factory=list)


@dataclass
class Found:
    """A revision that holds it."""

    name: str
    tag: str
    rev: str
    content_sha256: str
    uri: str
    places: list[dict[str, Any]]


@dataclass
class Searched:
    """What was searched: revisions with a hit, the digests of all that were read, and what could not be."""

    found: list[Found] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    revisions: int = 0
    not_searched: list[dict[str, str]] = field(default_factory=list)


def revisions(query: Query, place: Place, obtained: Obtained, reporter: Reporter) -> Searched:
    """Search every revision of every dataset in the repository, each distinct content once."""
    searched = Searched()
    seen: dict[str, list[dict[str, Any]]] = {}
    gaps: dict[str, dict[str, str]] = {}
    for one in every(place):
        for version in one.versions():
            searched.revisions += 1
            try:
                if version.content_sha256 not in seen:
                    with obtained(version, one, reporter) as dataset:
                        gaps[version.content_sha256] = left_out(query, dataset)
                        seen[version.content_sha256] = within(query, dataset)
            except TunelineError as error:
                searched.not_searched.append({"what": version.tag, "why": error.message, "hint": error.hint})
                continue
            if gap := gaps[version.content_sha256]:
                searched.not_searched.append({"what": version.tag, **gap})
            if places := seen[version.content_sha256]:
                searched.found.append(Found(one.name, version.tag, version.rev, version.content_sha256, version.uri, places))
    searched.read = set(seen)
    return searched


def every(place: Place) -> list[Place]:
    """The place of every dataset in the repository, by name."""
    tags = repository.names(place.repository)
    matches = ((re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_-]*)-v[0-9]+", tag), rev) for tag, rev in tags.items())
    names = {m[1] for m, rev in matches if m and repository.holds(place.repository, rev, f"datasets/{m[1]}.dvc")}
    return [replace(place, name=name) for name in sorted(names)]


def within(query: Query, dataset: Artifact) -> list[dict[str, Any]]:
    """Where a dataset holds it: [{"table", "rows", "ids", "sources", "at"}], a table being a split, `rejected` or `quarantine`."""
    matches = MATCHES[query.by](query.value)
    found = [_table(dataset, name, matches) for name in [*rows.splits(dataset), rows.REJECTED]]
    found.append(_quarantine(dataset, matches))
    return [asdict(places) for places in found if places.rows]


def left_out(query: Query, dataset: Artifact) -> dict[str, str]:
    """Why a search of this dataset leaves rows out: {"why", "hint"}; {} where it does not."""
    if query.by != "source":
        return {}
    matches = MATCHES[query.by](query.value)
    if kept := _of_unknown_files(dataset, matches):
        why = f"kept rows of which only what they call their source is known, not whether they are of this file: {kept:,}"
        return {"why": why, "hint": "Search for what they call their source, for their text or their id as well."}
    rejected = rows.rows(dataset, rows.REJECTED, columns=["source", OWN_SOURCE])
    unknown = sum(OWN_SOURCE not in row and not matches(row) for row in rejected)
    why = f"rejected rows of which only the file is known, not what they call their source: {unknown:,}"
    hint = "An earlier version of tuneline wrote them: search for their text or id as well, or curate anew."
    return {"why": why, "hint": hint} if unknown else {}


def _of_unknown_files(dataset: Artifact, matches: Callable[[dict[str, Any]], bool]) -> int:
    """Of a dataset that was made of a file that matches: the kept rows that may be of it, because they name no file."""
    files = [one.uri for one in dataset.manifest.inputs if one.kind == "raw"]
    if not any(matches({"source": uri}) for uri in files):
        return 0
    names = {*files, *(PurePath(uri).name for uri in files)}
    kept = (row for split in rows.splits(dataset) for row in rows.rows(dataset, split, columns=["source"]))
    return sum(row.get("source") not in names and not matches(row) for row in kept)


def _table(dataset: Artifact, name: str, matches: Callable[[dict[str, Any]], bool]) -> Places:
    places, sources = Places(name), set[str]()
    for row in rows.rows(dataset, name):
        if matches(row):
            places.rows += 1
            places.ids.append(row["id"])
            sources.add(row.get(OWN_SOURCE) or row.get("source") or "")
            if name == rows.REJECTED:
                places.at.append(f"{row.get('source')}:{row.get('line')} ({row.get('reason')})")
    places.sources = sorted(sources - {""})
    return places


def _quarantine(dataset: Artifact, matches: Callable[[dict[str, Any]], bool]) -> Places:
    places = Places(rows.QUARANTINE)
    for line in rows.quarantined(dataset):
        if matches({"source": line.get("file"), "why": line.get("why")}):
            places.rows += 1
            places.at.append(f"{line.get('file')}:{line.get('line')}")
            places.sources = sorted({*places.sources, str(line.get("file"))})
    return places


def _by_row(value: str) -> Callable[[dict[str, Any]], bool]:
    """The row with this id; of a digest also the rows with the same content, which got a running number."""
    number = r"(-[0-9]+)?" if re.fullmatch(r"[0-9a-f]{16}", value) else ""
    pattern = re.compile(re.escape(value) + number)
    return lambda row: bool(pattern.fullmatch(row.get("id") or ""))


def _by_source(value: str) -> Callable[[dict[str, Any]], bool]:
    """Rows read from this source, or from a file of this name. Of a file a dataset knows the name and the folders below the one named as
    its source, so a path or an address is taken for any file whose name it ends with."""

    def matches(row: dict[str, Any]) -> bool:
        told = [source for name in ("source", OWN_SOURCE) if (source := row.get(name))]
        return any(value in (source, PurePath(source).name) or value.endswith((f"/{source}", f":{source}")) for source in told)

    return matches


def _by_text(value: str) -> Callable[[dict[str, Any]], bool]:
    wanted = normal(value)
    return lambda row: wanted in normal("\n".join(_strings(row)))


MATCHES: dict[By, Callable[[str], Callable[[dict[str, Any]], bool]]] = {"row": _by_row, "source": _by_source, "text": _by_text}


def normal(text: str) -> str:
    """Text as it is compared: Unicode's compatibility form, no case, every run of white space one blank."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _strings(row: dict[str, Any]) -> Iterator[str]:
    """Every text in a row: its content and what the source said beside it, but not its id."""
    for name, value in row.items():
        if name in ("meta", "tools") and isinstance(value, str):
            yield from _texts(_parsed(value))
        elif name != "id":
            yield from _texts(value)


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
