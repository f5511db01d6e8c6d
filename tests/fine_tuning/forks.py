"""Trainings that can be killed: a process that has imported everything and makes a copy of itself for each.

A Python that imports torch, transformers and TRL takes five seconds to start, a training of the tiny model one; so a test that kills
twenty would mostly wait for imports.
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

from components.common import process

ROOT = Path(__file__).parents[2]
MOTHER = """
import json, os, sys, traceback
import trl.trainer.sft_trainer, peft, datasets, pyarrow.parquet, tensorboardX, transformers.models.llama.modeling_llama
from pathlib import Path
from components.common import artifacts
from components.common.errors import TunelineError
from components.common.progress import Plain
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune

def train(job):
    dataset, output, state = artifacts.read(Path(job["dataset"])), Path(job["output"]), Path(job["state"])
    config = FineTuningConfig.model_validate(job["config"])
    try:
        made = finetune(dataset, output, config, seed=3, state=state, reporter=Plain(sys.stdout, seconds_between=0))
    except TunelineError as error:
        print("ERROR", error.exit_code, error.message, flush=True)
        return error.exit_code
    print("DONE", made.sha256, made.manifest.summary["resumed_from"], flush=True)
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
class Ended:
    """How a training ended: the digest of its model and the step it went on from, or its error."""

    sha256: str = ""
    resumed_from: int | None = None
    error: str = ""


class Trainings:
    """Starts trainings one after the other."""

    def __init__(self, mother: subprocess.Popen[str]) -> None:
        self._mother = mother

    def run(self, job: dict[str, Any], *, at: int | None = None, sent: signal.Signals = signal.SIGKILL, later: float = 0.0) -> Ended:
        """One training, to its end, or until a signal is sent `later` seconds after its step `at`."""
        assert self._mother.stdin is not None
        self._mother.stdin.write(json.dumps(job) + "\n")
        self._mother.stdin.flush()
        child, ended = 0, Ended()
        for line in self._lines():
            words = line.split()
            if line.startswith("CHILD"):
                child = int(words[1])
            elif line.startswith("DONE"):
                ended = Ended(words[1], None if words[2] == "None" else int(words[2]))
            elif line.startswith("ERROR"):
                ended = Ended(error=line.removeprefix("ERROR ").strip())
            elif at is not None and line.startswith("step ") and int(words[1].rstrip(":")) >= at:
                time.sleep(later)
                os.kill(child, sent)
                at = None
        return ended

    def _lines(self) -> Iterator[str]:
        """What is said until the training has ended."""
        assert self._mother.stdout is not None
        for line in self._mother.stdout:
            if line.startswith("ENDED"):
                return
            yield line
        raise AssertionError("the trainings' process ended")


@contextmanager
def trainings() -> Iterator[Trainings]:
    """A process that trains on one thread."""
    environment = process.python_environment(
        PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path[1:]]), TUNELINE_THREADS="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"
    )
    command = [sys.executable, "-c", MOTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as mother:
        assert mother.stdout is not None
        while mother.stdout.readline().strip() != "READY":
            assert mother.poll() is None, "the trainings' process did not start"
        try:
            yield Trainings(mother)
        finally:
            mother.kill()


def moments(steps: int, count: int, seed: int) -> list[tuple[int, float]]:
    """Random steps to kill a training at, and how long after them: within the step, its validation or its checkpoint."""
    draw = random.Random(seed)
    return [(draw.randint(1, steps - 1), draw.uniform(0, 0.06)) for _ in range(count)]
