"""How a stage tells how far it is. A stage is given a Reporter and never asks who listens.

A terminal gets a bar with rate and time left, a log gets plain lines, a pipeline step writes events that the run's process shows, and
MLflow gets the metrics. Everything for people goes to standard error: standard output belongs to results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol


class Reporter(Protocol):
    """What a stage may say while it works."""

    def step(self, name: str) -> None:
        """A new part of the work begins."""

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """So many of so many units are done (total None: unknown)."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Figures at a step of the training or evaluation."""

    def note(self, text: str) -> None:
        """A sentence worth keeping: a warning, a decision."""


class Silent:
    """Says nothing."""

    def step(self, name: str) -> None: ...
    def progress(self, done: int, total: int | None, unit: str) -> None: ...
    def metrics(self, values: Mapping[str, float], step: int) -> None: ...
    def note(self, text: str) -> None: ...


class Several:
    """Says everything to several reporters."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = reporters

    def step(self, name: str) -> None:
        for reporter in self._reporters:
            reporter.step(name)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        for reporter in self._reporters:
            reporter.progress(done, total, unit)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for reporter in self._reporters:
            reporter.metrics(values, step)

    def note(self, text: str) -> None:
        for reporter in self._reporters:
            reporter.note(text)


RESERVE = ".reserve"  # beside a run's events: space that the first to find the disk full gives back, to say so


class Events:
    """Appends one JSON object a line to a file that another process follows. A line is one write, so readers never see half of one."""

    def __init__(self, path: Path, stage: str, seconds_between: float = 0.5) -> None:
        self.path, self._stage = path, stage
        self._seconds_between, self._last = seconds_between, 0.0

    def write(self, event: str, **values: Any) -> None:
        """Append an event with its time and stage."""
        line = json.dumps({"time": time.time(), "stage": self._stage, "event": event, **values}) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def step(self, name: str) -> None:
        self.write("step", name=name)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        if done == total or now - self._last >= self._seconds_between:
            self._last = now
            self.write("progress", done=done, total=total, unit=unit)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.write("metrics", values=dict(values), step=step)

    def note(self, text: str) -> None:
        self.write("note", text=text)


def event_in(line: str) -> dict[str, Any] | None:
    """The event in a line of an event file; None for a line that a kill or a full disk tore."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"stage", "event"} <= event.keys() else None


def relay(event: Mapping[str, Any], reporter: Reporter) -> None:
    """Say again what another process wrote as an event; events of other kinds are left out."""
    match event["event"]:
        case "step":
            reporter.step(event["name"])
        case "progress":
            reporter.progress(event["done"], event["total"], event["unit"])
        case "metrics":
            reporter.metrics(event["values"], event["step"])
        case "note":
            reporter.note(event["text"])


class Plain:
    """Plain lines for logs and pipes: every step, and progress at most every ten seconds."""

    def __init__(self, stream: IO[str] | None = None, prefix: str = "", seconds_between: float = 10.0) -> None:
        self._stream, self._prefix, self._between = stream or sys.stderr, prefix, seconds_between
        self._name, self._began, self._last = "", time.monotonic(), 0.0
        self._before: int | None = None

    def _say(self, text: str) -> None:
        self._stream.write(f"{self._prefix}{text}\n")
        self._stream.flush()

    def step(self, name: str) -> None:
        self._name, self._began, self._last, self._before = name, time.monotonic(), time.monotonic(), None
        self._say(name)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        self._before = done if self._before is None else self._before
        if now - self._last < self._between:
            return
        self._last = now
        self._say(f"{self._name}: {describe(done, total, unit, now - self._began, self._before)}")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._say(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def note(self, text: str) -> None:
        self._say(text)


def describe(done: int, total: int | None, unit: str, seconds: float, before: int = 0) -> str:
    """ "120 of 400 rows, 24/s, 12 s left" from counts and elapsed seconds; `before` were done when the time began (a resume)."""
    rate = (done - before) / seconds if seconds > 0 else 0.0
    text = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
    if rate > 0:
        text += f", {rate:.3g}/s"
        if total:
            text += f", {max(total - done, 0) / rate:.0f} s left"
    return text


class Bar:
    """A rich bar with rate and time left, on standard error."""

    def __init__(self, prefix: str = "") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._prefix = prefix
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._before: int | None = None
        self._task, self._name, self._began = self._progress.add_task("", rate="", total=None), "", time.monotonic()

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(self._prefix + text, style=style, highlight=False, markup=False)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._progress.stop()

    def step(self, name: str) -> None:
        if self._name:
            self._print(f"{self._name} ({time.monotonic() - self._began:.0f} s)", style="dim")
        self._name, self._began, self._before = name, time.monotonic(), None
        self._progress.start()
        self._progress.reset(self._task, description=self._prefix + name, rate="", total=None)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        elapsed = time.monotonic() - self._began
        self._before = done if self._before is None else self._before
        rate = f"{(done - self._before) / elapsed:.3g} {unit}/s" if done > self._before else ""
        self._progress.update(self._task, completed=done, total=total, rate=rate)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._print(f"step {step}: {text}")

    def note(self, text: str) -> None:
        self._print(text, style="yellow")


def console(*, quiet: bool = False, prefix: str = "") -> Reporter:
    """The reporter for the person at this process: a bar on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return Silent()
    return Bar(prefix) if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else Plain(prefix=prefix)


def close(reporter: Reporter) -> None:
    """Let a reporter that holds the screen give it back."""
    finish: Callable[[], None] | None = getattr(reporter, "close", None)
    if finish:
        finish()
