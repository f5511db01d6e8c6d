"""Reporters of a stage's progress.

Destinations: a progress bar on a terminal, the output of a notebook's cell, plain lines in a log, the run's event file,
and metrics in MLflow. Terminals and logs receive reports on standard error; standard output is reserved for results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import IO, Any, Protocol

from components.common.runtime.counts import format_count
from components.common.runtime.relative_paths import shorten_paths
from components.common.runtime.terminal import escape_controls


class Reporter(Protocol):
    """Interface for the progress reports of a stage."""

    def step(self, name: str) -> None:
        """Report the start of a new part of the work."""

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Report the number of completed units; `total` is None if unknown."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Report metrics at a step of the training or evaluation."""

    def note(self, text: str) -> None:
        """Report a message, such as a warning or a decision."""


class SilentReporter:
    """A reporter that discards all reports."""

    def step(self, name: str) -> None: ...
    def progress(self, done: int, total: int | None, unit: str) -> None: ...
    def metrics(self, values: Mapping[str, float], step: int) -> None: ...
    def note(self, text: str) -> None: ...


class CompositeReporter:
    """A reporter that forwards reports to several reporters."""

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


RESERVE_FILENAME = ".reserve"  # next to a run's events: reserved space, freed for error reports if the disk is full


class EventLog:
    """An event file of JSON lines that another process follows. Each line is written by one system call.

    Args:
        seconds_between: minimum time in seconds between two events of a step's progress.
    """

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


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event in a line of an event file; None for a truncated line, or one without `stage` or `event`."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"stage", "event"} <= event.keys() else None


def relay_event(event: Mapping[str, Any], reporter: Reporter) -> None:
    """Forward an event of another process to a reporter. Events that are not reports are ignored."""
    match event["event"]:
        case "step":
            reporter.step(event["name"])
        case "progress":
            reporter.progress(event["done"], event["total"], event["unit"])
        case "metrics":
            reporter.metrics(event["values"], event["step"])
        case "note":
            reporter.note(event["text"])


class _Counter:
    """The first count of a step, and the time of that count.

    Rates exclude units completed before a resume, and the time before the first unit.
    """

    def __init__(self) -> None:
        self.before, self._began = -1, 0.0

    def measure(self, done: int) -> float:
        """Return the seconds since `done` last equalled the first count of the step."""
        if self.before in (-1, done):
            self.before, self._began = done, time.monotonic()
        return time.monotonic() - self._began


class PlainTextReporter:
    """A reporter that prints a line for each step, and for progress at most every `seconds_between` seconds."""

    def __init__(self, stream: IO[str] | None = None, prefix: str = "", seconds_between: float = 10.0) -> None:
        self._stream, self._prefix, self._seconds_between = stream or sys.stderr, prefix, seconds_between
        self._name, self._last, self._counter = "", 0.0, _Counter()

    def note(self, text: str) -> None:
        self._stream.write(f"{self._prefix}{escape_controls(text)}\n")
        self._stream.flush()

    def step(self, name: str) -> None:
        self._name, self._last, self._counter = name, time.monotonic(), _Counter()
        self.note(name)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        seconds, now = self._counter.measure(done), time.monotonic()
        if now - self._last < self._seconds_between:
            return
        self._last = now
        progress = format_progress(done, total, unit, seconds, self._counter.before)
        self.note(f"{self._name}: {progress}" if self._name else progress)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.note(_format_metrics(values, step))


def _format_metrics(values: Mapping[str, float], step: int) -> str:
    return f"step {step}: " + ", ".join(f"{name} {format_number(value)}" for name, value in values.items())


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, or from 1,000 on as an integer such as 755,104."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.{digits}g}"


def format_progress(done: int, total: int | None, unit: str, seconds: float, before: int = 0) -> str:
    """Return text such as "120 of 400 rows, 24/s, 12 s left", or "12 s elapsed" for the unit "seconds".

    Args:
        seconds: elapsed time in seconds.
        before: number of units that were completed before a resume.
    """
    if unit == "seconds":
        return f"{done} s elapsed"
    rate = (done - before) / seconds if seconds > 0 else 0.0
    text = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
    if rate > 0:
        text += f", {format_number(rate, 3)}/s"
        if total:
            text += f", {max(total - done, 0) / rate:.0f} s left"
    return text


class ProgressBarReporter:
    """A reporter with a progress bar, rate and remaining time on standard error."""

    def __init__(self, prefix: str = "") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
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
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # a local run redirects it to a log meanwhile, and the result belongs there
        )
        self._counter = _Counter()
        self._task = self._progress.add_task("", count="", rate="", total=None)
        self._name, self._began = "", time.monotonic()

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(self._prefix + escape_controls(text), style=style, highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bar from the screen."""
        self._progress.stop()

    def step(self, name: str) -> None:
        if self._name:
            self._print(f"{self._name} ({time.monotonic() - self._began:.0f} s)", style="dim")
        self._name, self._began, self._counter = name, time.monotonic(), _Counter()
        self._progress.start()
        self._progress.reset(
            self._task, description=self._prefix + escape_controls(name), count="", rate="", total=None
        )

    def progress(self, done: int, total: int | None, unit: str) -> None:
        seconds, counted = self._counter.measure(done), done - self._counter.before
        is_counted = counted > 0 and seconds > 0 and unit != "seconds"
        rate = f"{format_number(counted / seconds, 3)} {unit}/s" if is_counted else ""
        count = f"{done:,}/{total:,}" if total else f"{done:,}"
        self._progress.update(self._task, completed=done, total=total, count=count, rate=rate)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._print(_format_metrics(values, step))

    def note(self, text: str) -> None:
        self._print(text, style="yellow")


class NotebookReporter:
    """A reporter that updates one output of a notebook cell: the current step and its progress bar.

    If expanded, the output lists the completed steps with their durations. Messages are shown below it.

    Args:
        prefix: text at the start of the current step.
        seconds_between: minimum time in seconds between two updates of a step's progress.
    """

    def __init__(self, prefix: str = "", seconds_between: float = 0.5) -> None:
        self._prefix, self._seconds_between = prefix, seconds_between
        self._completed: list[str] = []
        self._notes: list[str] = []
        self._name, self._bar, self._progress, self._metrics = "", "", "", ""
        self._created = self._began = time.monotonic()
        self._last = 0.0
        self._counter = _Counter()
        self._handle: Any = None  # of the output; created with the first report

    def step(self, name: str) -> None:
        self._complete_step()
        self._name, self._began = shorten_paths(escape_controls(name)), time.monotonic()
        self._show()

    def progress(self, done: int, total: int | None, unit: str) -> None:
        seconds = self._counter.measure(done)
        self._bar = f'<progress value="{done}" max="{total}"></progress> ' if total else ""
        self._progress = format_progress(done, total, unit, seconds, self._counter.before)
        self._show(is_urgent=False)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._metrics = _format_metrics(values, step)
        self._show(is_urgent=False)

    def note(self, text: str) -> None:
        self._notes.append(shorten_paths(escape_controls(text)))
        self._show()

    def close(self) -> None:
        """Replace the last step with the number of steps, if any, and their total time."""
        if self._handle is None:
            return
        self._complete_step()
        count = len(self._completed)
        steps = f"{format_count(count, 'step')} in " if count else ""
        self._name = f"{steps}{time.monotonic() - self._created:.0f} s"
        self._show()

    def _complete_step(self) -> None:
        """Move the current step to the completed ones, with its last metrics."""
        if self._name:
            parts = [f"{self._name} ({time.monotonic() - self._began:.0f} s)", self._metrics]
            self._completed.append(", ".join(filter(None, parts)))
        self._name = self._bar = self._progress = self._metrics = ""
        self._counter = _Counter()

    def _show(self, *, is_urgent: bool = True) -> None:
        now = time.monotonic()
        if not is_urgent and now - self._last < self._seconds_between:
            return
        self._last = now
        if self._handle is None:
            from IPython.display import display

            self._handle = display(self._render(), raw=True, display_id=True)
        else:
            self._handle.update(self._render(), raw=True)

    def _render(self) -> dict[str, str]:
        """Return the output as plain text and HTML, by MIME type."""
        current = self._prefix + self._name
        state = ", ".join(filter(None, [self._progress, self._metrics]))
        summary = f"{escape(current)} {self._bar}{escape(state)}".rstrip()
        steps = escape("\n".join(self._completed))
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        return {
            "text/plain": "\n".join([*self._completed, *self._notes, f"{current} {state}".rstrip()]),
            "text/html": f"<details><summary>{summary}</summary><pre>{steps}</pre></details>{notes}",
        }


def is_notebook() -> bool:
    """Return whether the process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def create_console_reporter(*, quiet: bool = False, prefix: str = "") -> Reporter:
    """Return the reporter that fits the destination of standard error.

    It shows a progress bar on a terminal, an output of the cell in a notebook, and plain lines elsewhere. With `quiet`,
    it is silent.

    Args:
        prefix: text at the start of every line.
    """
    if quiet:
        return SilentReporter()
    if is_notebook():
        return NotebookReporter(prefix)
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return ProgressBarReporter(prefix) if is_terminal else PlainTextReporter(prefix=prefix)


def close_reporter(reporter: Reporter) -> None:
    """Close a reporter that shows its progress in place, on a terminal or in a notebook; ignore others."""
    close: Callable[[], None] | None = getattr(reporter, "close", None)
    if close:
        close()
