"""Which rows repeat an earlier one, and which rows belong together so that no split may part them.

Rows are known by their index among the compared ones: those of earlier revisions first, then the new ones in input order.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import hashing, process
from components.common.errors import EngineMissingError
from components.data_curation.cleaning import Drop
from components.data_curation.rows import Row

# A word is a run of letters, digits and underscores; where writing does without spaces (Han, kana, Hangul), a single character.
WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]|[^\W぀-ヿ㐀-䶿一-鿿가-힯]+")
QUIET = {"DAFT_ANALYTICS_ENABLED": "0", "DO_NOT_TRACK": "true", "DAFT_PROGRESS_BAR": "0"}
ATTEMPTS = 2
ROOM = 64 * 1024  # bytes: less than the engine writes


def words(text: str) -> str:
    """A text as lower-case words with single spaces, as near duplicates are compared; one of signs only stays what it is."""
    return " ".join(WORD.findall(text.lower())) or " ".join(text.split())


def exact(kind: str, text: str) -> str:
    """What makes two rows of a kind exactly equal: their conversations in lower case, with any white space as one space."""
    return f"{kind}: " + " ".join(text.casefold().split())


def answer(row: Row, at_least: int) -> str | None:
    """The words of what the row answers (of a pair, of the chosen answer), or None when they are too few to be telling."""
    if row.kind == "text":
        return None
    answers = row.answers()
    spoken = words("\n".join(answers[:1] if row.kind == "preference" else answers))
    return spoken if spoken.count(" ") + 1 >= at_least else None


@dataclass
class Likeness:
    """What was found. `published` rows come first. `exact` and `words` give every row's first row with the same text (int64, (rows,)).

    `word_pairs` joins first rows of different words (int64, (pairs, 2), a < b) by their `similarity`. `joined` are further pairs that
    belong together (int64, (pairs, 2)). What rows have in common, an answer, a prompt that is judged or a group, has a number of its own
    from the number of rows on, and its rows are joined with that: so they stay together where one of them is left out. Those of groups are
    the last, from `groups` on.
    """

    published: int
    exact: Any
    words: Any
    joined: list[Any]
    word_pairs: Any
    similarity: Any
    groups: int

    def edges(self) -> Any:
        """All pairs of rows, and of what rows have in common, that belong together (int64, (pairs, 2))."""
        import numpy

        rows = numpy.arange(len(self.exact))
        equal = [numpy.stack([rows, first], axis=1)[first != rows] for first in (self.exact, self.words)]
        return numpy.concatenate([*equal, self.word_pairs, *self.joined])


def likeness(hashes: dict[str, tuple[Any, Any]], published: int, pairs: dict[str, tuple[Any, Any]]) -> Likeness:
    """What follows from the rows' hashes ({name: (uint64 (rows, 2), bool (rows,))}) and from the pairs of rows that the engine found.

    Those may be of any rows that have the texts: each stands for the first one that has its text.
    """
    import numpy

    from components.data_curation.engine import first_equal

    empty: Any = numpy.empty((0, 2), dtype=numpy.int64)
    exact, words = (first_equal(hashes[name][0]) for name in ("exact", "words"))
    joined, begin, groups = [], len(exact), 0
    for name in ("answer", "prompt", "group"):
        alike, groups = pairs[name][0] if name in pairs else empty, begin
        edges, begin = _in_common(*hashes[name], alike, begin)
        joined.append(edges)
    found, similarity = pairs.get("words", (empty, numpy.empty(0)))
    return Likeness(published, exact, words, joined, numpy.sort(words[found], axis=1), similarity, groups)


def _in_common(halves: Any, known: Any, alike: Any, begin: int) -> tuple[Any, int]:
    """Pairs of a row and the number of what it has in common with others, and of such numbers whose values are alike; and the next number.

    `alike` are pairs of rows (int64, (pairs, 2)) with such values. A value of one row that is like no other has no number.
    """
    import numpy

    from components.data_curation.engine import first_equal

    rows = numpy.flatnonzero(known)
    first: Any = numpy.arange(len(known))
    first[rows] = rows[first_equal(halves[known])]
    shared = numpy.bincount(first[rows], minlength=len(known)) > 1
    shared[first[alike].ravel()] = True
    number = numpy.cumsum(shared) - 1 + begin  # of a first row whose value is shared
    members = rows[shared[first[rows]]]
    edges = numpy.stack([members, number[first[members]]], axis=1)
    return numpy.concatenate([edges, number[first[alike]]]), begin + int(shared.sum())


def drops(ids: Sequence[str], found: Likeness, *, against: Sequence[str] | None = None, left_out: Collection[int] = ()) -> dict[int, Drop]:
    """Why rows go, by index. In input order: a row goes when it repeats, or nearly repeats, an earlier one that stays.

    Earlier revisions' rows count only where `against` says which revision each is of; they never go themselves. Rows that are `left_out`
    for another reason stand for no other.
    """
    exact, words, by_later = (found.exact, found.words, _by_later(found)) if against is not None else _among_new(found)
    keeper: dict[int, tuple[int, float]] = {}  # of a first row by words: the row that stays for it, and how similar that is
    gone: dict[int, Drop] = {}

    def named(row: int) -> str:
        return f"{ids[row]} of {against[row]}" if against and row < found.published else ids[row]

    for row in _repeating(exact, words, by_later, found.published):
        if row in left_out:
            continue
        first, same = int(words[row]), int(exact[row])
        if first == row:
            kept = [(a, similarity) for a, similarity in by_later.get(row, []) if keeper.get(a, (a, 1.0))[0] == a and a not in left_out]
            keeper[row] = max(kept, key=lambda pair: (pair[1], -pair[0]), default=(row, 1.0))
        stays, similarity = keeper.get(first, (first, 1.0))
        if same != row:
            also = "" if stays == first == same else f", which {named(stays)} stands for"
            gone[row] = Drop("exact_duplicate", f"equal to {named(same)}{also}")
        elif stays != row:
            gone[row] = Drop("near_duplicate", f"similarity {similarity:.3f} to {named(stays)}")
    return gone


def _repeating(exact: Any, words: Any, by_later: dict[int, Any], published: int) -> list[int]:
    """The new rows that may repeat another, in order."""
    import numpy

    rows = numpy.arange(len(exact))
    some = numpy.union1d(numpy.flatnonzero((exact != rows) | (words != rows)), numpy.fromiter(by_later, numpy.int64, len(by_later)))
    return [int(row) for row in some[some >= published]]


def _by_later(found: Likeness) -> dict[int, list[tuple[int, float]]]:
    by_later: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (a, b), similarity in zip(found.word_pairs.tolist(), found.similarity.tolist(), strict=True):
        by_later[b].append((a, similarity))
    return by_later


def _among_new(found: Likeness) -> tuple[Any, Any, dict[int, list[tuple[int, float]]]]:
    """The same as if there were no rows of earlier revisions: the first new row stands for each text."""
    if not found.published:
        return found.exact, found.words, _by_later(found)
    exact, words = (_first_new(first, found.published) for first in (found.exact, found.words))
    stands = {int(first): int(words[row]) for row, first in enumerate(found.words) if row >= found.published}
    by_later: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (a, b), similarity in zip(found.word_pairs.tolist(), found.similarity.tolist(), strict=True):
        if a in stands and b in stands:
            low, high = sorted((stands[a], stands[b]))
            by_later[high].append((low, similarity))
    return exact, words, by_later


def _first_new(first: Any, published: int) -> Any:
    import numpy

    _, index, inverse = numpy.unique(first[published:], return_index=True, return_inverse=True)
    return numpy.concatenate([numpy.arange(published), index[inverse] + published])


def clusters(rows: int, edges: Any) -> Any:
    """A number for every row (int64, (rows,)): equal for rows that are joined over any number of edges."""
    import numpy
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    nodes = max(rows, int(edges.max(initial=-1)) + 1)
    graph: Any = coo_array((numpy.ones(len(edges), dtype=numpy.int8), (edges[:, 0], edges[:, 1])), shape=(nodes, nodes))
    return connected_components(graph, directed=False)[1][:rows]


def similar(folder: Path, places: Any, threshold: float, ray_address: str | None) -> dict[str, tuple[Any, Any]]:
    """Run the engine over the folder's texts: {"words" or "answer": (pairs of indices into `places`, their similarities)}.

    Raises EngineMissingError when it gives no result.
    """
    import numpy
    from pyarrow import parquet

    run_engine(folder, ["similar", str(folder), str(threshold), *([ray_address] if ray_address else [])], lambda: _is_whole(folder))
    table = parquet.read_table(folder / "pairs.parquet")
    found = {}
    for name in ("words", "answer"):
        some = table.filter(_equal(table["of"], name))
        pairs = numpy.stack([numpy.searchsorted(places, some[end].to_numpy()) for end in ("a", "b")], axis=1)
        found[name] = (pairs, some["similarity"].to_numpy())
    return found


def _equal(column: Any, value: str) -> Any:
    from pyarrow import compute

    return compute.equal(column, value)


def run_engine(folder: Path, arguments: Sequence[str], whole: Callable[[], bool]) -> None:
    """Start the engine until its result is whole: its exit code says little, as it may crash after its work is done."""
    if importlib.util.find_spec("daft") is None:
        raise EngineMissingError("Daft is not installed", hint="pip install 'tuneline[curation]'")
    command = process.module_command("components.data_curation.engine", *arguments)
    log = folder / "engine.log"
    code = 0
    for _ in range(ATTEMPTS):
        with log.open("wb") as file:
            code = subprocess.run(  # die_with_parent only makes a system call
                command,
                stdout=file,
                stderr=file,
                env=process.python_environment(**QUIET),
                preexec_fn=process.die_with_parent,
                check=False,
            ).returncode
        process.keep_in_step_log(log)
        if whole():
            return
    (folder / "room").write_bytes(bytes(ROOM))  # where the disk is full this says so, and the engine could not
    tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-400:]
    raise EngineMissingError(
        f"the Daft engine ended twice without a result (exit code {code}): {tail or 'it said nothing'}",
        hint="Exit code -9 is a lack of memory: curate fewer rows at once, or use a larger machine. `tuneline doctor` checks the engine.",
    )


def _is_whole(folder: Path) -> bool:
    """Whether result.json is there, counts every file of texts, and its files have the digests that it names."""
    try:
        result = json.loads((folder / "result.json").read_bytes())
        texts = sorted(file.name for file in folder.glob("texts-*.parquet"))
        return result["texts"] == texts and all(hashing.sha256_file(folder / name) == sha for name, sha in result["files"].items())
    except (OSError, ValueError, KeyError):
        return False
