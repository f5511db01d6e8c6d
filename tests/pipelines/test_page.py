"""How the page of evidence tells what was compared."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines import page


def test_a_rule_over_slices_does_not_take_the_place_of_the_overall_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, Any] = {}

    def plot(rows: dict[str, Any], **_: Any) -> str:
        shown.update(rows)
        return ""

    monkeypatch.setattr(page.report, "interval_plot", plot)
    rule = {"metric": "loss", "against": "base", "holds": True, "reason": "It is better."}
    overall = {**rule, "gain": [0.5, 0.4, 0.6]}  # as an earlier release wrote it, which knew no slices
    slices = {**rule, "slices": ["source"], "holds": False, "gain": [-0.2, -0.3, -0.1]}
    page._comparison({"rules": [overall, slices], "metrics": {}})
    assert shown == {"loss against base": (0.5, 0.4, 0.6), "loss, worst slice against base": (-0.2, -0.3, -0.1)}
