"""One process of a training that several share: `python -m components.fine_tuning.worker JOB`, started by torchrun.

Reads the job from a JSON file, tells its progress in an event file beside it (the first process alone), and leaves the outcome there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from components.common import artifacts, liveness
from components.common.errors import GOES_ON, TunelineError, of_the_machine, unexpected
from components.common.launch import EVENTS, OUTCOME, LostJobError, outcome_of
from components.common.progress import Events, Reporter, Silent
from components.fine_tuning.training import Job, train

STAGE = "fine_tuning"
WHERE = "the log of the training has the traceback."
# What gloo and NCCL say where another process is gone.
LEFT_ALONE = ("connection reset by peer", "connection closed by peer", "broken pipe", "remote process exited", "connection refused")


def main(path: str) -> int:
    """Train as the job in this file says. Returns the exit code: 0, or that of the error, which an outcome file then names."""
    place, rank = Path(path).parent, int(os.environ.get("RANK", "0"))
    reporter: Reporter = Silent() if rank else Events(place / EVENTS, STAGE)
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        with nullcontext() if rank else liveness.beating(Path(job.tokens)):  # who started it may be gone
            trained = train(job, reporter)
    except BaseException as error:
        told = _told(error)
        traceback.print_exc()
        left = {"error": told.as_dict(), "exit_code": told.exit_code}
        artifacts.write_atomically(place / outcome_of(rank), json.dumps(left))
        return told.exit_code
    if not rank:
        artifacts.write_atomically(place / OUTCOME, json.dumps({"trained": asdict(trained)}))
    return 0


def _told(error: BaseException) -> TunelineError:
    """The error as it is told. One that only says that another process is gone gives way to what that one says."""
    if isinstance(error, TunelineError):
        return error
    if any(sign in str(error).lower() for sign in LEFT_ALONE):
        return LostJobError("another process of the training ended", hint=GOES_ON)
    return of_the_machine(error) or unexpected(error, WHERE)


if __name__ == "__main__":
    code = main(sys.argv[1])
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
