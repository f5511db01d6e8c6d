"""Elements of HTML reports: colours, links and hints.

Fast tier: strings only.
"""

from __future__ import annotations

import re

import pytest

from components.common.reporting import html_report
from pipelines.steps import report_page

TEXT_RATIO, GRAPHICS_RATIO = 4.5, 3.0  # WCAG 2.2 AA, success criteria 1.4.3 and 1.4.11
THEMES = [
    dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", rule))
    for rule in re.findall(r":root \{(.*?)\}", html_report.STYLESHEET)
]


def compute_contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, as WCAG 2.2 defines it."""
    lighter, darker = sorted((_compute_luminance(first), _compute_luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _compute_luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) > 4 else "".join(2 * digit for digit in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_of_black_on_white_is_the_largest() -> None:
    assert compute_contrast("#000", "#ffffff") == pytest.approx(21.0)
    assert compute_contrast("#777777", "#fff") < TEXT_RATIO


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_texts_have_the_contrast_of_wcag_aa(theme: dict[str, str]) -> None:
    for ink in ("ink", "soft", "good", "bad", "link"):
        for paper in ("paper", "wash"):
            assert compute_contrast(theme[ink], theme[paper]) >= TEXT_RATIO, (ink, paper)


def test_fixed_colours_of_captions_and_plots_have_enough_contrast_with_white() -> None:
    fixed = re.findall(r"[ ;{]color: (#[0-9a-f]+)", html_report.STYLESHEET)
    assert fixed
    assert all(compute_contrast(colour, "#fff") >= TEXT_RATIO for colour in fixed)
    marks = (*html_report.LINE_COLOURS, report_page.GREEN, report_page.ORANGE, report_page.RED)
    assert all(compute_contrast(colour, "#fff") >= GRAPHICS_RATIO for colour in marks)


@pytest.mark.parametrize(
    ("address", "is_link"),
    [
        ("https://host/#/runs/1", True),
        ("file:///wd/report.html", True),
        ("javascript:alert(1)", False),
        ("raw.jsonl", False),
    ],
)
def test_only_addresses_of_pages_and_files_are_links(address: str, is_link: bool) -> None:
    assert ("<a " in html_report.render_link("text <1>", address)) is is_link
    assert "text &lt;1&gt;" in html_report.render_facts({"Run": ("text <1>", address)})


def test_wide_content_is_reachable_by_keyboard_and_announces_scrolling() -> None:
    plot = html_report.plot_lines({"loss": ([1.0], [2.0])}, x="step", y="loss", caption="Loss.")
    table = html_report.render_table(["a"], [["b"]])
    assert html_report.SCROLL_HINT in plot
    assert all('tabindex="0"' in element for element in (plot, table))
    assert re.search(r"@media print \{.*\.scroll, figure \{ overflow: visible", html_report.STYLESHEET)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None], 'td class="n"'),
        (["12.5%", "+0.0050"], 'td class="n"'),
        ([None, None], 'td class="n"'),
        (["2.13.0", "1.0"], "td"),
        (["a sentence that is long enough to be read in lines", "short"], 'td class="wide"'),
        ([0.5, "a" * 64], "td"),  # a digest beside a number: wrapped digests are read from the left
    ],
)
def test_cells_are_aligned_by_the_content_of_their_column(values: list[object], expected: str) -> None:
    table = html_report.render_table(["name", "value"], [["a", value] for value in values])
    assert table.count(f"<{expected}>") == (2 if expected != "td" else 4)


def test_steps_and_counts_have_whole_numbers_on_their_axes() -> None:
    lines = html_report.plot_lines({"loss": ([1, 2], [3, 4])}, x="step", y="loss", caption="Loss.")
    counts = html_report.plot_bars({"a": 1, "b": 0}, x="rows", caption="Rows.")
    empty = html_report.plot_bars({"a": 0}, x="rows", caption="Rows.")
    assert "1.25" not in lines
    assert "0.2" not in re.findall(r">([\d.−]+)</text>", counts)
    assert set(re.findall(r">([\d.−]+)</text>", empty)) == {"0", "1"}
