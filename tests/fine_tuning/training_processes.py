"""Trainings that tests can kill: a server process imports the libraries once and forks a child per training.

Importing torch, transformers and TRL takes five seconds and training the tiny model one, so a process per training would mostly import.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.runtime import process_control

ROOT = Path(__file__).parents[2]
FORK_SERVER_PROGRAM = """
import json, os, sys, traceback
import trl.trainer.sft_trainer, peft, datasets, pyarrow.parquet, tensorboardX, transformers.models.llama.modeling_llama
from pathlib import Path
from components.common.artifacts import artifact_folder
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import PlainTextReporter
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune

def train(job):
    dataset, output, state = artifact_folder.read(Path(job["dataset"])), Path(job["output"]), Path(job["state"])
    config = FineTuningConfig.model_validate(job["config"])
    try:
        model = finetune(dataset, output, config, seed=3, state=state, reporter=PlainTextReporter(sys.stdout, seconds_between=0))
    except TunelineError as error:
        print("ERROR", error.exit_code, error.message, flush=True)
        return error.exit_code
    print("DONE", model.sha256, model.manifest.summary["resumed_from"], flush=True)
    return 0

print("READY", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = train(json.loads(line))
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    print("CHILD", child, flush=True)
    os.waitpid(child, 0)
    print("ENDED", flush=True)
"""


@dataclass
class TrainingResult:
    """The model's digest and the step the training resumed from, or its error. Empty if the training was killed."""

    sha256: str = ""
    resumed_from: int | None = None
    error: str = ""


class TrainingRunner:
    """Runs trainings one after the other in children of the fork server."""

    def __init__(self, fork_server: subprocess.Popen[str]) -> None:
        self._fork_server = fork_server

    def run(
        self,
        job: dict[str, Any],
        *,
        at: int | None = None,
        signal_number: signal.Signals = signal.SIGKILL,
        delay_seconds: float = 0.0,
    ) -> TrainingResult:
        """Run a training. If `at` is set, send it a signal `delay_seconds` after that step."""
        assert self._fork_server.stdin is not None
        self._fork_server.stdin.write(json.dumps(job) + "\n")
        self._fork_server.stdin.flush()
        child, result = 0, TrainingResult()
        for line in self._lines():
            words = line.split()
            if line.startswith("CHILD"):
                child = int(words[1])
            elif line.startswith("DONE"):
                result = TrainingResult(words[1], None if words[2] == "None" else int(words[2]))
            elif line.startswith("ERROR"):
                result = TrainingResult(error=line.removeprefix("ERROR ").strip())
            elif at is not None and line.startswith("step ") and int(words[1].rstrip(":")) >= at:
                time.sleep(delay_seconds)
                os.kill(child, signal_number)
                at = None
        return result

    def _lines(self) -> Iterator[str]:
        """Yield the output lines until the training ends."""
        assert self._fork_server.stdout is not None
        for line in self._fork_server.stdout:
            if line.startswith("ENDED"):
                return
            yield line
        raise AssertionError("the trainings' process ended")


@contextmanager
def start_training_runner() -> Iterator[TrainingRunner]:
    """Start a fork server whose trainings use one thread."""
    environment = process_control.build_python_environment(
        PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path[1:]]),
        TUNELINE_THREADS="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    command = [sys.executable, "-c", FORK_SERVER_PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as fork_server:
        assert fork_server.stdout is not None
        while fork_server.stdout.readline().strip() != "READY":
            assert fork_server.poll() is None, "the trainings' process did not start"
        try:
            yield TrainingRunner(fork_server)
        finally:
            fork_server.kill()


def draw_kill_points(steps: int, count: int, seed: int) -> list[tuple[int, float]]:
    """Draw random steps and delays in seconds that fall into a step, its validation or its checkpoint."""
    draw = random.Random(seed)
    return [(draw.randint(1, steps - 1), draw.uniform(0, 0.06)) for _ in range(count)]
