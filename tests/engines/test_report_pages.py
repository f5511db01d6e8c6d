"""Reports in a real browser: no part is wider than a phone. Starts a browser: long tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.reporting import html_report
from tests.engines.chromium import Page

pytestmark = [pytest.mark.chromium, pytest.mark.long]
LONG = "dvc:///work/data-repository@50d72439adf6785fa482fcfb87bdc7bf6980f250:datasets/a-long-name"
WIDTH = 400


def test_long_names_do_not_widen_a_report(new_tab: Callable[[], Page], tmp_path: Path) -> None:
    sections = {
        "Paragraph": html_report.render_paragraph(LONG, "soft"),
        "List": f"<ul><li>{LONG}</li></ul>",
        "Tiles": html_report.render_tiles({LONG: 0.5}),
        "Table": html_report.render_table(["name", LONG], [[LONG, LONG]]),
        "Cards": html_report.render_cards({LONG: LONG}, LONG),
        "Tree": html_report.render_tree("a", {"a": ["b"]}, lambda node: (node, LONG, LONG)),
        "Plot": html_report.plot_bars({LONG: 1.0}, x=LONG, caption=LONG),
    }
    page_path = tmp_path / "report.html"
    page_path.write_text(html_report.render_page(LONG, LONG, sections, html_report.render_facts({LONG: (LONG, "")})))
    page = new_tab()
    page.send("Emulation.setDeviceMetricsOverride", width=WIDTH, height=800, deviceScaleFactor=1, mobile=False)
    page.open(page_path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
