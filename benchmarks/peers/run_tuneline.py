"""tuneline's search for near duplicates without the rest of the curation: words in Python, the engine in its child process.

python -m benchmarks.peers.run_tuneline run CORPUS.jsonl FOLDER        same arguments as the peers' scripts
python -m benchmarks.peers.run_tuneline removed CORPUS.jsonl FOLDER
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from hashlib import blake2b
from pathlib import Path

from benchmarks import corpus
from components.data_curation import normalized_words
from components.data_curation.comparison import engine_process
from components.data_curation.comparison.hash_arrays import convert_hashes, find_first_equal_rows

THRESHOLD = 0.7


def run(path: Path, folder: Path) -> None:
    """Find the duplicates and write the numbers of the documents to remove."""
    groups, pairs = engine(corpus.texts(path), folder)
    (folder / "removed.json").write_text(json.dumps(repeats(groups, pairs)))


def engine(texts: list[str], folder: Path) -> tuple[list[int], dict[int, list[int]]]:
    """Return for every text the first one with the same words and, for each of these, the earlier ones that are similar."""
    import numpy
    import pyarrow
    from pyarrow import parquet

    spoken = [normalized_words.normalize_words(text) for text in texts]
    hashes = pyarrow.array([blake2b(text.encode(), digest_size=16).digest() for text in spoken], pyarrow.binary(16))
    nothing = {
        "answer": pyarrow.nulls(len(texts), pyarrow.large_string()),
        "answer_hash": pyarrow.nulls(len(texts), pyarrow.binary(16)),
        "line_keys": pyarrow.array([[]] * len(texts), pyarrow.list_(pyarrow.int64())),  # plain text has no prompt
        "answer_key": pyarrow.array([0] * len(texts), pyarrow.int64()),
    }
    words = {"words": pyarrow.array(spoken, pyarrow.large_string()), "words_hash": hashes}
    places = numpy.arange(len(texts))
    parquet.write_table(pyarrow.table({"place": places, **words, **nothing}), folder / "texts-000000.parquet")
    found, _ = engine_process.find_similar_texts(folder, places, THRESHOLD, None)["words"]
    similar: dict[int, list[int]] = defaultdict(list)
    for earlier, later in found.tolist():
        similar[later].append(earlier)
    return find_first_equal_rows(convert_hashes(hashes)).tolist(), similar


def repeats(first: list[int], similar: dict[int, list[int]]) -> list[int]:
    """Return the texts to remove, in input order: those that equal or nearly equal an earlier text that is kept."""
    gone: set[int] = set()
    for number, same in enumerate(first):
        if same != number or any(earlier not in gone for earlier in similar.get(number, ())):
            gone.add(number)
    return sorted(gone)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(Path(sys.argv[3], "removed.json").read_text())
