"""Search for rows in all revisions by id, text or source.

The result lists the revisions that could not be searched completely, with the reason.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal, TypedDict

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.counts import format_count
from components.common.runtime.errors import TunelineError, UsageError
from components.common.runtime.reporters import Reporter
from components.data_versioning import dataset_rows, git_repository
from components.data_versioning.dataset_rows import Row
from components.data_versioning.version_store import Version, VersionStore

SearchField = Literal["row", "text", "source"]
OWN_SOURCE = "own_source"  # source of a rejected row, whose `source` is its file; missing in older datasets
FetchVersion = Callable[[Version, VersionStore, Reporter], AbstractContextManager[Artifact]]


@dataclass(frozen=True)
class Query:
    """A search query. Messages never contain its value, which may be text that has to be erased.

    Attributes:
        by: Kind of the value: id of a row, text or source.
        value: Value to search for.

    Raises:
        UsageError: the value is empty or blank.
    """

    by: SearchField
    value: str = field(repr=False)

    def __post_init__(self) -> None:
        if not normalize(self.value):
            raise UsageError(f"--{self.by} is empty", hint="Enter a value; a blank text would match every row.")

    def matches(self, row: Row) -> bool:
        """Return whether a row has this id, contains this text, or is from this source."""
        if self.by == "row":  # a digest also matches rows of equal content, whose ids have a counter
            counter = r"(-[0-9]+)?" if re.fullmatch(r"[0-9a-f]{16}", self.value) else ""
            return bool(re.fullmatch(re.escape(self.value) + counter, row.get("id") or ""))
        if self.by == "source":
            # A dataset records the path of a file below the configured source. A longer path or an address therefore
            # matches every file whose recorded path is its suffix.
            return any(
                self.value in (source, PurePath(source).name) or self.value.endswith((f"/{source}", f":{source}"))
                for name in ("source", OWN_SOURCE)
                if (source := row.get(name))
            )
        content = {name: value for name, value in row.items() if name != "id"}
        for name in ("meta", "tools"):
            with suppress(KeyError, TypeError, ValueError):  # absent, or not JSON
                content[name] = json.loads(content[name])
        return normalize(self.value) in normalize("\n".join(_list_texts(content)))


class TableMatches(TypedDict):
    """Matching rows of one table: a split, `rejected` or `quarantine`.

    Attributes:
        table: Name of the table.
        rows: Number of matching rows.
        ids: Ids of the rows; empty for quarantined rows.
        sources: Sources of the rows.
        at: File and line of rejected or quarantined rows.
    """

    table: str
    rows: int
    ids: list[str]
    sources: list[str]
    at: list[str]


@dataclass
class RevisionMatches:
    """Matching rows of one revision.

    Attributes:
        name: Name of the dataset.
        tag: Version tag.
        rev: Commit in the data repository.
        content_sha256: Digest of the dataset artifact.
        uri: The revision in the form dvc://REPOSITORY@COMMIT:PATH.
        places: Matches by table.
    """

    name: str
    tag: str
    rev: str
    content_sha256: str
    uri: str
    places: list[TableMatches]


@dataclass
class SearchResult:
    """Result of a search in all revisions.

    Attributes:
        found: Revisions with matches.
        read: Digests of the searched datasets.
        revisions: Number of all revisions.
        not_searched: Revisions that were not searched completely, as {"what": tag, "why": reason, "hint"}.
    """

    found: list[RevisionMatches] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    revisions: int = 0
    not_searched: list[dict[str, str]] = field(default_factory=list)


def search_revisions(query: Query, store: VersionStore, fetch: FetchVersion, reporter: Reporter) -> SearchResult:
    """Search all revisions of all datasets in the repository; search each distinct content once.

    Args:
        query: The search query.
        store: Storage of the versions; its name is ignored.
        fetch: Context manager that yields the dataset of a revision.
        reporter: Receives progress.
    """
    result = SearchResult()
    searched: dict[str, tuple[dict[str, str], list[TableMatches]]] = {}  # gap and matches by digest
    for dataset_store in list_datasets(store):
        for version in dataset_store.list_versions():
            digest = version.content_sha256
            result.revisions += 1
            try:
                if digest not in searched:
                    with fetch(version, dataset_store, reporter) as dataset:
                        searched[digest] = describe_gap(query, dataset), search_dataset(query, dataset)
            except TunelineError as error:
                result.not_searched.append({"what": version.tag, "why": error.message, "hint": error.hint})
                continue
            gap, matches = searched[digest]
            if gap:
                result.not_searched.append({"what": version.tag, **gap})
            if matches:
                result.found.append(
                    RevisionMatches(dataset_store.name, version.tag, version.rev, digest, version.uri, matches)
                )
    result.read = set(searched)
    return result


def list_datasets(store: VersionStore) -> list[VersionStore]:
    """Return the stores of all datasets in the repository, sorted by name."""
    names = {
        match[1]
        for tag, rev in git_repository.list_tags(store.repository).items()
        if (match := git_repository.VERSION_TAG.fullmatch(tag))
        and git_repository.has_file(store.repository, rev, f"datasets/{match[1]}.dvc")
    }
    return [replace(store, name=name) for name in sorted(names)]


def search_dataset(query: Query, dataset: Artifact) -> list[TableMatches]:
    """Return the matching rows of a dataset, by table."""
    tables = []
    for name in (*dataset_rows.list_splits(dataset), dataset_rows.REJECTED, dataset_rows.QUARANTINE):
        is_quarantine = name == dataset_rows.QUARANTINE
        table = dataset_rows.read_quarantine(dataset) if is_quarantine else dataset_rows.read_rows(dataset, name)
        rows = [row for row in table if query.matches(row)]
        if not rows:
            continue
        locations = []
        if is_quarantine:
            locations = [f"{row['source']}:{row['line']}" for row in rows]
        elif name == dataset_rows.REJECTED:
            locations = [f"{row.get('source')}:{row.get('line')} ({row.get('reason')})" for row in rows]
        sources = {row.get(OWN_SOURCE) or row.get("source") or "" for row in rows} - {""}
        ids = [] if is_quarantine else [row["id"] for row in rows]
        tables.append(TableMatches(table=name, rows=len(rows), ids=ids, sources=sorted(sources), at=locations))
    return tables


def describe_gap(query: Query, dataset: Artifact) -> dict[str, str]:
    """Return why a search of this dataset is incomplete: {"why", "hint"}; {} if it is complete."""
    if query.by != "source":
        return {}
    files = [source.uri for source in dataset.manifest.inputs if source.kind == "raw"]
    if any(query.matches({"source": uri}) for uri in files):
        names = {*files, *(PurePath(uri).name for uri in files)}
        kept = sum(
            row.get("source") not in names and not query.matches(row)
            for split in dataset_rows.list_splits(dataset)
            for row in dataset_rows.read_rows(dataset, split, columns=["source"])
        )
        if kept:
            return {
                "why": f"{format_count(kept, 'kept row records', 'kept rows record')} a source but no file, and may come "
                "from this file",
                "hint": "Search for the recorded source, for the text or for the id as well.",
            }
    rejected = dataset_rows.read_rows(dataset, dataset_rows.REJECTED, columns=["source", OWN_SOURCE])
    unknown = sum(OWN_SOURCE not in row and not query.matches(row) for row in rejected)
    if not unknown:
        return {}
    return {
        "why": f"{format_count(unknown, 'rejected row records', 'rejected rows record')} a file but no source",
        "hint": "Search for the text or id as well, or curate again; an earlier version of tuneline wrote this dataset.",
    }


def normalize(text: str) -> str:
    """Normalize text for comparison: Unicode NFKC, case-folded, white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _list_texts(value: object) -> Iterator[str]:
    """Yield every string in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_texts(item)
