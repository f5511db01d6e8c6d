"""Wrappers on the PATH that run the documented commands with little work.

    python shims.py PROGRAM ARGUMENT…

`tuneline` gets a tiny model and few steps unless the documentation sets them. `serve` and `deploy` get Ctrl-C once they are ready,
`chat` gets the end of its input, and `cancel` gets a run to cancel. `make` uses the environment of the tests; other targets than `run`
are only printed, since `make test` runs these tests. `pip download` and `pip wheel` resolve the same packages but do not download them.
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
SMALL_SETTINGS = {
    "fine_tuning.base_model": str(Path.cwd() / "my-llama"),
    "fine_tuning.max_steps": "30",
    "fine_tuning.batch_size": "4",
    "fine_tuning.learning_rate": "5e-3",
    "fine_tuning.max_length": "96",
    "fine_tuning.validation_rows": "0",
    "evaluation.generations": "0",
    "evaluation.max_items": "40",
    "triton_packaging.golden_max_tokens": "2",
    "data_curation.near_duplicate_threshold": "0.95",
    "data_curation.answer_min_words": "1000",
    "data_curation.fractions": "{train: 0.6, validation: 0.1, test: 0.3}",
}
CONFIGURABLE_COMMANDS = ("run", "curate", "finetune", "evaluate", "package")
# The regression suite takes seconds even with a tiny model. The demo needs it, because it promotes its model.
WITHOUT_SUITE = {"evaluation.suite": "none"}
TIMEOUT_SECONDS = 300
READY_TEXTS = {
    "serve": "ready at",
    "deploy": "is served as",
}  # commands that run until Ctrl-C, and the output that shows they are ready
CANCELLED_RUN_STEPS = 1_000_000


def add_small_settings(arguments: list[str]) -> list[str]:
    """Add small values for the settings that neither the command nor its configuration file sets."""
    if not arguments or arguments[0] not in CONFIGURABLE_COMMANDS or "-c" in arguments:
        return arguments
    set_names = {part.partition("=")[0] for part in arguments}
    is_demo = arguments[0] == "run" and "data_curation.sources" not in set_names
    return [
        *arguments,
        *(
            part
            for name, value in (SMALL_SETTINGS | ({} if is_demo else WITHOUT_SUITE)).items()
            if name not in set_names
            for part in ("--set", f"{name}={value}")
        ),
    ]


def run_tuneline(arguments: list[str]) -> int:
    if not arguments:  # prints the completion of a shell
        return subprocess.run(TUNELINE, check=False).returncode
    if arguments[0] in READY_TEXTS:
        return run_until_ready([*TUNELINE, *arguments, "--http-port", "0"], READY_TEXTS[arguments[0]])
    if arguments[0] == "cancel":
        return cancel_run(arguments)
    if arguments[0] == "chat":  # ends at once, as after Ctrl-D
        return subprocess.run([*TUNELINE, *arguments], stdin=subprocess.DEVNULL, check=False).returncode
    return subprocess.run([*TUNELINE, *add_small_settings(arguments)], check=False).returncode


def run_until_ready(command: list[str], ready_text: str) -> int:
    """Run a command until its output contains the text, then send SIGINT; return its exit code."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        if ready_text in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode


def cancel_run(arguments: list[str]) -> int:
    """Start a run that would train for hours and cancel it; the run must exit with the status for interruption."""
    before = set(_list_runs())
    long_run = ["run", "--set", "seed=99", "--set", f"fine_tuning.max_steps={CANCELLED_RUN_STEPS}"]
    with Path("cancelled.log").open("w") as log:
        process = subprocess.Popen([*TUNELINE, *add_small_settings(long_run)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(_is_training(run) for run in set(_list_runs()) - before):
            output = Path("cancelled.log").read_text()
            assert time.monotonic() < deadline, output
            assert process.poll() is None, f"the run ended before it could be cancelled:\n{output}"
            time.sleep(0.2)
        exit_code = subprocess.run([*TUNELINE, *arguments], check=False).returncode
        run_exit_code = process.wait(timeout=TIMEOUT_SECONDS)
        assert run_exit_code == 75, f"the run ended with {run_exit_code}:\n{Path('cancelled.log').read_text()}"
        return exit_code
    finally:
        process.kill()


def _list_runs() -> list[Path]:
    return list(Path(".tuneline/runs").glob("*"))


def _is_training(run: Path) -> bool:
    events = run / "events.jsonl"
    return events.exists() and '"fine_tuning"' in events.read_text()


def find_real_program(program: str) -> str:
    """Return the path of the program that a wrapper hides."""
    shims = Path(os.environ["SHIMS"])
    return str(
        shutil.which(program, path=os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != shims))
    )


def run_make(arguments: list[str]) -> int:
    root = Path(os.environ["TUNELINE_ROOT"])
    environment = Path(sys.prefix)
    command = [
        find_real_program("make"),
        "-C",
        str(root),
        "-o",
        f"{environment}/.ready",
        f"VENV={environment}",
        f"WORKDIR={Path.cwd() / '.tuneline'}",
    ]
    if arguments == ["run"]:
        return subprocess.run(
            [*command, "run", "ARGS=" + " ".join(map(_quote, add_small_settings(["run"])[1:]))], check=False
        ).returncode
    return subprocess.run([*command, "-n", *arguments], check=False).returncode


def _quote(text: str) -> str:
    return "'" + text + "'"


def run_python(arguments: list[str]) -> int:
    """Run `python -m pip …` and `python -m components.…` in the checkout."""
    if arguments[:2] == ["-m", "pip"]:
        return run_pip(arguments[2:])
    return subprocess.run([sys.executable, *arguments], cwd=os.environ["TUNELINE_ROOT"], check=False).returncode


def run_pip(arguments: list[str]) -> int:
    requirements = [
        a
        for i, a in enumerate(arguments[1:], 1)
        if a not in ("-d", "-w", "--no-deps") and arguments[i - 1] not in ("-d", "-w")
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--disable-pip-version-check",
        *requirements,
    ]
    return subprocess.run(command, cwd=os.environ["TUNELINE_ROOT"], check=False).returncode


if __name__ == "__main__":
    sys.exit(
        {"tuneline": run_tuneline, "make": run_make, "python": run_python, "pip": run_pip}[sys.argv[1]](sys.argv[2:])
    )
