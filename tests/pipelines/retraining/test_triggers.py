"""Triggers of a retraining. Fast tier: functions of values, in milliseconds."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import InputError
from pipelines.retraining.triggers import TriggerOptions, check_triggers

NOW = datetime(2026, 11, 27, 6, tzinfo=UTC)
ALARM = ["days ..2026-11-02", 2, "2026-11-09T00:00:00+00:00"]


def write_drift(path: Path, *, alarm: bool) -> Path:
    windows = [{"from": f"2026-11-0{day}T00:00:00+00:00"} for day in (8, 9)]
    result = {"alarm": alarm, "alarm_window": 2 if alarm else None, "reference": {"name": ALARM[0]}, "windows": windows}
    path.write_text(json.dumps(result))
    return path


def last(days: float, alarm: list[Any] | None = None) -> dict[str, Any]:
    return {"time": (NOW - timedelta(days=days)).isoformat(), "alarm": alarm}


def feedback(*days: float) -> list[dict[str, str]]:
    return [{"time": (NOW - timedelta(days=each)).isoformat(timespec="milliseconds")} for each in days]


def test_enough_feedback_since_the_last_retraining_starts_one() -> None:
    options = TriggerOptions(min_feedback=2)
    assert check_triggers(options, feedback(1, 9), None, NOW).reasons == ["2 answers with feedback; the threshold is 2"]
    assert check_triggers(options, feedback(1, 9), last(5), NOW).reasons == []
    assert check_triggers(options, feedback(1, 2, 9), last(5), NOW).feedback == 2


def test_interval_starts_the_first_retraining_and_the_next_one_after_its_days() -> None:
    options = TriggerOptions(every_days=7)
    assert check_triggers(options, [], None, NOW).reasons == ["no earlier retraining"]
    assert check_triggers(options, [], last(6.9), NOW).reasons == []
    assert check_triggers(options, [], last(7), NOW).reasons == ["no retraining since 2026-11-20 06:00"]


def test_alarm_starts_one_retraining(tmp_path: Path) -> None:
    options = TriggerOptions(drift=write_drift(tmp_path / "drift.json", alarm=True))
    first = check_triggers(options, [], None, NOW)
    assert first.reasons == ["drift alarm in window 2, compared with days ..2026-11-02"]
    assert first.alarm == ALARM
    assert check_triggers(options, [], last(1, ALARM), NOW).reasons == []
    assert check_triggers(options, [], last(1, ["another reference", 2, ALARM[2]]), NOW).reasons
    write_drift(tmp_path / "drift.json", alarm=False)
    assert check_triggers(options, [], None, NOW).reasons == []


def test_several_reasons_are_all_recorded(tmp_path: Path) -> None:
    options = TriggerOptions(write_drift(tmp_path / "drift.json", alarm=True), 1, 1.0)
    assert len(check_triggers(options, feedback(0.5), last(2), NOW).reasons) == 3


@pytest.mark.parametrize("line", [{"id": "a"}, {"id": "a", "time": "soon"}, {"id": "a", "time": 5}])
def test_feedback_without_a_valid_time_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the feedback on a has the time"):
        check_triggers(TriggerOptions(min_feedback=1), [line], None, NOW)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"alarm": true, "alarm_window": null}'])
def test_other_file_than_a_drift_check_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "drift.json").write_text(text)
    with pytest.raises(InputError, match="is not the result of a drift check"):
        check_triggers(TriggerOptions(drift=tmp_path / "drift.json"), [], None, NOW)
