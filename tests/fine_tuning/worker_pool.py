"""A worker that runs one training job after the other: `python -m tests.fine_tuning.worker_pool FOLDER`.

Reusing the process saves the imports, which take longer than the trainings. Each numbered subfolder is a job: the worker reads its `go`
file and writes its exit code to `code.RANK`. The worker stops when FOLDER contains the file `end`.
"""

import os
import sys
import time
from pathlib import Path

from components.fine_tuning import worker

RANK = os.environ["RANK"]


def serve(folder: Path) -> None:
    for number in range(10**6):
        job_folder = folder / str(number)
        while not (job_folder / "go").exists():
            if (folder / "end").exists():
                return
            time.sleep(0.02)
        code = worker.main((job_folder / "go").read_text())
        (job_folder / f"code.{RANK}").write_text(str(code))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
