"""Which rows repeat an earlier one, and which rows belong together so that no split may part them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import hashing, process
from components.common.errors import EngineMissingError
from components.data_curation.cleaning import Drop
from components.data_curation.config import DataCurationConfig
from components.data_curation.rows import Row

# A word is a run of letters, digits and underscores; where writing does without spaces (Han, kana, Hangul), a single character.
WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]|[^\W぀-ヿ㐀-䶿一-鿿가-힯]+")
QUIET = {"DAFT_ANALYTICS_ENABLED": "0", "DO_NOT_TRACK": "true", "DAFT_PROGRESS_BAR": "0"}
ATTEMPTS = 2
ROOM = 64 * 1024  # bytes: less than the engine writes


@dataclass
class Likeness:
    """What the engine found. Rows are their places in the input; a first row stands for all rows with the same text.

    `exact`, `words` and `answer` give a row's first row (`answer` only where the answer counts); `word_pairs` and `answer_pairs` join first
    rows (a < b) by their similarity.
    """

    exact: list[int]
    words: list[int]
    answer: dict[int, int]
    word_pairs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # b: [(a, similarity), …]
    answer_pairs: list[tuple[int, int]] = field(default_factory=list)


def words(text: str) -> str:
    """A text as lower-case words with single spaces, as near duplicates are compared; one of signs only stays what it is."""
    return " ".join(WORD.findall(text.lower())) or " ".join(text.split())


def exact(row: Row) -> str:
    """What makes two rows exactly equal: their conversations in lower case, with any white space as one space."""
    return f"{row.kind}: " + " ".join(row.text().casefold().split())


def answer(row: Row, at_least: int) -> str | None:
    """The words of what the row answers (of a pair, of the chosen answer), or None when they are too few to be telling."""
    if row.kind == "text":
        return None
    answers = row.answers()
    spoken = words("\n".join(answers[:1] if row.kind == "preference" else answers))
    return spoken if spoken.count(" ") + 1 >= at_least else None


def equal(rows: Sequence[Row], config: DataCurationConfig) -> Likeness:
    """What can be told without the engine: which rows have equal texts, words or answers. Similar ones are not looked for."""
    answers = {place: said for place, row in enumerate(rows) if (said := answer(row, config.answer_min_words)) is not None}
    first: dict[str, int] = {}
    return Likeness(
        exact=_firsts(exact(row) for row in rows),
        words=_firsts(words(row.text()) for row in rows),
        answer={place: first.setdefault(said, place) for place, said in answers.items()},
    )


def _firsts(texts: Iterable[str]) -> list[int]:
    first: dict[str, int] = {}
    return [first.setdefault(text, place) for place, text in enumerate(texts)]


def compare(rows: Sequence[Row], folder: Path, config: DataCurationConfig) -> Likeness:
    """Run the engine over the rows in `folder`, which is created and removed again. Raises EngineMissingError."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "row": pyarrow.array(range(len(rows)), pyarrow.int64()),
        "exact": pyarrow.array([exact(row) for row in rows], pyarrow.large_string()),
        "words": pyarrow.array([words(row.text()) for row in rows], pyarrow.large_string()),
        "answer": pyarrow.array([answer(row, config.answer_min_words) for row in rows], pyarrow.large_string()),
    }
    parquet.write_table(pyarrow.table(columns), folder / "texts.parquet")
    _run(folder, config.near_duplicate_threshold, len(rows))
    found = _load(folder)
    shutil.rmtree(folder)
    return found


def _run(folder: Path, threshold: float, rows: int) -> None:
    """Start the engine until its result is whole: its exit code says little, as it may crash after its work is done."""
    if importlib.util.find_spec("daft") is None:
        raise EngineMissingError("Daft is not installed", hint="pip install 'tuneline[curation]'")
    command = process.module_command("components.data_curation.engine", str(folder / "texts.parquet"), str(folder), str(threshold))
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
        if _is_whole(folder, rows):
            return
    (folder / "room").write_bytes(bytes(ROOM))  # where the disk is full this says so, and the engine could not
    tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-400:]
    raise EngineMissingError(
        f"the Daft engine ended twice without a result (exit code {code}): {tail or 'it said nothing'}",
        hint="Exit code -9 is a lack of memory: curate fewer rows at once, or use a larger machine. `tuneline doctor` checks the engine.",
    )


def _is_whole(folder: Path, rows: int) -> bool:
    """Whether result.json is there, counts every row, and its files have the digests that it names."""
    try:
        result = json.loads((folder / "result.json").read_bytes())
        return result["rows"] == rows and all(hashing.sha256_file(folder / name) == sha for name, sha in result["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _load(folder: Path) -> Likeness:
    from pyarrow import parquet

    groups = parquet.read_table(folder / "groups.parquet").to_pydict()
    pairs = parquet.read_table(folder / "pairs.parquet").to_pylist()
    answers = {row: first for row, first in zip(groups["row"], groups["answer"], strict=True) if first is not None}
    found = Likeness(groups["exact"], groups["words"], answers)
    by_later: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for pair in pairs:
        if pair["of"] == "words":
            by_later[pair["b"]].append((pair["a"], pair["similarity"]))
        else:
            found.answer_pairs.append((pair["a"], pair["b"]))
    found.word_pairs = dict(by_later)
    return found


def drops(rows: Sequence[Row], found: Likeness) -> dict[int, Drop]:
    """Why rows go, by place. In input order: a row goes when it repeats, or nearly repeats, an earlier one that stays."""
    gone: dict[int, Drop] = {}
    keeper: dict[int, tuple[int, float]] = {}  # of each first row by words: the row that stays for it, and how similar that is
    for place in range(len(rows)):
        first = found.words[place]
        if first == place:
            kept = [(a, similarity) for a, similarity in found.word_pairs.get(place, []) if keeper[a][0] == a]
            keeper[place] = max(kept, key=lambda pair: (pair[1], -pair[0]), default=(place, 1.0))
        stays, similarity = keeper[first]
        if (same := found.exact[place]) != place:
            also = "" if stays == first == same else f", which {rows[stays].id} stands for"
            gone[place] = Drop("exact_duplicate", f"equal to {rows[same].id}{also}")
        elif stays != place:
            gone[place] = Drop("near_duplicate", f"similarity {similarity:.3f} to {rows[stays].id}")
    return gone


def clusters(rows: Sequence[Row], found: Likeness) -> list[int]:
    """A number for every row: equal for rows that are joined, over any number of steps, by equal or similar texts or answers.

    Preference and unpaired rows with one prompt are joined too: a judgement of it is half an answer to the other.
    """
    import numpy
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = [*enumerate(found.exact), *enumerate(found.words), *found.answer.items(), *found.answer_pairs, *_same_prompts(rows)]
    edges += [(a, b) for b, pairs in found.word_pairs.items() for a, _ in pairs]
    left, right = numpy.array(edges, dtype=numpy.int64).reshape(-1, 2).T
    graph: Any = coo_array((numpy.ones(len(left), dtype=numpy.int8), (left, right)), shape=(len(rows), len(rows)))
    return [int(label) for label in connected_components(graph, directed=False)[1]]


def _same_prompts(rows: Sequence[Row]) -> Iterable[tuple[int, int]]:
    first: dict[str, int] = {}
    return [
        (first.setdefault(words(row.prompt()), place), place) for place, row in enumerate(rows) if row.kind in ("preference", "unpaired")
    ]
