"""A job for the tests: `python adopt_often.py STORE GO NAME ROUNDS` adopts the same artifacts as others, once the file GO is there.

Every third round each job's artifact says something of its own, so that it takes the place of what another has put there.
"""

import sys
import time
from pathlib import Path

from components.common import artifacts, places


def made(folder: Path, number: int, name: str) -> artifacts.Artifact:
    artifacts.begin(folder, "key")
    (folder / "rows.txt").write_text(f"row {number}\n")
    summary = {"by": name if number % 3 == 0 else "all"}
    return artifacts.publish(folder, "dataset", payload=["rows.txt"], inputs=[], config={}, seed=1, key="key", summary=summary)


def adopt_all(store: Path, name: str, rounds: int) -> None:
    for number in range(rounds):
        with places.workplace(store) as own:
            adopted = places.adopt(store, made(own / "made", number, name))
        print(places.stored(store, adopted.sha256).sha256, flush=True)


if __name__ == "__main__":
    while not Path(sys.argv[2]).exists():
        time.sleep(0.001)
    adopt_all(Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
