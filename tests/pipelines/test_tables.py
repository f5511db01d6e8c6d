"""Tables of the command line. In `make test`, because it takes milliseconds."""

from __future__ import annotations

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
    assert header == ["move", "time", "kind", "alias", "from", "to", "user", "reason"]
    assert first == ["1", MOVE["at"], "promotion", "champion", "–", "3", "ann", "accepted"]
    assert " ".join(second[7:]) == "accepted [forced despite: an old evaluation] [open: interrupted or in progress]"
    assert format_history("support", []) == ["support has no recorded moves"]
