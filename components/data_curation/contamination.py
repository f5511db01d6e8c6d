"""Decontamination: a row that holds text of an evaluation item goes, and the item is named.

An item is one record of an evaluation set with all of its text: question, answer, choices. Texts are compared as the words of
duplicates.words, in lower case and without punctuation, and n-grams never cross the fields of a record. The n-gram of 13 words, and 8 as
the least for shorter texts, are those of Brown et al., Language Models are Few-Shot Learners, 2020 (arXiv 2005.14165), appendix C. They cut
matches out of web pages; a row of instruction data is short and goes as a whole. What is so common that it tells nothing they knew from the
training data (more than 10 documents); here it is told from the evaluation sets (`ignore_common`), so that a row's fate does not depend on
other rows.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from pathlib import Path
from typing import Any
from zlib import crc32

from components.common import personal_data
from components.common.errors import ConfigurationError, InputError
from components.common.progress import Reporter
from components.data_curation import readers
from components.data_curation.config import DataCurationConfig, DecontaminationConfig
from components.data_curation.drops import Drop
from components.data_curation.duplicates import words
from components.data_curation.readers import Unread
from components.data_curation.sources import Source, list_sources

REASON = "contaminated"
KEY = "data_curation.decontamination.sets"
Words = list[bytes]
HIT = re.compile(r"shares \d+ words with (.*):\d+: .*")


def list_sets(patterns: Sequence[str], base: Path) -> list[Source]:
    """The files of the evaluation sets, as list_sources finds them. Raises ConfigurationError that names this key."""
    try:
        return list_sources(patterns, base)
    except ConfigurationError as error:
        message = error.message.replace("data_curation.sources", KEY, 1)
        raise ConfigurationError(message, hint=error.hint.replace("data_curation.sources", KEY)) from None


def set_of(why: Drop) -> str:
    """The evaluation set (a file's name) that a row was dropped for; "" for another reason."""
    hit = HIT.fullmatch(why.detail) if why.reason == REASON else None
    return hit[1] if hit else ""


@dataclass(frozen=True, eq=False)
class _Table:
    """The n-grams of one length: their hashes (uint32, sorted) and where in the index's text each stands (int64)."""

    length: int
    hashes: Any
    places: Any


@dataclass(frozen=True, eq=False)
class _Sieve:
    """Says of most texts, from few of their words, that they share no n-gram of the tables.

    Any `2 · block − 1` words in a row hold, whole, one of the blocks that begin at multiples of `block`. So where none of a text's blocks
    is among those of the items (`blocks`: uint32 hashes, sorted), no n-gram of that length, or a longer one, is.
    """

    block: int
    blocks: Any
    tables: tuple[_Table, ...]

    def passes(self, spoken: Words) -> bool:
        """Whether a table may hold an n-gram of these words."""
        import numpy

        last = len(spoken) - self.block + 1
        hashes = [crc32(b" ".join(spoken[i : i + self.block])) for i in range(0, last, self.block)]
        wanted = numpy.array(hashes, dtype=numpy.uint32)
        return bool((self.blocks.take(numpy.searchsorted(self.blocks, wanted), mode="clip") == wanted).any())


@dataclass(frozen=True, eq=False)
class Index:
    """The evaluation items, ready to be looked for in any text. Built once, it can be pickled into other processes.

    `names` are the items that can be found, `totals` how many different n-grams each has, `text` their words (a field a line, UTF-8), and
    `starts` where each item begins in it. `sets` counts by file: items, those too short to be looked for, and unreadable places.
    """

    names: tuple[str, ...]
    totals: Any
    text: bytes
    starts: Any
    sieves: tuple[_Sieve, ...]
    sets: Mapping[str, Mapping[str, int]]
    ngram: int
    min_overlap: float

    @property
    def items(self) -> int:
        """How many items the sets hold."""
        return sum(counts["items"] for counts in self.sets.values())

    @property
    def too_short(self) -> int:
        """How many of them are never found: no field has enough words, or all that they say is too common."""
        return sum(counts["too_short"] for counts in self.sets.values())

    @staticmethod
    def of(sources: Sequence[Source], config: DataCurationConfig, reporter: Reporter) -> Index:
        """Read the evaluation sets. Raises InputError for a set without any text, and where a file changed since it was listed."""
        reporter.step("reading the evaluation sets")
        found, unread = _Found(config.decontamination), Counter[str]()
        for source in sources:
            first = _read(source, config, found, unread)
            if not found.items[source.name]:
                raise _empty(source, first)
            if first:
                count = unread[source.name]
                told = (
                    f"{count:,} places are unreadable, the first {_place(first)}"
                    if count > 1
                    else f"a place is unreadable: {_place(first)}"
                )
                reporter.note(f"evaluation set {source.name}: {told}")
        index = found.index({name: unread[name] for name in found.items})
        if index.too_short:
            reporter.note(f"{index.too_short:,} of {index.items:,} evaluation items are too short, or too common, to be looked for")
        return index

    def drop(self, text: str) -> Drop | None:
        """Why a row with this text goes: the item that it shares most n-grams with (of equals, the first); None where there is none."""
        return self.drop_words(words(text))

    def drop_words(self, spoken: str) -> Drop | None:
        """As `drop`, for a text that duplicates.words has made already."""
        split = _split(spoken)
        shared: dict[int, set[bytes]] = defaultdict(set)
        for sieve in self.sieves:
            if sieve.passes(split):
                for table in sieve.tables:
                    self._look_up(split, table, shared)
        enough = [item for item, grams in shared.items() if len(grams) >= self.min_overlap * self.totals[item]]
        if not enough:
            return None
        item = min(enough, key=lambda one: (-len(shared[one]), one))
        return Drop(REASON, f"shares {_covered(split, shared[item])} words with {self.names[item]}: {self._part(item, shared[item])}")

    def _part(self, item: int, grams: set[bytes]) -> str:
        """How much of an item the n-grams are."""
        whole = any(gram.count(b" ") + 1 < self.ngram for gram in grams)
        return "a whole text of it" if whole else f"{len(grams)} of its {self.totals[item]} n-grams"

    def _look_up(self, spoken: Words, table: _Table, shared: dict[int, set[bytes]]) -> None:
        """Add the n-grams that the words share with items. Words are compared, so an equal hash alone is no match."""
        import numpy

        hashes = numpy.array(_hashes(spoken, table.length), dtype=numpy.uint32)
        first: Any = numpy.searchsorted(table.hashes, hashes, "left")
        last: Any = numpy.searchsorted(table.hashes, hashes, "right")
        for i in numpy.flatnonzero(last > first).tolist():
            gram = b" ".join(spoken[i : i + table.length])
            places = [place for place in table.places[first[i] : last[i]].tolist() if self._stands(gram, place)]
            for place in places:
                shared[bisect_right(self.starts, place) - 1].add(gram)

    def _stands(self, gram: bytes, place: int) -> bool:
        end = place + len(gram)
        return self.text[place:end] == gram and self.text[end : end + 1] in (b" ", b"\n")


def _split(spoken: str) -> Words:
    return spoken.encode(errors="surrogatepass").split(b" ")


def _hashes(spoken: Words, length: int) -> list[int]:
    """Of every n-gram: the same in every process, which Python's own hash of a text is not."""
    return [crc32(b" ".join(spoken[i : i + length])) for i in range(len(spoken) - length + 1)]


def _covered(spoken: Words, grams: set[bytes]) -> int:
    """How many of the words lie in a shared n-gram."""
    lengths = {gram.count(b" ") + 1 for gram in grams}
    begins = [(i, n) for n in lengths for i in range(len(spoken) - n + 1) if b" ".join(spoken[i : i + n]) in grams]
    return len({i + k for i, n in begins for k in range(n)})


def _read(source: Source, config: DataCurationConfig, found: _Found, unread: Counter[str]) -> Unread | None:
    """Add a file's items; returns its first unreadable place."""
    first = None
    for record in readers.read(source, config):
        if isinstance(record, Unread):
            first = first or record
            unread[source.name] += 1
        elif texts := [spoken for text in _texts(record.fields) if (spoken := words(text))]:
            found.add(record.file, f"{record.file}:{record.line}", texts)
    return first


def _texts(value: Any) -> Iterator[str]:
    """Every text in a record, lists and objects in it included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _empty(source: Source, unread: Unread | None) -> InputError:
    why = f": {_place(unread)}" if unread else ""
    return InputError(
        f"the evaluation set {source.name} holds no item with text{why}",
        hint=f"Name files with one item a record (JSONL, JSON, CSV, Parquet) in {KEY}.",
    )


def _place(unread: Unread) -> str:
    return personal_data.masked(f"{unread.file}:{unread.line}: {unread.why}")


def _telling(spoken: Words, length: int) -> list[bool]:
    """Which n-grams have a word in them; numbers and single letters alone (0 1 2 3 …) stand in any text."""
    names = [len(word) > 1 and not word.isdigit() for word in spoken]
    return [any(names[i : i + length]) for i in range(len(spoken) - length + 1)]


class _Found:
    """Collects items, then becomes an index."""

    def __init__(self, config: DecontaminationConfig) -> None:
        self._config = config
        self.items: Counter[str] = Counter()
        self._names: list[str] = []
        self._files: list[str] = []
        self._starts, self._text = array("q"), bytearray()
        self._hashes: dict[int, array[int]] = defaultdict(lambda: array("I"))
        self._places: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self._blocks: dict[int, array[int]] = defaultdict(lambda: array("I"))

    def add(self, file: str, name: str, texts: Sequence[str]) -> None:
        """An item by its texts as words: their n-grams, and each shorter text of at least `shortest` words as a whole."""
        self.items[file] += 1
        split = [_split(text) for text in dict.fromkeys(texts)]
        fields = [one for one in split if len(one) >= self._config.shortest]
        if not fields:
            return
        self._names.append(name)
        self._files.append(file)
        self._starts.append(len(self._text))
        for field in fields:
            self._add_field(field)

    def _add_field(self, spoken: Words) -> None:
        length = min(len(spoken), self._config.ngram)
        block = self._block(length)
        begins = list(accumulate((len(word) + 1 for word in spoken), initial=len(self._text)))
        telling = _telling(spoken, length)
        self._blocks[block].extend(_hashes(spoken, block))
        self._hashes[length].extend(compress(_hashes(spoken, length), telling))
        self._places[length].extend(compress(begins, telling))
        self._text += b" ".join(spoken) + b"\n"

    def _block(self, length: int) -> int:
        """How long the blocks are that tell of n-grams of this length; one length serves all that are shorter than `ngram`."""
        shortest = self._config.ngram if length == self._config.ngram else self._config.shortest
        return (shortest + 1) // 2

    def index(self, unread: Mapping[str, int]) -> Index:
        """The index of all that was added; n-grams in more than `ignore_common` items are left out."""
        import numpy

        starts: Any = numpy.array(self._starts, dtype=numpy.int64)
        totals: Any = numpy.zeros(len(starts), dtype=numpy.int64)
        tables = [self._table(length, starts, totals) for length in sorted(self._hashes)]
        sieves = tuple(
            _Sieve(block, numpy.unique(numpy.array(hashes, dtype=numpy.uint32)), tuple(t for t in tables if self._block(t.length) == block))
            for block, hashes in sorted(self._blocks.items())
        )
        sets = self._counts(totals.tolist(), unread)
        return Index(tuple(self._names), totals, bytes(self._text), starts, sieves, sets, self._config.ngram, self._config.min_overlap)

    def _counts(self, totals: list[int], unread: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Of every file: its items, those that cannot be found, and its unreadable places."""
        found = Counter(file for file, total in zip(self._files, totals, strict=True) if total)
        return {file: {"items": items, "too_short": items - found[file], "unreadable": unread[file]} for file, items in self.items.items()}

    def _table(self, length: int, starts: Any, totals: Any) -> _Table:
        """The table of one length; adds every item's number of different n-grams to `totals`."""
        import numpy

        hashes: Any = numpy.array(self._hashes[length], dtype=numpy.uint32)
        places: Any = numpy.array(self._places[length], dtype=numpy.int64)
        order = numpy.argsort(hashes, kind="stable")
        hashes, places = hashes[order], places[order]
        items = numpy.searchsorted(starts, places, "right") - 1
        codes: Any = numpy.unique(hashes.astype(numpy.int64) * len(starts) + items)  # an item's n-gram counts once
        distinct, counts = numpy.unique(codes // len(starts), return_counts=True)
        if self._config.ignore_common:
            distinct = distinct[counts <= self._config.ignore_common]
            codes = codes[numpy.isin(codes // len(starts), distinct)]
            keep = numpy.isin(hashes, distinct)
            hashes, places = hashes[keep], places[keep]
        numpy.add.at(totals, codes % len(starts), 1)
        return _Table(length, hashes, places)
