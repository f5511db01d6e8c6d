"""The comparison section of the run report."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.steps import report_page


def test_rule_over_slices_has_its_own_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, Any] = {}

    def plot(rows: dict[str, Any], **_: Any) -> str:
        shown.update(rows)
        return ""

    monkeypatch.setattr(report_page.html_report, "plot_intervals", plot)
    rule = {"metric": "loss", "against": "base", "holds": True, "reason": "It is better."}
    overall = {**rule, "gain": [0.5, 0.4, 0.6]}  # the format of earlier releases, without slices
    slices = {**rule, "slices": ["source"], "holds": False, "gain": [-0.2, -0.3, -0.1]}
    report_page._render_comparison({"rules": [overall, slices], "metrics": {}})
    assert shown == {"loss against base": (0.5, 0.4, 0.6), "loss, worst slice against base": (-0.2, -0.3, -0.1)}
