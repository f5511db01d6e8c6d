"""Reports in a real browser: no part is wider than a phone. Starts a browser: long tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.reporting import html_report
from examples.flywheel import page as flywheel_page
from tests.engines.chromium import Page
from tests.examples.test_flywheel import build_steps

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
    facts = html_report.render_facts({LONG: (LONG, "")})
    check_width(new_tab(), tmp_path / "report.html", html_report.render_page(LONG, LONG, sections, facts))


def test_flywheel_page_fits_a_phone(new_tab: Callable[[], Page], tmp_path: Path) -> None:
    tab = new_tab()
    check_width(tab, tmp_path / "flywheel.html", flywheel_page.render(build_steps()))
    assert "day 10: alarm" in tab.text()
    assert tab.evaluate("document.querySelectorAll('svg').length") == 3  # evidence, comparison, duration
    assert not tab.problems()


def check_width(page: Page, path: Path, html: str) -> None:
    path.write_text(html)
    page.send("Emulation.setDeviceMetricsOverride", width=WIDTH, height=800, deviceScaleFactor=1, mobile=False)
    page.open(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
