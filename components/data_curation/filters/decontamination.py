"""Decontamination: rejects rows that share text with an evaluation item.

An item is one record of an evaluation set. Its question and its other texts (passage, options, answers) are compared
separately, as normalized words: a long text by its n-grams, a shorter text as a whole, and a question of few words only
if it is a whole sentence, line or labelled part of the row.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from components.common import personal_data
from components.common.row_comparison.words import WORD_PATTERN
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.data_curation.config import DataCurationConfig, DecontaminationConfig
from components.data_curation.filters.evaluation_items import ItemTexts, split_item
from components.data_curation.filters.reject_reasons import CONTAMINATED, Rejection
from components.data_curation.reading import file_readers
from components.data_curation.reading.raw_records import Source, UnreadableRecord

if TYPE_CHECKING:
    import numpy as np

# WinoGrande and ARC have pairs of items with the same specific question; more items share only phrases such as
# SocialIQA's "What will others want to do next?".
MAX_SHARING_ITEMS = 2
Words = list[bytes]
DETAIL_PATTERN = re.compile(r"shares \d+ words with (.*):\d+: .*")
FIRST_OPTIONS = ("a", "1")  # the marker of the first option may follow a sentence that the options complete
# An apostrophe within a word is no boundary. The pattern begins with one character class, which is several times faster.
SENTENCE_BOUNDARY = re.compile(r"[\n.?!:;()\[\]{}<>|*#\"“”„«»…。？！：；؟،؛۔।॥¿¡‘‚–—'’](?:(?<!\w['’])|(?!\w))")


def find_contaminating_set(rejection: Rejection) -> str:
    """Return the evaluation set that caused the rejection of a row; "" for another reason."""
    match = DETAIL_PATTERN.fullmatch(rejection.detail) if rejection.declared_reason == CONTAMINATED else None
    return match[1] if match else ""


@dataclass(frozen=True, eq=False)
class _NgramTable:
    """The n-grams of one length: their hashes (uint32, sorted) and their offsets in the index's words (int64)."""

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
    """Index of the texts of the evaluation items.

    Attributes:
        locations: file and line of the item of each text.
        is_question: whether each text is its item's question.
        ngram_counts: the number of distinct n-grams of each text; 1 for a text that is searched for as a whole.
        words: the words of the texts in UTF-8, one text per line.
        offsets: the start of each text in `words`.
        block_filters: the n-gram tables by block length.
        short_questions: the texts with each question of fewer than `shortest` words.
        sets: per evaluation set, the numbers of items, of items with a question that is not searched for, and of
            unreadable records.
        ngram: the configured length of n-grams.
        shortest: the configured minimum length of a text that may be within a sentence of a row.
        min_overlap: the configured minimum share of a text's n-grams.
    """

    locations: Sequence[str]
    is_question: Sequence[bool]
    ngram_counts: np.ndarray
    words: bytes
    offsets: np.ndarray
    block_filters: Sequence[_BlockFilter]
    short_questions: Mapping[bytes, Sequence[int]]
    sets: Mapping[str, Mapping[str, int]]
    ngram: int
    shortest: int
    min_overlap: float

    @staticmethod
    def build(sources: Sequence[Source], config: DataCurationConfig, reporter: Reporter) -> EvaluationIndex:
        """Index the evaluation sets.

        Raises:
            InputError: a set contains no item with text, or a file changed since it was listed.
        """
        reporter.step("reading the evaluation sets")
        builder, unreadable = _IndexBuilder(config.decontamination), Counter[str]()
        for name, source in zip(_name_sets(sources), sources, strict=True):
            first = None  # unreadable record
            for record in file_readers.read_records(source, config):
                if isinstance(record, UnreadableRecord):
                    location = f"{name}:{record.line}: {record.reason}"
                    first = first or personal_data.mask(location)
                    unreadable[name] += 1
                elif texts := split_item(record.fields, config.decontamination.ngram):
                    builder.add_item(name, f"{name}:{record.line}", texts)
            if not builder.items[name]:
                raise InputError(
                    f"the evaluation set {name} contains no item with text" + (f": {first}" if first else ""),
                    hint="Set data_curation.decontamination.sets to files with one item per record (JSONL, JSON, CSV, "
                    "Parquet).",
                )
            if first:
                count = unreadable[name]
                problem = f"{count:,} records are unreadable; the first is" if count > 1 else "1 record is unreadable:"
                reporter.note(f"evaluation set {name}: {problem} {first}")
        index = builder.build({name: unreadable[name] for name in builder.items})
        for name, counts in index.sets.items():
            if counts["unsearchable"]:
                reporter.note(
                    f"evaluation set {name}: the question of {counts['unsearchable']:,} of {format_count(counts['items'], 'item')} "
                    "cannot be searched for: it is too short, is a common phrase, or contains only numbers and single letters"
                )
        return index

    def find_contamination(self, text: str) -> Rejection | None:
        """Return the rejection for the text of an item that shares the most n-grams with the row's text, or None."""
        words, boundaries = _split_sentences(text)
        shared: dict[int, set[bytes]] = defaultdict(set)
        for block_filter in self.block_filters:
            if block_filter.can_match(words):
                for table in block_filter.tables:
                    self._match_ngrams(words, table, shared)
        self._match_short_questions(words, boundaries, shared)
        enough = [one for one, grams in shared.items() if len(grams) >= self.min_overlap * self.ngram_counts[one]]
        if not enough:
            return None
        best = min(enough, key=lambda candidate: (-len(shared[candidate]), candidate))
        grams = shared[best]
        name = "its question" if self.is_question[best] else "another text of the item"
        is_whole_text = any(gram.count(b" ") + 1 < self.ngram for gram in grams)
        overlap = f"all of {name}" if is_whole_text else f"{len(grams)} of {self.ngram_counts[best]} n-grams of {name}"
        covered: set[int] = set()
        for length in {gram.count(b" ") + 1 for gram in grams}:
            for i in range(len(words) - length + 1):
                if b" ".join(words[i : i + length]) in grams:
                    covered.update(range(i, i + length))
        return CONTAMINATED.reject(f"shares {len(covered)} words with {self.locations[best]}: {overlap}")

    def _match_short_questions(self, words: Words, boundaries: Sequence[int], shared: dict[int, set[bytes]]) -> None:
        """Add the short questions that begin and end at sentence boundaries."""
        for i, start in enumerate(boundaries):
            for end in boundaries[i + 1 :]:
                if end - start >= self.shortest:
                    break
                question = b" ".join(words[start:end])
                for number in self.short_questions.get(question, ()):
                    shared[number].add(question)

    def _match_ngrams(self, words: Words, table: _NgramTable, shared: dict[int, set[bytes]]) -> None:
        """Add the shared n-grams by text. The words themselves are compared too, as hashes may collide."""
        import numpy as np

        hashes = np.array(_hash_ngrams(words, table.length), dtype=np.uint32)
        first = np.asarray(np.searchsorted(table.hashes, hashes, "left"))
        last = np.asarray(np.searchsorted(table.hashes, hashes, "right"))
        for i in np.flatnonzero(last > first).tolist():
            gram = b" ".join(words[i : i + table.length])
            for offset in table.offsets[first[i] : last[i]].tolist():
                end = offset + len(gram)
                if self.words[offset:end] == gram and self.words[end : end + 1] in (b" ", b"\n"):
                    shared[bisect_right(self.offsets, offset) - 1].add(gram)


def _name_sets(sources: Sequence[Source]) -> list[str]:
    """Return the file names of the sets, extended by as many parent folders as distinguish sets with equal names.

    Folders that contain all these sets are not part of a name.
    """
    names = [source.name for source in sources]
    for name in {name for name, uses in Counter(names).items() if uses > 1}:
        numbers = [i for i, other in enumerate(names) if other == name]
        folders = [Path(sources[i].uri).parts[:-1] for i in numbers]
        shared = next((depth for depth, level in enumerate(zip_longest(*folders)) if len(set(level)) > 1), 0)
        paths = [(*parts[shared:], name) for parts in folders]
        longest = max(map(len, paths))
        length = next((n for n in range(2, longest) if len({path[-n:] for path in paths}) == len(paths)), longest)
        for i, path in zip(numbers, paths, strict=True):
            names[i] = "/".join(path[-length:])
    return names


def _split_sentences(text: str) -> tuple[Words, list[int]]:
    """Return the normalized words of a text, and the boundaries of its sentences as numbers of words before them."""
    sentences = map(WORD_PATTERN.findall, SENTENCE_BOUNDARY.split(text.lower()))
    found = [words for words in sentences if words]
    ends = list(accumulate(map(len, found)))
    before_options = [end - 1 for words, end in zip(found, ends, strict=True) if words[-1] in FIRST_OPTIONS]
    return _encode_words(" ".join(chain.from_iterable(found))), sorted({0, *ends, *before_options})


def _encode_words(words: str) -> Words:
    return words.encode(errors="surrogatepass").split(b" ")


def _is_informative(words: Words) -> list[bool]:
    """Return for every word whether it is more than a number or a single letter (0 1 2 3 …), which any text contains."""
    return [len(word) > 1 and not word.isdigit() for word in words]


def _hash_ngrams(words: Words, length: int, step: int = 1) -> list[int]:
    """Hash every n-gram, or every `step`-th n-gram; unlike hash(), CRC-32 is the same in every process."""
    return [crc32(b" ".join(words[i : i + length])) for i in range(0, len(words) - length + 1, step)]


class _IndexBuilder:
    """Builder of the index, which collects the texts of the items of all sets."""

    def __init__(self, config: DecontaminationConfig) -> None:
        self._config = config
        self.items: Counter[str] = Counter()
        self._files: list[str] = []  # of each item
        self._locations: list[str] = []  # of each text, like the next three
        self._items, self._is_question, self._offsets = array("q"), bytearray(), array("q")
        self._words = bytearray()
        self._short_questions: dict[bytes, list[int]] = defaultdict(list)
        self._ngram_hashes: dict[int, array[int]] = defaultdict(lambda: array("I"))
        self._ngram_offsets: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self._blocks: dict[int, array[int]] = defaultdict(lambda: array("I"))
        # The numbers of the texts with each question below `ngram` words, by set and question.
        self._whole_questions: dict[tuple[str, bytes], list[int]] = defaultdict(list)

    def add_item(self, file: str, location: str, texts: ItemTexts) -> None:
        """Add an item: its question, unless it is below `shortest_question`, and its other texts of enough words."""
        self.items[file] += 1
        self._files.append(file)
        question = _encode_words(texts.question)
        if len(question) >= min(self._config.shortest_question, self._config.shortest):
            if len(question) < self._config.ngram:
                self._whole_questions[file, b" ".join(question)].append(len(self._locations))
            self._add_text(question, location, is_question=True)
        for words in map(_encode_words, texts.others):
            if len(words) >= self._config.shortest:
                self._add_text(words, location, is_question=False)

    def _add_text(self, words: Words, location: str, *, is_question: bool) -> None:
        if len(words) >= self._config.shortest:
            self._add_ngrams(words)
        elif any(_is_informative(words)):
            self._short_questions[b" ".join(words)].append(len(self._locations))
        self._locations.append(location)
        self._items.append(len(self._files) - 1)
        self._is_question.append(is_question)
        self._offsets.append(len(self._words))
        self._words += b" ".join(words) + b"\n"

    def _add_ngrams(self, words: Words) -> None:
        length = min(len(words), self._config.ngram)
        informative = _is_informative(words)
        searched = [any(informative[i : i + length]) for i in range(len(words) - length + 1)]
        offsets = list(accumulate((len(word) + 1 for word in words), initial=len(self._words)))
        block = self._get_block_length(length)
        self._blocks[block].extend(_hash_ngrams(words, block))
        self._ngram_hashes[length].extend(compress(_hash_ngrams(words, length), searched))
        self._ngram_offsets[length].extend(compress(offsets, searched))

    def _get_block_length(self, length: int) -> int:
        """Return the block length for n-grams of this length; all lengths below `ngram` share a block length."""
        shortest = self._config.ngram if length == self._config.ngram else self._config.shortest
        return (shortest + 1) // 2

    def build(self, unreadable: Mapping[str, int]) -> EvaluationIndex:
        """Return the index of all items, without common phrases.

        These are n-grams and short questions in more than `ignore_common` items; by default, questions that are
        compared as a whole and that more than `MAX_SHARING_ITEMS` items of a set share.
        """
        import numpy as np

        offsets, items = np.array(self._offsets, dtype=np.int64), np.array(self._items, dtype=np.int64)
        ngram_counts: np.ndarray = np.zeros(len(offsets), dtype=np.int64)
        is_common: np.ndarray = np.zeros(len(offsets), dtype=bool)
        if not self._config.ignore_common:
            for sharing in self._whole_questions.values():
                if len(sharing) > MAX_SHARING_ITEMS:
                    is_common[sharing] = True
        tables: dict[int, list[_NgramTable]] = defaultdict(list)  # by block length
        for length in sorted(self._ngram_hashes):
            table = self._build_table(length, offsets, items, is_common)
            texts = np.searchsorted(offsets, table.offsets, "right") - 1
            # One code per pair of n-gram and text, so that each n-gram of a text is counted once.
            codes = np.unique(table.hashes.astype(np.int64) * len(offsets) + texts)
            np.add.at(ngram_counts, codes % len(offsets), 1)
            tables[self._get_block_length(length)].append(table)
        filters = [
            _BlockFilter(block, np.unique(np.array(self._blocks[block], dtype=np.uint32)), of_block)
            for block, of_block in sorted(tables.items())
        ]
        limit = self._config.ignore_common or len(self._files)
        short = {
            question: [text for text in texts if not is_common[text]]
            for question, texts in self._short_questions.items()
            if len(texts) <= limit
        }
        ngram_counts[[text for texts in short.values() for text in texts]] = 1
        is_searchable = (ngram_counts > 0) & np.frombuffer(bytes(self._is_question), dtype=bool)
        searchable = Counter(self._files[item] for item in items[is_searchable].tolist())
        sets = {
            file: {"items": count, "unsearchable": count - searchable[file], "unreadable": unreadable[file]}
            for file, count in self.items.items()
        }
        return EvaluationIndex(
            locations=self._locations,
            is_question=[bool(one) for one in self._is_question],
            ngram_counts=ngram_counts,
            words=bytes(self._words),
            offsets=offsets,
            block_filters=filters,
            short_questions=short,
            sets=sets,
            ngram=self._config.ngram,
            shortest=self._config.shortest,
            min_overlap=self._config.min_overlap,
        )

    def _build_table(
        self, length: int, text_offsets: np.ndarray, items: np.ndarray, is_common: np.ndarray
    ) -> _NgramTable:
        """Return the n-grams of one length that are not common phrases."""
        import numpy as np

        hashes = np.array(self._ngram_hashes[length], dtype=np.uint32)
        offsets = np.array(self._ngram_offsets[length], dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        hashes, offsets = hashes[order], offsets[order]
        texts = np.searchsorted(text_offsets, offsets, "right") - 1
        hashes, offsets = hashes[~is_common[texts]], offsets[~is_common[texts]]
        if self._config.ignore_common:
            item = items[texts]
            pairs = np.unique(hashes.astype(np.int64) * len(self._files) + item)
            distinct, counts = np.unique(pairs // len(self._files), return_counts=True)
            keep = np.isin(hashes, distinct[counts <= self._config.ignore_common])
            hashes, offsets = hashes[keep], offsets[keep]
        return _NgramTable(length, hashes, offsets)
