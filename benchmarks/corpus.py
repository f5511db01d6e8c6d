"""A corpus with known duplicates, built from text that every machine with this Python has, and an exact search for its true pairs.

The sentences come from the docstrings of the standard library (the demo dataset) and the language reference (pydoc's topics). Each sentence
of a document joins the beginning of one sentence to the end of another, so that two documents are similar only if one was derived from the
other. The same Python version and seed give the same bytes.

Words are lower-case runs of letters, digits and underscores. The similarity of two documents is the Jaccard similarity of their sets of
word 5-grams; a document with fewer words is a single 5-gram.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

NGRAM = 5
CHARACTERS = 650  # of a document, on average; each is up to a fifth shorter or longer
EQUAL, REWRITTEN, NEAR = (
    0.04,
    0.01,
    0.25,
)  # shares of the documents: equal to another; in other case and white space; edited copies
TARGETS = (0.50, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95)  # similarities of edited copies, equally often
BETWEEN = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
PAIRS_AT_ONCE = 2_000_000  # pairs compared at once: bounds memory at some gigabytes


@dataclass(frozen=True)
class Corpus:
    """A file of {"id", "text"} lines: its path, the number of documents, and the digest of its bytes."""

    path: Path
    documents: int
    characters: int
    sha256: str


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return re.findall(r"\w+", text.lower())


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the set of word 5-grams of a text."""
    found = words(text)
    return frozenset(zip(*(found[i:] for i in range(NGRAM)), strict=False)) or frozenset([tuple(found)])


def jaccard(left: frozenset[Any], right: frozenset[Any]) -> float:
    """Return the Jaccard similarity of two sets."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def sentences() -> list[list[str]]:
    """Return the sentences of 6 to 40 words in this Python's documentation as lists of words, in alphabetical order."""
    from pydoc_data.topics import topics

    from components.data_curation.python_docs import build

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "python_docs.jsonl")
        build(path)
        answers = [json.loads(line)["messages"][1]["content"] for line in path.open(encoding="utf-8")]
    return [
        sentence.split() for sentence in sorted({s for text in [*answers, *topics.values()] for s in _sentences(text)})
    ]


def _sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph:
            continue
        for sentence in BETWEEN.split(" ".join(paragraph.split())):
            if 6 <= len(sentence.split()) <= 40 and sentence[0].isupper() and sentence[-1] in ".!?":
                yield sentence


def build(path: Path, documents: int, seed: int = 1) -> Corpus:
    """Write a corpus of this number of documents: originals and copies of randomly drawn originals, in random order."""
    rng = random.Random(seed)  # noqa: S311  # a corpus, no secret
    pool = sentences()
    near, equal, rewritten = (round(documents * share) for share in (NEAR, EQUAL, REWRITTEN))
    originals = [_document(pool, rng) for _ in range(documents - near - equal - rewritten)]
    texts = list(originals)
    texts += [near_copy(rng.choice(originals), TARGETS[i % len(TARGETS)], pool, rng) for i in range(near)]
    texts += [rng.choice(originals) for _ in range(equal)]
    texts += [_rewritten(rng.choice(originals), rng) for _ in range(rewritten)]
    rng.shuffle(texts)
    return _write(path, texts)


def templated(path: Path, documents: int, seed: int = 1) -> tuple[Corpus, list[tuple[int, int]]]:
    """Write a corpus whose documents all begin with the same 100 words; return the pairs (earlier, later) that are more similar than that.

    The last 25 of a document's 125 words are its own, so any two documents have a similarity of 0.66. Every twentieth document shares 9 more
    words with another one, which raises their similarity to 0.77.
    """
    rng = random.Random(seed)  # noqa: S311  # a corpus, no secret

    def drawn(count: int) -> list[str]:
        return [f"w{rng.randrange(30_000)}" for _ in range(count)]

    template, texts, pairs = drawn(100), list[list[str]](), []
    for number in range(documents):
        like = rng.randrange(number) if number and number % 20 == 0 else None
        pairs += [] if like is None else [(like, number)]
        texts.append([*template, *drawn(25)] if like is None else [*texts[like][:109], *drawn(16)])
    return _write(path, [" ".join(text) for text in texts]), pairs


def _write(path: Path, texts: Sequence[str]) -> Corpus:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for number, text in enumerate(texts):
            line = (json.dumps({"id": f"d{number:08d}", "text": text}, ensure_ascii=False) + "\n").encode()
            digest.update(line)
            file.write(line)
    return Corpus(path, len(texts), sum(map(len, texts)), digest.hexdigest())


def collect(path: Path, folders: Sequence[Path]) -> Corpus:
    """Write a corpus of the texts of all records in the folders, as the curation reads them."""
    from components.data_curation.config import DataCurationConfig
    from components.data_curation.reading import file_readers, raw_records, record_formats
    from components.data_curation.reading.source_files import list_sources

    config = DataCurationConfig()
    records = (
        record
        for source in list_sources([str(folder) for folder in folders], Path.cwd())
        for record in file_readers.read_records(source, config)
    )
    readable = (record for record in records if isinstance(record, raw_records.Record))
    return _write(path, [row.text() for record in readable for row in record_formats.parse_record(record)])


def texts(path: Path) -> list[str]:
    """Yield the texts of a corpus in the order of the file; the n-th has the id d<n>."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _document(pool: Sequence[list[str]], rng: random.Random) -> str:
    length = rng.uniform(0.8, 1.2) * CHARACTERS
    parts: list[str] = []
    while sum(map(len, parts)) + len(parts) < length - 60:  # half a sentence and what the last one overshoots
        parts.append(" ".join(_spliced(pool, rng)))
    return " ".join(parts)


def _spliced(pool: Sequence[list[str]], rng: random.Random) -> list[str]:
    front, back = rng.choice(pool), rng.choice(pool)
    return [*front[: rng.randint(2, len(front) - 2)], *back[rng.randint(2, len(back) - 2) :]]


def near_copy(text: str, target: float, pool: Sequence[list[str]], rng: random.Random) -> str:
    """Return the text, edited until its similarity to the original is within 0.02 of the target."""
    original = shingles(text)
    copy = text.split()
    while jaccard(original, shingles(" ".join(copy))) > target + 0.01:
        edited = _edited(copy, pool, rng)
        if jaccard(original, shingles(" ".join(edited))) < target - 0.02:
            edited = [*copy, rng.choice(rng.choice(pool))]  # the gentlest edit: one 5-gram more
        copy = edited
    return " ".join(copy)


def _edited(copy: list[str], pool: Sequence[list[str]], rng: random.Random) -> list[str]:
    """Return the text with a word replaced, removed or inserted or, in one of six cases, a run of words replaced by a sentence."""
    at = rng.randrange(len(copy))
    kind = rng.randrange(6)
    if kind == 0:
        return [*copy[:at], *_spliced(pool, rng), *copy[at + rng.randint(5, 15) :]]
    new = [] if kind == 1 else [rng.choice(rng.choice(pool))]
    return [*copy[:at], *new, *copy[at + (kind != 2) :]]


def _rewritten(text: str, rng: random.Random) -> str:
    """Return the same words in capitals, or on several lines."""
    return text.upper() if rng.random() < 0.5 else re.sub(r"(?<=[.!?]) ", "\n\n", text)


def true_pairs(documents: Sequence[str], threshold: float) -> tuple[Any, Any]:
    """Return all pairs a < b whose similarity reaches the threshold, as sorted int64 (pairs, 2), and their similarities.

    The result is exact except for collisions of 64-bit hashes. Two sets of similarity t share at least a share t of the members of either, so
    they share one of the first n − ⌈t·n⌉ + 1 members in any common order. Rarest-first order leaves few pairs to compare (S. Chaudhuri et al.,
    A Primitive Operator for Similarity Joins in Data Cleaning, 2006).
    """
    import numpy

    owner, shingle = _all_shingles(documents)
    sizes = numpy.bincount(owner, minlength=len(documents))
    candidates = _sharing(owner, shingle, sizes, threshold)
    return _compared(owner, shingle, sizes, candidates, threshold)


def _all_shingles(documents: Sequence[str]) -> tuple[Any, Any]:
    """Return document and number of every distinct 5-gram of every document, by document; rarer 5-grams have lower numbers."""
    import numpy

    known: dict[str, int] = {}
    hashed = [
        _hashes(numpy.array([known.setdefault(w, len(known) + 1) for w in words(text) or [""]], dtype=numpy.uint64))
        for text in documents
    ]
    owner: Any = numpy.repeat(numpy.arange(len(hashed)), [len(h) for h in hashed])
    _, inverse, counts = numpy.unique(numpy.concatenate(hashed), return_inverse=True, return_counts=True)
    rank: Any = numpy.empty(len(counts), dtype=numpy.int64)
    rank[numpy.argsort(counts, kind="stable")] = numpy.arange(len(counts))
    number = rank[inverse]
    order = numpy.lexsort((number, owner))
    return owner[order], number[order]


def _hashes(numbers: Any) -> Any:
    """Return the distinct 64-bit hashes of the word 5-grams (multiply and xorshift, as in SplitMix64)."""
    import numpy

    width = min(NGRAM, len(numbers))
    total: Any = numpy.zeros(len(numbers) - width + 1, dtype=numpy.uint64)
    for i in range(width):
        total = (total + numbers[i : i + len(total)]) * numpy.uint64(0xBF58476D1CE4E5B9)
        total ^= total >> numpy.uint64(29)
    return numpy.unique(total)


def _sharing(owner: Any, shingle: Any, sizes: Any, threshold: float) -> Any:
    """Return the pairs of documents that share one of their rarest 5-grams and whose sizes allow the similarity."""
    import numpy

    starts = numpy.cumsum(sizes) - sizes
    first = sizes - numpy.ceil(threshold * sizes - 1e-9).astype(numpy.int64) + 1
    rare = numpy.arange(len(owner)) - starts[owner] < first[owner]
    order = numpy.lexsort((owner[rare], shingle[rare]))
    documents, keys = owner[rare][order], shingle[rare][order]
    ends = numpy.flatnonzero(numpy.r_[keys[1:] != keys[:-1], True]) + 1
    codes: Any = numpy.empty(0, dtype=numpy.int64)
    lengths = numpy.diff(ends, prepend=0)
    for length in numpy.unique(lengths[lengths > 1]):
        codes = numpy.union1d(codes, _codes(documents, (ends - lengths)[lengths == length], int(length), len(sizes)))
    pairs = numpy.stack([codes // len(sizes), codes % len(sizes)], axis=1)
    low, high = numpy.sort(sizes[pairs], axis=1).T
    return pairs[low >= threshold * high - 1e-9]


def _codes(documents: Any, starts: Any, length: int, limit: int) -> Any:
    """Return each pair within runs of one length once, encoded as one number."""
    import numpy

    left, right = numpy.triu_indices(length, 1)
    step = max(1, PAIRS_AT_ONCE // len(left))
    found = []
    for i in range(0, len(starts), step):
        runs = documents[starts[i : i + step, None] + numpy.arange(length)]
        found.append(numpy.unique(runs[:, left] * limit + runs[:, right]))
    return numpy.unique(numpy.concatenate(found))


def _compared(owner: Any, shingle: Any, sizes: Any, pairs: Any, threshold: float) -> tuple[Any, Any]:
    import numpy
    from scipy.sparse import csr_array

    ends: Any = numpy.r_[0, numpy.cumsum(sizes)]
    matrix = csr_array(
        (numpy.ones(len(owner), dtype=numpy.int32), shingle, ends), shape=(len(sizes), int(shingle.max()) + 1)
    )
    bounds = [*range(0, len(pairs), PAIRS_AT_ONCE // 20), len(pairs)]
    shared = [matrix[pairs[i:j, 0]].multiply(matrix[pairs[i:j, 1]]).sum(axis=1) for i, j in pairwise(bounds) if j > i]
    together = numpy.concatenate(shared) if shared else numpy.empty(0)
    similarity = together / (sizes[pairs].sum(axis=1) - together)
    enough = similarity >= threshold - 1e-12
    return pairs[enough], similarity[enough]
