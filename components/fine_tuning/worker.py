"""Worker of a distributed training: `python -m components.fine_tuning.worker JOB`, started by torchrun.

Reads the job from a JSON file and writes an outcome file to the same folder. Rank 0 also writes progress events there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.cost import stage_cost
from components.common.cost.budgets import BudgetClock
from components.common.cost.stage_cost import CostClock
from components.common.launch import EVENTS_FILENAME, OUTCOME_FILENAME, LostJobError, get_outcome_filename
from components.common.runtime import filesystem, process_control
from components.common.runtime.errors import RESUME_HINT, TunelineError, translate_system_error, wrap_unexpected_error
from components.common.runtime.reporters import EventLog, Reporter, SilentReporter
from components.common.workspace import liveness
from components.fine_tuning.training import TrainingJob, train

STAGE = "fine_tuning"
# Messages of gloo and NCCL when another process has ended.
LOST_PEER_MESSAGES = (
    "connection reset by peer",
    "connection closed by peer",
    "broken pipe",
    "remote process exited",
    "connection refused",
)


def main(path: str) -> int:
    """Train the job in this file. Return 0, or the exit code of the error, which is written to an outcome file."""
    folder, rank = Path(path).parent, int(os.environ.get("RANK", "0"))
    clock = CostClock()
    reporter: Reporter = SilentReporter() if rank else EventLog(folder / EVENTS_FILENAME, STAGE)
    job = TrainingJob(**json.loads(filesystem.read_text(Path(path))))
    # A requeued job has the job file of its first attempt.
    job = replace(job, budget=BudgetClock.charge_dumped(job.budget, stage_cost.read_job_cost(folder)))
    try:
        # The process that started this job may have ended, so rank 0 sends the heartbeat.
        with nullcontext() if rank else liveness.heartbeat(Path(job.tokens)):
            result = train(job, reporter)
    except BaseException as error:
        traceback.print_exc()
        reported = error if isinstance(error, TunelineError) else translate_system_error(error)
        if reported is not error and any(message in str(error).lower() for message in LOST_PEER_MESSAGES):
            # The other process reports its own error.
            reported = LostJobError("another training process ended", hint=RESUME_HINT)
        reported = reported or wrap_unexpected_error(error, "the training log contains the traceback.")
        outcome = {"error": reported.as_dict(), "exit_code": reported.exit_code}
        artifact_folder.write_atomically(folder / get_outcome_filename(rank), json.dumps(outcome))
        return reported.exit_code
    finally:
        if not rank:
            stage_cost.write_job_cost(folder, clock, int(os.environ.get("WORLD_SIZE", "1")))
    if not rank:
        artifact_folder.write_atomically(folder / OUTCOME_FILENAME, json.dumps({"trained": asdict(result)}))
    return 0


if __name__ == "__main__":
    process_control.restrict_new_files()
    process_control.relax_garbage_collector()
    exit_code = main(sys.argv[1])
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(exit_code)
