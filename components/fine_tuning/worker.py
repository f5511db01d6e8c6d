"""One process of a training that several share: `python -m components.fine_tuning.worker JOB`, started by torchrun.

Reads the job from a JSON file, tells its progress in an event file beside it (the first process alone), and leaves the outcome there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from components.common import artifacts
from components.common.errors import TunelineError, of_the_machine, unexpected
from components.common.launch import EVENTS, OUTCOME
from components.common.progress import Events, Reporter, Silent
from components.fine_tuning.training import Job, outcome, train

STAGE = "fine_tuning"
WHERE = "the log of the training has the traceback."


def main(path: str) -> int:
    """Train as the job in this file says. Returns the exit code: 0, or that of the error, which the outcome file then names."""
    place = Path(path).parent
    first = os.environ.get("RANK", "0") == "0"
    reporter: Reporter = Events(place / EVENTS, STAGE) if first else Silent()
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        trained = train(job, reporter)
    except BaseException as error:
        told = (
            error
            if isinstance(error, TunelineError)
            else of_the_machine(error) or unexpected(error, "the log of the training has the traceback.")
        )
        traceback.print_exc()
        if first:
            artifacts.write_atomically(place / OUTCOME, json.dumps({"error": told.as_dict(), "exit_code": told.exit_code}))
        return told.exit_code
    if first:
        artifacts.write_atomically(place / OUTCOME, json.dumps({"trained": outcome(trained)}))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
