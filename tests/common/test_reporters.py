"""Progress reporters and the event log."""

from __future__ import annotations

import io
import json
from pathlib import Path

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


def test_quiet_reporter_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = reporters.create_console_reporter(quiet=True)
    reporter.step("work")
    reporter.note("secret")
    assert capsys.readouterr() == ("", "")
