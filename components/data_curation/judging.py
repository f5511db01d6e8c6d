"""What becomes of every row: kept in a split, or dropped with its reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.data_curation import duplicates, engine, splits
from components.data_curation.cleaning import Drop
from components.data_curation.config import DataCurationConfig
from components.data_curation.rows import numbered
from components.data_curation.staging import FIRST_CHUNK, Staged
from components.data_curation.work import HASHES

Similar = Callable[[Any], dict[str, tuple[Any, Any]]]


@dataclass(frozen=True)
class Judged:
    """By the sources' rows in input order: their ids, their splits ("" for dropped ones), and why rows were dropped for being alike others.

    Why the filters dropped a row stands in its chunk. `groups` is how many groups of rows there are that belong together; one goes into one
    split as a whole. `at_home` counts kept rows that an earlier revision has too. `torn_groups` counts values of group_by whose kept rows
    lie in several splits, as only earlier revisions can have put them. `renamed` tells of rows whose id another row had before: the
    first, in words, and how many.
    """

    ids: list[str]
    splits: list[str]
    alike: dict[int, Drop]
    groups: int
    at_home: int
    torn_groups: int
    renamed: tuple[str, int]

    def sizes(self) -> dict[str, int]:
        """Rows by split."""
        counts = Counter(self.splits)
        return {name: counts[name] for name in splits.SPLITS}


def judge(staged: Staged, config: DataCurationConfig, seed: int, similar: Similar) -> Judged:
    """Compare all rows that no filter dropped, and place what stays. `similar` finds similar texts among rows at given places."""
    import numpy

    ids, renamed = _ids(staged)
    rows = _compared(staged)
    published = len(staged.splits)
    found = duplicates.likeness(rows.hashes, published, rows.pairs(similar))
    named = [*staged.ids, *(ids[row] for row in rows.numbers)]
    against = staged.labels if config.published == "drop" else None
    edges = found.edges()
    together = duplicates.clusters(len(named), edges).tolist()
    where, bridges = splits.assign(rows.digests, together, config.fractions, seed, staged.splits, edges, found.groups)
    bridges |= {row: bridges[first] for row, first in enumerate(found.words.tolist()) if first in bridges} if bridges else {}
    alike = duplicates.drops(named, found, against=against, left_out=bridges) | bridges
    placed: Any = numpy.full(len(ids), "", dtype=object)
    for index, row in enumerate(rows.numbers, published):
        placed[row] = "" if index in alike else where[index]
    dropped = {int(rows.numbers[index - published]): why for index, why in alike.items()}
    torn = rows.torn_groups(placed[rows.numbers])
    at_home = sum(index not in alike for index in range(published, published + rows.at_home))
    return Judged(ids, placed.tolist(), dropped, len(set(together[published:])), at_home, torn, renamed)


def _ids(staged: Staged) -> tuple[list[str], tuple[str, int]]:
    """Every row's id, and which had to be renamed: the first, in words, and how many."""
    ids: list[str] = []
    taken: dict[str, int] = {}
    first, count = "", 0
    for done in staged.chunks:
        table = staged.table(done, ["own_id", "digest", "file", "line"]) if done.rows else None
        if table is None:
            continue
        own = table["own_id"].to_pylist()
        some = [numbered(name or digest[:16], taken) for name, digest in zip(own, table["digest"].to_pylist(), strict=True)]
        new = [place for place, name in enumerate(own) if name and name != some[place]]
        if new and not first:
            first = f"{table['file'][new[0]]}:{table['line'][new[0]]} is now {some[new[0]]}"
        ids += some
        count += len(new)
    return ids, (first, count)


@dataclass(frozen=True)
class _Compared:
    """The rows that are compared: earlier revisions' first, then the sources' that an earlier revision has too, then the others.

    `numbers` of the sources' rows among all of them (int64), and for all rows that are compared `places` (int64), `hashes`
    ({name: (uint64 (rows, 2), bool (rows,))}) and content `digests`. `at_home` counts the sources' rows that an earlier revision has too.
    """

    numbers: Any
    places: Any
    hashes: dict[str, tuple[Any, Any]]
    digests: list[str]
    at_home: int

    def pairs(self, similar: Similar) -> dict[str, tuple[Any, Any]]:
        """What `similar` finds among them: {name: (pairs of rows (int64, (pairs, 2)), their similarities)}."""
        import numpy

        order: Any = numpy.argsort(self.places)
        return {name: (order[pairs], similarity) for name, (pairs, similarity) in similar(self.places[order]).items()}

    def torn_groups(self, where: Any) -> int:
        """How many values of group_by have rows of the sources in more than one split (`where`, "" for dropped rows)."""
        halves, known = (column[len(self.digests) - len(where) :] for column in self.hashes["group"])
        splits: dict[tuple[int, int], set[str]] = defaultdict(set)
        for group, split in zip(halves[known].tolist(), where[known], strict=True):
            if split:
                splits[tuple(group)].add(split)
        return sum(len(some) > 1 for some in splits.values())


def _compared(staged: Staged) -> _Compared:
    """What published rows repeat stays before what newcomers do: so they come first. Among equals the order is the input's."""
    import numpy

    numbers, places, hashes, digests = _clean(staged)
    published = len(staged.splits)
    before = set(digests[:published])
    at_home: Any = numpy.array([digest in before for digest in digests], dtype=bool)
    order = numpy.argsort(~at_home, kind="stable")
    sorted_hashes = {name: (halves[order], known[order]) for name, (halves, known) in hashes.items()}
    ordered = [digests[row] for row in order] if before else digests
    return _Compared(numbers[order[published:] - published], places[order], sorted_hashes, ordered, int(at_home[published:].sum()))


def _clean(staged: Staged) -> tuple[Any, Any, dict[str, tuple[Any, Any]], list[str]]:
    """The same of all rows that no filter dropped, earlier revisions' first, else in input order."""
    import numpy

    numbers: list[Any] = []
    places: list[Any] = []
    digests: list[str] = []
    hashes: dict[str, list[tuple[Any, Any]]] = {name: [] for name in HASHES}
    begin = 0
    for done in [*staged.published, *staged.chunks]:
        if not done.rows:
            continue
        table = staged.table(done, ["place", "reason", "digest", *(f"{name}_hash" for name in HASHES)])
        stays = table["reason"].is_null()
        if done.number >= FIRST_CHUNK:
            numbers.append(numpy.flatnonzero(stays.to_numpy()) + begin)
            begin += done.rows
        table = table.filter(stays)
        places.append(table["place"].to_numpy())
        digests += table["digest"].to_pylist()
        for name in HASHES:
            column = table[f"{name}_hash"]
            hashes[name].append((engine.as_numbers(column), column.is_valid().to_numpy()))
    joined = {name: (numpy.concatenate([h for h, _ in some]), numpy.concatenate([k for _, k in some])) for name, some in hashes.items()}
    return numpy.concatenate(numbers), numpy.concatenate(places), joined, digests


def drops_by_filter(staged: Staged) -> Counter[str]:
    """How many rows the filters dropped, by reason."""
    counts: Counter[str] = Counter()
    for done in staged.chunks:
        if done.rows:
            reasons = staged.table(done, ["reason"])["reason"].drop_null()
            counts.update({told["values"]: told["counts"] for told in reasons.value_counts().to_pylist()})
    return counts


def nothing_similar(_: Any) -> dict[str, tuple[Any, Any]]:
    """For a quick look: only equal texts are found."""
    return {}
