"""Progress reporters and the event log."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from components.common.runtime import reporters
from components.common.runtime.reporters import EventLog, PlainTextReporter, format_progress


def test_progress_shows_count_rate_and_remaining_time() -> None:
    assert format_progress(120, 400, "rows", 5.0) == "120 of 400 rows, 24/s, 12 s left"
    assert format_progress(1200, None, "rows", 60.0) == "1,200 rows, 20/s"
    assert format_progress(10, None, "seconds", 10.0) == "10 s elapsed"


def test_rate_excludes_units_done_before_resume() -> None:
    assert format_progress(12, 40, "steps", 20.0, before=10) == "12 of 40 steps, 0.1/s, 280 s left"
    out = io.StringIO()
    plain = PlainTextReporter(out, seconds_between=0)
    plain.step("training")
    plain.progress(10, 40, "steps")
    assert out.getvalue().splitlines()[-1] == "training: 10 of 40 steps"


def test_rate_excludes_the_time_before_the_first_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training reports 0 steps again after its first validation."""
    clock = [0.0]
    monkeypatch.setattr("components.common.runtime.reporters.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    plain = PlainTextReporter(out, seconds_between=0)
    plain.step("training")
    plain.progress(0, 40, "steps")
    clock[0] = 100.0
    plain.progress(0, 40, "steps")
    clock[0] = 110.0
    plain.progress(1, 40, "steps")
    assert out.getvalue().splitlines()[-1] == "training: 1 of 40 steps, 0.1/s, 390 s left"


def test_events_are_complete_lines_and_progress_is_throttled(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", "evaluation", seconds_between=60)
    events.step("reading")
    for done in range(1, 1001):
        events.progress(done, 1000, "items")
    events.note("[/not markup]")
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in written] == ["step", "progress", "progress", "note"]
    assert written[2]["done"] == 1000
    assert {event["stage"] for event in written} == {"evaluation"}


def test_bar_accepts_path_with_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    bar = reporters.ProgressBarReporter()
    bar.step("reading [/data]")
    bar.progress(1, 2, "rows")
    bar.note("[/x] is skipped")
    bar.step("next")
    bar.close()
    assert "[/x] is skipped" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bar", "lines"])
def test_escape_sequences_in_reports_do_not_reach_the_terminal(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = reporters.ProgressBarReporter() if kind == "bar" else PlainTextReporter()
    reporter.step("reading \x1b]0;title\x07")
    reporter.note("a model named \x9b2J\r")
    reporter.step("next")
    reporters.close_reporter(reporter)
    shown = capsys.readouterr().err
    assert "reading \\x1b]0;title\\x07" in shown
    assert "a model named \\x9b2J\\x0d\n" in shown
    assert "\x1b]0" not in shown


class Notebook:
    """A stand-in of IPython in a kernel, which records what the frontend shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.outputs = object(), []  # type: object, list[dict[str, str]]
        self.shown = 0
        modules = {"IPython": ModuleType("IPython"), "IPython.display": ModuleType("IPython.display")}
        modules["IPython"].get_ipython = lambda: self  # type: ignore[attr-defined]
        modules["IPython.display"].display = self.display  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert raw
        assert display_id
        self.shown += 1
        self.update(bundle, raw=raw)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.outputs.append(bundle)


def test_notebook_has_one_output_with_the_current_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(monkeypatch)
    reporter = reporters.create_console_reporter(prefix="curate: ")
    assert notebook.outputs == [], "a call without reports has no output"
    monkeypatch.setattr(reporter, "_seconds_between", 0.0)
    reporter.step(f"reading <{Path.cwd()}/raw.jsonl>")
    reporter.progress(30, 120, "rows")
    running = notebook.outputs[-1]["text/html"]
    assert "<summary>curate: reading &lt;raw.jsonl&gt; " in running
    assert '<progress value="30" max="120"></progress> 30 of 120 rows' in running
    reporter.metrics({"loss": 2.5}, step=7)
    reporter.note("no \x1b[31mtest rows & no answers")
    reporter.step("writing")
    assert "<summary>curate: writing</summary>" in notebook.outputs[-1]["text/html"]
    reporters.close_reporter(reporter)
    final = notebook.outputs[-1]
    assert final["text/plain"].splitlines() == [
        "reading <raw.jsonl> (0 s), step 7: loss 2.5",
        "writing (0 s)",
        "no \\x1b[31mtest rows & no answers",
        "curate: 2 steps in 0 s",
    ]
    assert "<summary>curate: 2 steps in 0 s</summary><pre>reading &lt;raw.jsonl&gt; (0 s)" in final["text/html"]
    assert final["text/html"].endswith("<div>no \\x1b[31mtest rows &amp; no answers</div>")
    assert notebook.shown == 1
    assert capsys.readouterr() == ("", "")


def test_notebook_shows_the_time_of_a_call_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    reporter = reporters.create_console_reporter(prefix="serve: ")
    reporter.note("loaded")
    reporters.close_reporter(reporter)
    assert "<summary>serve: 0 s</summary>" in notebook.outputs[-1]["text/html"]


def test_progress_in_a_notebook_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    reporter = reporters.create_console_reporter()
    reporter.step("reading")
    for done in range(1000):
        reporter.progress(done, 1000, "rows")
        reporter.metrics({"loss": 1.0}, done)
    assert len(notebook.outputs) < 10


def test_program_that_imports_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython in a terminal has a shell without a kernel, and a program that imports it has no shell."""
    notebook = Notebook(monkeypatch)
    assert reporters.is_notebook()
    for shell in (None, object()):
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda shell=shell: shell)
        assert not reporters.is_notebook()
        reporters.create_console_reporter().step("reading")
    assert notebook.outputs == []


def test_bar_without_a_total_shows_the_count_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    reporter = reporters.ProgressBarReporter()
    reporter.step("asking")
    reporter.progress(3500, None, "answers")
    reporter.close()
    text = capsys.readouterr().err
    assert "3,500" in text
    assert "/?" not in text
    reporter = reporters.ProgressBarReporter()
    reporter.step("asking")
    reporter.progress(35, 4000, "answers")
    reporter.close()
    assert "35/4,000" in capsys.readouterr().err


def test_quiet_reporter_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = reporters.create_console_reporter(quiet=True)
    reporter.step("work")
    reporter.note("secret")
    assert capsys.readouterr() == ("", "")


def test_progress_bar_leaves_standard_output_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A local run writes the output of its libraries to a log while the bar is on the terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    own, log = sys.stdout, io.StringIO()
    with contextlib.redirect_stdout(log):
        reporter = reporters.ProgressBarReporter()
        reporter.step("training")
        reporter.progress(1, 2, "steps")
        print("output of a library")
    assert log.getvalue() == "output of a library\n"
    log.close()
    reporter.close()
    assert sys.stdout is own
    print("the result")
    assert capsys.readouterr().out == "the result\n"
