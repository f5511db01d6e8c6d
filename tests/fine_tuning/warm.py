"""Processes of a job for the tests that train one thing after the other: `python -m tests.fine_tuning.warm FOLDER`.

Each does what the JSON file of every next job says as the training's own process does it, and leaves its exit code; importing the
libraries takes longer than all of these trainings. They end with the file "end".
"""

import os
import sys
import time
from pathlib import Path

from components.fine_tuning import worker

RANK = os.environ["RANK"]


def serve(folder: Path) -> None:
    for number in range(10**6):
        place = folder / str(number)
        while not (place / "go").exists():
            if (folder / "end").exists():
                return
            time.sleep(0.02)
        code = worker.main((place / "go").read_text())
        (place / f"code.{RANK}").write_text(str(code))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
