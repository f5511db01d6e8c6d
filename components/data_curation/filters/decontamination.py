"""Decontamination: rejects rows that share text with an evaluation item.

An item is one record of an evaluation set with all its texts: question, answer, choices. Texts are compared as
normalized words, and n-grams never cross the fields of a record.
"""

# N-grams have 13 words, in shorter texts at least 8, as in Brown et al., Language Models are Few-Shot Learners, 2020
# (arXiv 2005.14165), appendix C. Brown et al. remove matches from web pages; here the whole row is rejected, because a
# row of instruction data is short. They ignore n-grams in more than 10 training documents; here `ignore_common` counts
# evaluation items, so that a row's result is independent of other rows.

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import TYPE_CHECKING
from zlib import crc32

from components.common import personal_data
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.data_curation.config import DataCurationConfig, DecontaminationConfig
from components.data_curation.filters.reject_reasons import CONTAMINATED, Rejection
from components.data_curation.normalized_words import normalize_words
from components.data_curation.reading import file_readers
from components.data_curation.reading.raw_records import Source, UnreadableRecord

if TYPE_CHECKING:
    import numpy as np

Words = list[bytes]
DETAIL_PATTERN = re.compile(r"shares \d+ words with (.*):\d+: .*")


def find_contaminating_set(rejection: Rejection) -> str:
    """Return the evaluation set (a file's name) that caused the rejection of a row; "" for another reason."""
    match = DETAIL_PATTERN.fullmatch(rejection.detail) if rejection.reason == CONTAMINATED.name else None
    return match[1] if match else ""


@dataclass(frozen=True, eq=False)
class _NgramTable:
    """The n-grams of one length: their hashes (uint32, sorted) and their offsets in the index's text (int64)."""

    length: int
    hashes: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, eq=False)
class _BlockFilter:
    """A cheap test that excludes most texts from the search in the n-gram tables.

    Any `2 · block − 1` consecutive words contain one of the blocks that start at multiples of `block`. Therefore a text
    shares no n-gram of that length if none of its blocks is a block of an item (`blocks`: uint32 hashes, sorted).
    """

    block: int
    blocks: np.ndarray
    tables: Sequence[_NgramTable]

    def can_match(self, words: Words) -> bool:
        """Return whether a table may contain an n-gram of these words."""
        import numpy as np

        hashes = np.array(_hash_ngrams(words, self.block, self.block), dtype=np.uint32)
        return bool((self.blocks.take(np.searchsorted(self.blocks, hashes), mode="clip") == hashes).any())


@dataclass(frozen=True, eq=False)
class EvaluationIndex:
    """Index of the evaluation items.

    Attributes:
        item_names: file and line of each searchable item.
        ngram_counts: the number of distinct n-grams of each searchable item.
        item_text: the words of the searchable items in UTF-8, one field per line.
        item_offsets: the start of each searchable item in `item_text`.
        block_filters: the n-gram tables by block length.
        sets: per file, the numbers of items, unsearchable items and unreadable records.
        ngram: the configured length of n-grams.
        min_overlap: the configured minimum share of an item's n-grams.
    """

    item_names: Sequence[str]
    ngram_counts: np.ndarray
    item_text: bytes
    item_offsets: np.ndarray
    block_filters: Sequence[_BlockFilter]
    sets: Mapping[str, Mapping[str, int]]
    ngram: int
    min_overlap: float

    @property
    def item_count(self) -> int:
        """Number of items in all sets."""
        return sum(counts["items"] for counts in self.sets.values())

    @property
    def unsearchable_count(self) -> int:
        """Number of items that are not searched for: every field is too short or consists of common phrases only."""
        return sum(counts["too_short"] for counts in self.sets.values())

    @staticmethod
    def build(sources: Sequence[Source], config: DataCurationConfig, reporter: Reporter) -> EvaluationIndex:
        """Index the evaluation sets.

        Raises:
            InputError: a set contains no item with text, or a file changed since it was listed.
        """
        reporter.step("reading the evaluation sets")
        builder, unreadable = _IndexBuilder(config.decontamination), Counter[str]()
        for source in sources:
            first = None  # unreadable record
            for record in file_readers.read_records(source, config):
                if isinstance(record, UnreadableRecord):
                    location = f"{record.file}:{record.line}: {record.reason}"
                    first = first or personal_data.mask(location)
                    unreadable[source.name] += 1
                elif texts := [words for text in _iterate_texts(record.fields) if (words := normalize_words(text))]:
                    builder.add_item(record.file, f"{record.file}:{record.line}", texts)
            if not builder.items[source.name]:
                raise InputError(
                    f"the evaluation set {source.name} contains no item with text" + (f": {first}" if first else ""),
                    hint="Set data_curation.decontamination.sets to files with one item per record (JSONL, JSON, CSV, "
                    "Parquet).",
                )
            if first:
                count = unreadable[source.name]
                problem = f"{count:,} records are unreadable, the first" if count > 1 else "1 record is unreadable:"
                reporter.note(f"evaluation set {source.name}: {problem} {first}")
        index = builder.build({name: unreadable[name] for name in builder.items})
        if index.unsearchable_count:
            reporter.note(
                f"{index.unsearchable_count:,} of {index.item_count:,} evaluation items are too short or too common "
                "to be searched for"
            )
        return index

    def find_contamination(self, text: str) -> Rejection | None:
        """Return the rejection for the first item that shares the most n-grams with the text, or None."""
        words = _split_words(normalize_words(text))
        shared: dict[int, set[bytes]] = defaultdict(set)
        for block_filter in self.block_filters:
            if block_filter.can_match(words):
                for table in block_filter.tables:
                    self._match_ngrams(words, table, shared)
        enough = [item for item, grams in shared.items() if len(grams) >= self.min_overlap * self.ngram_counts[item]]
        if not enough:
            return None
        item = min(enough, key=lambda candidate: (-len(shared[candidate]), candidate))
        grams = shared[item]
        is_whole_text = any(gram.count(b" ") + 1 < self.ngram for gram in grams)
        overlap = (
            "a complete text of the item" if is_whole_text else f"{len(grams)} of its {self.ngram_counts[item]} n-grams"
        )
        covered: set[int] = set()
        for length in {gram.count(b" ") + 1 for gram in grams}:
            for i in range(len(words) - length + 1):
                if b" ".join(words[i : i + length]) in grams:
                    covered.update(range(i, i + length))
        return CONTAMINATED.reject(f"shares {len(covered)} words with {self.item_names[item]}: {overlap}")

    def _match_ngrams(self, words: Words, table: _NgramTable, shared: dict[int, set[bytes]]) -> None:
        """Add the shared n-grams by item. The words themselves are compared too, as hashes may collide."""
        import numpy as np

        hashes = np.array(_hash_ngrams(words, table.length), dtype=np.uint32)
        first = np.asarray(np.searchsorted(table.hashes, hashes, "left"))
        last = np.asarray(np.searchsorted(table.hashes, hashes, "right"))
        for i in np.flatnonzero(last > first).tolist():
            gram = b" ".join(words[i : i + table.length])
            for offset in table.offsets[first[i] : last[i]].tolist():
                end = offset + len(gram)
                if self.item_text[offset:end] == gram and self.item_text[end : end + 1] in (b" ", b"\n"):
                    shared[bisect_right(self.item_offsets, offset) - 1].add(gram)


def _split_words(words: str) -> Words:
    return words.encode(errors="surrogatepass").split(b" ")


def _hash_ngrams(words: Words, length: int, step: int = 1) -> list[int]:
    """Hash every n-gram, or every `step`-th n-gram; unlike hash(), CRC-32 is the same in every process."""
    return [crc32(b" ".join(words[i : i + length])) for i in range(0, len(words) - length + 1, step)]


def _iterate_texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_texts(inner)


class _IndexBuilder:
    """Builder of the index, which collects the items of all sets."""

    def __init__(self, config: DecontaminationConfig) -> None:
        self._config = config
        self.items: Counter[str] = Counter()
        self._names: list[str] = []
        self._files: list[str] = []
        self._item_offsets, self._text = array("q"), bytearray()
        self._hashes: dict[int, array[int]] = defaultdict(lambda: array("I"))
        self._offsets: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self._blocks: dict[int, array[int]] = defaultdict(lambda: array("I"))

    def add_item(self, file: str, name: str, texts: Sequence[str]) -> None:
        """Add an item by its normalized texts: their n-grams, and each shorter text of at least `shortest` words."""
        self.items[file] += 1
        split = [_split_words(text) for text in dict.fromkeys(texts)]
        fields = [words for words in split if len(words) >= self._config.shortest]
        if not fields:
            return
        self._names.append(name)
        self._files.append(file)
        self._item_offsets.append(len(self._text))
        for words in fields:
            length = min(len(words), self._config.ngram)
            # Numbers and single letters alone (0 1 2 3 …) occur in any text: such n-grams are ignored.
            informative = [len(word) > 1 and not word.isdigit() for word in words]
            searched = [any(informative[i : i + length]) for i in range(len(words) - length + 1)]
            offsets = list(accumulate((len(word) + 1 for word in words), initial=len(self._text)))
            block = self._get_block_length(length)
            self._blocks[block].extend(_hash_ngrams(words, block))
            self._hashes[length].extend(compress(_hash_ngrams(words, length), searched))
            self._offsets[length].extend(compress(offsets, searched))
            self._text += b" ".join(words) + b"\n"

    def _get_block_length(self, length: int) -> int:
        """Return the block length for n-grams of this length; all lengths below `ngram` share a block length."""
        shortest = self._config.ngram if length == self._config.ngram else self._config.shortest
        return (shortest + 1) // 2

    def build(self, unreadable: Mapping[str, int]) -> EvaluationIndex:
        """Return the index of all items. N-grams in more than `ignore_common` items are ignored."""
        import numpy as np

        item_offsets = np.array(self._item_offsets, dtype=np.int64)
        ngram_counts: np.ndarray = np.zeros(len(item_offsets), dtype=np.int64)
        tables: dict[int, list[_NgramTable]] = defaultdict(list)  # by block length
        for length in sorted(self._hashes):
            hashes = np.array(self._hashes[length], dtype=np.uint32)
            offsets = np.array(self._offsets[length], dtype=np.int64)
            order = np.argsort(hashes, kind="stable")
            hashes, offsets = hashes[order], offsets[order]
            items = np.searchsorted(item_offsets, offsets, "right") - 1
            # One code per pair of n-gram and item, so that each n-gram of an item is counted once.
            codes = np.unique(hashes.astype(np.int64) * len(item_offsets) + items)
            distinct, counts = np.unique(codes // len(item_offsets), return_counts=True)
            if self._config.ignore_common:
                distinct = distinct[counts <= self._config.ignore_common]
                codes = codes[np.isin(codes // len(item_offsets), distinct)]
                keep = np.isin(hashes, distinct)
                hashes, offsets = hashes[keep], offsets[keep]
            np.add.at(ngram_counts, codes % len(item_offsets), 1)
            tables[self._get_block_length(length)].append(_NgramTable(length, hashes, offsets))
        filters = [
            _BlockFilter(block, np.unique(np.array(self._blocks[block], dtype=np.uint32)), of_block)
            for block, of_block in sorted(tables.items())
        ]
        searchable = Counter(file for file, count in zip(self._files, ngram_counts.tolist(), strict=True) if count)
        sets = {
            file: {"items": items, "too_short": items - searchable[file], "unreadable": unreadable[file]}
            for file, items in self.items.items()
        }
        return EvaluationIndex(
            self._names,
            ngram_counts,
            bytes(self._text),
            item_offsets,
            filters,
            sets,
            self._config.ngram,
            self._config.min_overlap,
        )
