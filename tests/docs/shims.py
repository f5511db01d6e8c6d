"""What stands on the PATH while the documentation's commands run: the real programs, given small work, and ended where they would go on.

    python shims.py PROGRAM ARGUMENT…

`tuneline` gets a tiny model and few steps where the documentation leaves them to their defaults, `serve` and `-f` are ended by Ctrl-C once
they have shown that they work, and `cancel` has a run to cancel. `make` uses the environment the tests run in; `make test` is only looked
at, since it is what runs this. `pip download` and `pip wheel` resolve the same packages for real and leave gigabytes where they are.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TUNELINE = [sys.executable, "-P", "-m", "pipelines.cli"]
SMALL = {
    "fine_tuning.base_model": str(Path.cwd() / "my-llama"),
    "fine_tuning.max_steps": "30",
    "fine_tuning.batch_size": "4",
    "fine_tuning.learning_rate": "5e-3",
    "fine_tuning.max_length": "96",
    "fine_tuning.validation_rows": "0",
    "evaluation.generations": "0",
    "evaluation.max_items": "20",
    "triton_packaging.golden_max_tokens": "2",
    "data_curation.near_duplicate_threshold": "0.95",
    "data_curation.answer_min_words": "1000",
    "data_curation.fractions": "{train: 0.6, validation: 0.1, test: 0.3}",
}
CONFIGURED = ("run", "curate", "finetune", "evaluate", "package")
PATIENCE = 300  # seconds; only what hangs takes so long
ENDLESS = {"serve": "ready on", "deploy": "is in service"}  # commands without an end, and what they say when they are there
STEPS = 1_000_000  # of a training that is cancelled


def small(arguments: list[str]) -> list[str]:
    """Small settings for all that neither the command nor its configuration file says."""
    if not arguments or arguments[0] not in CONFIGURED or "-c" in arguments:
        return arguments
    given = {part.partition("=")[0] for part in arguments}
    return [*arguments, *(part for name, value in SMALL.items() if name not in given for part in ("--set", f"{name}={value}"))]


def tuneline(arguments: list[str]) -> int:
    if arguments[0] in ENDLESS:
        free = [part for option in ("--http-port", "--grpc-port", "--metrics-port") for part in (option, "0")]
        return until([*TUNELINE, *arguments, *free], ENDLESS[arguments[0]])
    if arguments[0] == "cancel":
        return cancelled(arguments)
    return subprocess.run([*TUNELINE, *small(arguments)], check=False).returncode


def until(command: list[str], shown: str) -> int:
    """Run a command that has no end until it has shown this, then press Ctrl-C; it must end well."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        print(line, end="")
        if shown in line:
            break
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=PATIENCE)
    return child.returncode


def cancelled(arguments: list[str]) -> int:
    """Cancel a run that is in its training, which would take hours; the run itself must end as an interrupted one does."""
    before = set(_runs())
    endless = ["run", "--set", "seed=99", "--set", f"fine_tuning.max_steps={STEPS}"]
    with Path("cancelled.log").open("w") as log:
        started = subprocess.Popen([*TUNELINE, *small(endless)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE
        while not any(_trains(run) for run in set(_runs()) - before):
            said = Path("cancelled.log").read_text()
            assert time.monotonic() < deadline, said
            assert started.poll() is None, f"the run ended before it could be cancelled:\n{said}"
            time.sleep(0.2)
        code = subprocess.run([*TUNELINE, *arguments], check=False).returncode
        ended = started.wait(timeout=PATIENCE)
        assert ended == 75, f"the run ended with {ended}:\n{Path('cancelled.log').read_text()}"
        return code
    finally:
        started.kill()


def _runs() -> list[Path]:
    return list(Path(".tuneline/runs").glob("*"))


def _trains(run: Path) -> bool:
    events = run / "events.jsonl"
    return events.exists() and '"fine_tuning"' in events.read_text()


def behind(program: str) -> str:
    """The program that this file stands before on the PATH."""
    here = Path(os.environ["SHIMS"])
    return str(shutil.which(program, path=os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != here)))


def make(arguments: list[str]) -> int:
    root = Path(os.environ["TUNELINE_ROOT"])
    environment = Path(sys.prefix)
    given = [behind("make"), "-C", str(root), "-o", f"{environment}/.ready", f"VENV={environment}", f"WORKDIR={Path.cwd() / '.tuneline'}"]
    if arguments == ["run"]:
        return subprocess.run([*given, "run", "ARGS=" + " ".join(map(_quoted, small(["run"])[1:]))], check=False).returncode
    return subprocess.run([*given, "-n", *arguments], check=False).returncode


def _quoted(text: str) -> str:
    return "'" + text + "'"


def python(arguments: list[str]) -> int:
    """`python -m pip …` and `python -m components.…`, in the checkout that the documentation speaks of."""
    if arguments[:2] == ["-m", "pip"]:
        return pip(arguments[2:])
    return subprocess.run([sys.executable, *arguments], cwd=os.environ["TUNELINE_ROOT"], check=False).returncode


def pip(arguments: list[str]) -> int:
    wanted = [a for i, a in enumerate(arguments[1:], 1) if a not in ("-d", "-w", "--no-deps") and arguments[i - 1] not in ("-d", "-w")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--disable-pip-version-check", *wanted]
    return subprocess.run(command, cwd=os.environ["TUNELINE_ROOT"], check=False).returncode


if __name__ == "__main__":
    sys.exit({"tuneline": tuneline, "make": make, "python": python, "pip": pip}[sys.argv[1]](sys.argv[2:]))
