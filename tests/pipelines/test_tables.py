"""Tables of the command line. In `make test`, because it takes milliseconds."""

from __future__ import annotations

from pipelines.cli import tables
from pipelines.cli.tables import format_history

MOVE = {
    "number": 1,
    "kind": "promotion",
    "alias": "champion",
    "from": None,
    "to": "3",
    "by": "ann",
    "at": "2026-11-26T06:00:00+00:00",
    "reason": "accepted",
    "forced": "",
    "state": "done",
    "note": "",
}


def test_history_has_a_header_and_says_what_was_forced_or_interrupted() -> None:
    forced = {**MOVE, "number": 2, "from": "3", "to": "4", "forced": "an old evaluation", "state": "open"}
    header, _, first, second = [line.split() for line in format_history("support", [MOVE, forced]) if line.strip()]
    assert header == ["entry", "time", "kind", "alias", "from", "to", "user", "reason"]
    assert first == ["1", MOVE["at"], "promotion", "champion", "–", "3", "ann", "accepted"]
    assert " ".join(second[7:]) == "accepted [forced despite: an old evaluation] [open: interrupted or in progress]"
    assert format_history("support", []) == ["support has no recorded history"]


def test_curve_has_a_block_for_each_part_of_the_series() -> None:
    assert tables.format_curve([2.0]) == ""
    assert tables.format_curve([3.0, 3.0]) == "▁▁ 3"
    long = tables.format_curve([1000.0 - i for i in range(1000)])
    assert long.startswith("██")
    assert long.endswith("▁▁ 1")
    assert len(long) == tables.CURVE_COLUMNS + 2
