"""What a person sees of long work."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from components.common import progress
from components.common.progress import Events, Plain, describe


def test_progress_says_how_much_how_fast_and_how_long() -> None:
    assert describe(120, 400, "rows", 5.0) == "120 of 400 rows, 24/s, 12 s left"
    assert describe(1200, None, "rows", 60.0) == "1,200 rows, 20/s"


def test_a_resumed_work_is_not_said_to_be_faster_than_it_is() -> None:
    assert describe(12, 40, "steps", 20.0, before=10) == "12 of 40 steps, 0.1/s, 280 s left"
    out = io.StringIO()
    plain = Plain(out, seconds_between=0)
    plain.step("training")
    plain.progress(10, 40, "steps")
    assert out.getvalue().splitlines()[-1] == "training: 10 of 40 steps"


def test_events_are_whole_lines_and_progress_is_not_a_flood(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl", "evaluation", seconds_between=60)
    events.step("reading")
    for done in range(1, 1001):
        events.progress(done, 1000, "items")
    events.note("[/not markup]")
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in found] == ["step", "progress", "progress", "note"]
    assert found[2]["done"] == 1000
    assert {event["stage"] for event in found} == {"evaluation"}


def test_a_path_with_brackets_does_not_break_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress.Bar()
    bar.step("reading [/data]")
    bar.progress(1, 2, "rows")
    bar.note("[/x] is skipped")
    bar.step("next")
    bar.close()
    assert "[/x] is skipped" in capsys.readouterr().err


def test_nothing_is_said_when_asked_to_be_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = progress.console(quiet=True)
    reporter.step("work")
    reporter.note("secret")
    assert capsys.readouterr() == ("", "")
