"""tuneline's own search for near duplicates, without the rest of its curation: words in Python, the engine in its child process.

python -m benchmarks.peers.run_tuneline run CORPUS.jsonl FOLDER        as the peers' scripts
python -m benchmarks.peers.run_tuneline removed CORPUS.jsonl FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks import corpus
from components.common import process
from components.data_curation import duplicates

THRESHOLD = 0.7


def run(path: Path, folder: Path) -> None:
    """Find the duplicates and write the numbers of those to remove."""
    groups, pairs = engine(corpus.texts(path), folder)
    (folder / "removed.json").write_text(json.dumps(repeats(groups, pairs)))


def engine(texts: list[str], folder: Path) -> tuple[list[int], dict[int, list[int]]]:
    """For every text the first with the same words; and for such firsts the earlier ones that are similar to them."""
    import pyarrow
    from pyarrow import parquet

    spoken = pyarrow.array([duplicates.words(text) for text in texts], pyarrow.large_string())
    nothing = pyarrow.nulls(len(texts), pyarrow.large_string())
    table = pyarrow.table({"row": pyarrow.array(range(len(texts)), pyarrow.int64()), "exact": spoken, "words": spoken, "answer": nothing})
    parquet.write_table(table, folder / "texts.parquet")
    command = process.module_command("components.data_curation.engine", str(folder / "texts.parquet"), str(folder), str(THRESHOLD))
    subprocess.run(command, env=process.python_environment(**duplicates.QUIET), check=False)  # believed by its result, as the stage does
    json.loads((folder / "result.json").read_bytes())
    similar: dict[int, list[int]] = defaultdict(list)
    found = parquet.read_table(folder / "pairs.parquet").to_pydict()
    for earlier, later in zip(found["a"], found["b"], strict=True):
        similar[later].append(earlier)
    return parquet.read_table(folder / "groups.parquet")["words"].to_pylist(), similar


def repeats(first: list[int], similar: dict[int, list[int]]) -> list[int]:
    """In the order of the input: a text goes when it repeats, or nearly repeats, an earlier one that stays."""
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
