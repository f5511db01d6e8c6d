"""A program for the tests: `python concurrent_store_writer.py STORE GO NAME ROUNDS` stores ROUNDS artifacts once the file GO exists.

All writers store the same payloads. In every third round the summary names the writer, so that it replaces the artifact of another writer.
"""

import sys
import time
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.workspace import artifact_store


def publish_dataset(folder: Path, number: int, name: str) -> artifact_folder.Artifact:
    artifact_folder.claim_folder(folder, "key")
    (folder / "rows.txt").write_text(f"row {number}\n")
    summary = {"by": name if number % 3 == 0 else "all"}
    return artifact_folder.publish(
        folder, "dataset", payload=["rows.txt"], inputs=[], config={}, seed=1, key="key", summary=summary
    )


def write_all(store: Path, name: str, rounds: int) -> None:
    for number in range(rounds):
        with artifact_store.job_folder(store) as job_folder:
            stored = artifact_store.add_artifact(store, publish_dataset(job_folder / "made", number, name))
        print(artifact_store.load_artifact(store, stored.sha256).sha256, flush=True)


if __name__ == "__main__":
    while not Path(sys.argv[2]).exists():
        time.sleep(0.001)
    write_all(Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
