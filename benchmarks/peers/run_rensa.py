"""rensa's deduplicators; the variable METHOD selects the sketch: R-MinHash or C-MinHash.

rensa expects tokens; reading, splitting into words and building 5-grams are written in Python here, as a user would, and are measured. Its
rho pipeline is not used: it samples, and flags every member of a group instead of those to remove.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rensa import CMinHash, CMinHashDeduplicator, RMinHashDeduplicator

BANDS, ROWS, THRESHOLD, SEED, BATCH = 16, 8, 0.7, 42, 10_000
WORD = re.compile(r"\w+")


def shingled(text: str) -> list[str]:
    words = WORD.findall(text.lower())
    return [" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))]


def batches(corpus: str) -> Iterator[list[list[str]]]:
    batch: list[list[str]] = []
    with Path(corpus).open(encoding="utf-8") as file:
        for line in file:
            batch.append(shingled(json.loads(line)["text"]))
            if len(batch) == BATCH:
                yield batch
                batch = []
    yield batch


def r_minhash(corpus: str) -> list[bool]:
    """Return whether each document is kept: R-MinHash with LSH, candidates compared by their signatures."""
    tool = RMinHashDeduplicator(threshold=THRESHOLD, num_perm=BANDS * ROWS, use_lsh=True, num_bands=BANDS, seed=SEED)
    kept: list[bool] = []
    for batch in batches(corpus):
        kept += tool.add_pairs((str(len(kept) + i), tokens) for i, tokens in enumerate(batch))
    return kept


def c_minhash(corpus: str) -> list[bool]:
    """Return the same with C-MinHash, whose bands rensa chooses."""
    tool = CMinHashDeduplicator(threshold=THRESHOLD, num_perm=BANDS * ROWS, seed=SEED)
    kept: list[bool] = []
    for batch in batches(corpus):
        sketches = CMinHash.from_token_sets(batch, BANDS * ROWS, SEED)
        kept += tool.add_pairs((str(len(kept) + i), sketch) for i, sketch in enumerate(sketches))
    return kept


METHODS = {"r_minhash": r_minhash, "c_minhash": c_minhash}

if __name__ == "__main__":
    path = Path(sys.argv[3], "kept.json")
    if sys.argv[1] == "run":
        path.write_text(json.dumps(METHODS[os.environ["METHOD"]](sys.argv[2])))
    else:
        print(json.dumps([number for number, stays in enumerate(json.loads(path.read_text())) if not stays]))
