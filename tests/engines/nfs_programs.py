"""Programs for clients of a real NFS server: `python -P -m tests.engines.nfs_programs NAME FOLDER SECONDS`.

Each repeats one operation for SECONDS and prints a JSON object with the number of each result.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from components.common.runtime import filesystem
from components.common.workspace import job_folders
from components.common.workspace.artifact_store import Workdir
from pipelines.runs import run_folder

RUN = "20261123-000000-aaaa"


def write_run(folder: Path) -> str:
    run_folder.Run(folder / "runs" / RUN).update(status="finished", written=time.time())
    return "written"


def read_run(folder: Path) -> str:
    return "whole" if run_folder.Run(folder / "runs" / RUN).read() else "empty"


def rename_file(folder: Path) -> str:
    first, second = folder / "first", folder / "second"
    if not first.exists() and not second.exists():
        first.touch()
    source, target = (first, second) if first.exists() else (second, first)
    filesystem.rename(source, target)
    return "done"


def link_file(folder: Path) -> str:
    (folder / "first").touch()
    filesystem.link(folder / "first", folder / f"link.{time.monotonic_ns()}")
    return "done"


def move_folder(folder: Path) -> str:
    source = folder / "made"
    source.mkdir(exist_ok=True)
    (source / "file").touch()
    found = job_folders.move_into_place(source, folder / "published", lambda: None, folder / "aside")
    return "done" if found is None else "found"


def lock_workdir(folder: Path) -> str:
    with run_folder.lock_workdir(Workdir(folder)):
        return "done"


PROGRAMS: dict[str, Callable[[Path], str]] = {
    program.__name__: program for program in (write_run, read_run, rename_file, link_file, move_folder, lock_workdir)
}


def main(name: str, folder: Path, seconds: float) -> None:
    """Repeat a program and print how often it returned each result or raised each error."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs" / RUN).mkdir(parents=True, exist_ok=True)
    (folder / "ready").touch()
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    for _ in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
        try:
            counts[PROGRAMS[name](folder)] += 1
        except Exception as error:
            counts[f"{type(error).__name__}: {error}"[:200]] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
