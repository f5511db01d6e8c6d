"""tuneline's whole default curation through its command line, which also reads, cleans and writes, as a tool that removes duplicates.

python -m benchmarks.peers.run_tuneline_curate run CORPUS.jsonl FOLDER        same arguments as the peers' scripts
python -m benchmarks.peers.run_tuneline_curate removed CORPUS.jsonl FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from components.common.runtime import process_control

REASONS = ("exact_duplicate", "near_duplicate")


def run(corpus: Path, folder: Path) -> int:
    """Curate the corpus and return the exit code."""
    places = ["-o", str(folder / "dataset"), "--workdir", str(folder / "workdir")]
    command = process_control.build_module_command("pipelines.cli", "curate", str(corpus), *places, "--json")
    return subprocess.run(command, env=process_control.build_python_environment(), check=False).returncode


def removed(folder: Path) -> list[int]:
    """Return the documents that were removed as duplicates."""
    from pyarrow import parquet

    rows = parquet.read_table(folder / "dataset" / "rejected.parquet", columns=["id", "reason"]).to_pylist()
    return [int(row["id"][1:]) for row in rows if row["reason"] in REASONS]


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(Path(sys.argv[2]), Path(sys.argv[3])))
    print(json.dumps(removed(Path(sys.argv[3]))))
