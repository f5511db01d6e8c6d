"""Elements of self-contained HTML reports without scripts. Plots are inline SVG, created by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from components.common.runtime.reporters import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

NUMBER_PATTERN = re.compile(r"[+−-]?\d[\d,]*(\.\d+)?%?")
WIDE_TEXT = 40  # characters; a shorter text may wrap after each word
DIGEST_PATTERN = re.compile(r"[0-9a-f]{40,64}(\+changes)?")
PLOT_COLOUR = "#4472b0"
# Each colour has a contrast of at least 3:1 with white (WCAG 2.2, 1.4.11).
LINE_COLOURS = (PLOT_COLOUR, "#b3591a", "#2f7d4f", "#8a4fa3", "#b3261e", "#5c6575")
STYLESHEET = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5c6575; --line: #d9dee7; --good: #147a4b; --bad: #b3261e; --link: #1a56b0; --paper: #fff; --wash: #f5f7fa; --shade: #1d233055 }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --soft: #9aa4b5; --line: #39414f; --good: #5fd39a; --bad: #ff8a80; --link: #8ab4f8; --paper: #14181f; --wash: #1c222c; --shade: #e8ebf077 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
a { color: var(--link) } h1 { font-size: 1.6rem; margin-bottom: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
p.sub, .soft { color: var(--soft) } .soft, .tile, dt { overflow-wrap: anywhere } figcaption { color: #5c6575; padding: 0 .7rem .5rem } .good { color: var(--good) } .bad { color: var(--bad) }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0 }
.tile { background: var(--wash); border-radius: .5rem; padding: .6rem 1rem } .tile b { display: block; font-size: 1.3rem }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1rem 0 } dl.facts dt { color: var(--soft) } dl.facts dd { margin: 0; overflow-wrap: anywhere }
.scroll { overflow-x: auto; background: linear-gradient(90deg, var(--paper) 40%, transparent) left / 2rem 100% local, linear-gradient(270deg, var(--paper) 40%, transparent) right / 2rem 100% local, linear-gradient(90deg, var(--shade), transparent) left / .7rem 100%, linear-gradient(270deg, var(--shade), transparent) right / .7rem 100%; background-repeat: no-repeat }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
.scroll + .scroll { margin-top: 1.5rem } td.wide { min-width: 10.5rem; overflow-wrap: anywhere } td.n + td:not(.n), th.n + th:not(.n) { padding-left: .7rem } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .85rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13.5rem, 1fr)); gap: .8rem; margin: .6rem 0 1.8rem }
.card { background: var(--wash); border-radius: .5rem; padding: .6rem .9rem } .card h3, h3.prompt { overflow-wrap: anywhere; font-size: .85rem; color: var(--soft); margin: 0 0 .3rem; font-weight: 600 }
ul.tree, ul.tree ul { list-style: none; margin: 0; padding-left: 1.1rem; border-left: 1px solid var(--line) } ul.tree { padding-left: 0; border: 0 } ul.tree li { margin: .5rem 0 }
ul.tree b { margin-right: .4rem } ul.tree code { font-size: .85rem }
code { overflow-wrap: anywhere } figure { margin: 1rem 0; background: #fff; border-radius: .5rem } figure svg { width: 100%; min-width: 40rem; height: auto; display: block }
figure { overflow-x: auto } p, li { overflow-wrap: anywhere } td code { display: inline-block; min-width: 9rem } td pre { min-width: 15rem }
td:first-child:not(.n) { overflow-wrap: anywhere; min-width: 11rem } @media screen and (min-width: 60rem) { td:first-child:not(.n) { min-width: 13rem } } .scroll:focus-visible, figure:focus-visible { outline: 2px solid var(--link) }
.hint { display: none } @media screen and (max-width: 43rem) { .hint { display: block; position: sticky; left: 0; color: #5c6575; font-size: .85rem; padding: .4rem .7rem } dl.facts { grid-template-columns: 1fr; gap: 0 } dl.facts dd { margin-bottom: .5rem } }
@media print { body { max-width: none; margin: 0; font-size: 10pt } .scroll, figure { overflow: visible; background: none } figure svg { min-width: 0 } tr, figure, .card, .tile { break-inside: avoid } h2, h3 { break-after: avoid } td code, td.wide { min-width: 0; overflow-wrap: anywhere } }
"""
SCROLL_HINT = '<span class="hint">Scroll sideways to see the whole plot →</span>'


def render_page(title: str, subtitle: str, sections: Mapping[str, str], facts: str = "") -> str:
    """Return an HTML page. Title and subtitle are plain text.

    Args:
        sections: HTML by heading; empty sections are omitted.
        facts: HTML of `render_facts`, below the subtitle.
    """
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in sections.items() if html)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLESHEET}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p>{facts}{body}</body></html>\n'
    )


def render_fragment(title: str, sections: Mapping[str, str]) -> str:
    """Return sections as the output of a notebook's cell, which lacks the style sheet of a page.

    Args:
        sections: HTML by heading; empty sections are omitted.
    """
    body = "".join(f"<h4>{escape(name)}</h4>{html}" for name, html in sections.items() if html)
    return f"<b>{escape(title)}</b>{body}".replace(SCROLL_HINT, "")


def render_tiles(figures: Mapping[str, object]) -> str:
    """Return the key figures as tiles."""
    tiles = (f'<div class="tile"><b>{format_value(v)}</b> {escape(k)}</div>' for k, v in figures.items())
    return f'<div class="tiles">{"".join(tiles)}</div>'


def render_facts(facts: Mapping[str, tuple[str, str]]) -> str:
    """Return a list of facts; each value is a text and the address of its link, or an empty address."""
    items = (f"<dt>{escape(name)}</dt><dd>{render_link(*value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def render_link(text: str, address: str) -> str:
    """Return a link if the address is an http, https or file URL; otherwise, only the text."""
    if not address.startswith(("http://", "https://", "file://")):
        return escape(text)
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def render_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of escaped cells: columns of numbers are right-aligned, and columns of sentences have a minimum width."""
    classes = [_classify_column([row[i] for row in rows]) for i in range(len(head))]

    def render_row(tag: str, values: Sequence[object]) -> str:
        cells = (f"<{tag}{cls}>{format_value(value)}</{tag}>" for cls, value in zip(classes, values, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    lines = "".join(render_row("td", row) for row in rows)
    return f'<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>{render_row("th", head)}{lines}</table></div>'


def _classify_column(values: Sequence[object]) -> str:
    texts = [value for value in values if isinstance(value, str)]
    longest = max((len(line) for text in texts for line in text.splitlines()), default=0)
    if longest > WIDE_TEXT:
        return "" if any(DIGEST_PATTERN.fullmatch(text) for text in texts) else ' class="wide"'
    if any(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return ' class="n"'
    known = [value for value in values if value is not None]
    is_numeric = bool(values) and all(isinstance(v, str) and NUMBER_PATTERN.fullmatch(v) for v in known)
    return ' class="n"' if is_numeric else ""


def format_value(value: object) -> str:
    """Return a value as escaped text: thousands separators, four significant digits below 1,000, digests as code."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return format_number(value)
    text = escape(str(value))
    if DIGEST_PATTERN.fullmatch(text):
        return f"<code>{text}</code>"
    return f"<pre>{text}</pre>" if "\n" in text else text


def render_cards(texts: Mapping[str, str], prompt: str = "") -> str:
    """Return texts as cards, side by side, with an optional prompt above the cards.

    Args:
        texts: text by the title of its card.
    """
    above = f'<h3 class="prompt">prompt</h3><pre>{escape(prompt)}</pre>' if prompt else ""
    cards = (
        f'<div class="card"><h3>{escape(title)}</h3><pre>{escape(text)}</pre></div>' for title, text in texts.items()
    )
    return f'{above}<div class="cards">{"".join(cards)}</div>'


def render_tree(root: str, children: Mapping[str, Sequence[str]], label: Callable[[str], tuple[str, str, str]]) -> str:
    """Return the tree rooted at `root` as a nested HTML list.

    Args:
        children: child nodes by parent node.
        label: returns a node's name, code and remark.
    """
    name, code, remark = label(root)
    inner = "".join(render_tree(child, children, label) for child in children.get(root, ()))
    item = f'<b>{escape(name)}</b><code>{escape(code)}</code> <span class="soft">{escape(remark)}</span>{inner}'
    return f'<ul class="tree"><li>{item}</li></ul>'


def render_paragraph(text: str, css_class: str = "") -> str:
    """Return a paragraph; the classes "good", "bad" and "soft" colour it."""
    return f'<p class="{escape(css_class)}">{escape(text)}</p>'


def plot_lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, caption: str) -> str:
    """Return a line plot as an inline SVG with a caption.

    Args:
        series: (xs, ys) by name of the line; xs and ys have equal lengths.
        x: label of the x axis.
        y: label of the y axis.
    """
    figure, axes = _create_figure()
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, marker="o" if len(xs) < 30 else None, markersize=3.5, label=name)
    if all(float(step).is_integer() for xs, _ in series.values() for step in xs):
        _use_whole_ticks(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False)
    return _render_svg(figure, caption)


def plot_bars(values: Mapping[str, float], *, x: str, caption: str, colours: Mapping[str, str] | None = None) -> str:
    """Return a horizontal bar chart as an inline SVG with a caption.

    Args:
        values: length by name of the bar.
        x: label of the x axis.
        colours: colour by name of the bar; overrides PLOT_COLOUR.
    """
    figure, axes = _create_figure(height=0.8 + 0.38 * max(len(values), 1))
    bar_colours = [(colours or {}).get(name, PLOT_COLOUR) for name in values]
    bars = axes.barh(list(values), list(values.values()), color=bar_colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_ylim(max(len(values), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(values.values(), default=0) or 1)
    _use_whole_ticks(axes)
    axes.set_xlabel(x)
    return _render_svg(figure, caption)


def plot_stacked_bars(
    bars: Mapping[str, Mapping[str, float]], *, x: str, caption: str, limits: Mapping[str, float] | None = None
) -> str:
    """Return horizontal bars of stacked parts as an inline SVG with a caption.

    Args:
        bars: lengths by part, by name of the bar.
        x: label of the x axis.
        limits: position of a vertical line by its name.
    """
    parts = list(dict.fromkeys(part for lengths in bars.values() for part in lengths))
    figure, axes = _create_figure(height=1.4 + 0.5 * len(bars))
    starts = dict.fromkeys(bars, 0.0)
    for number, part in enumerate(parts):
        lengths = [bars[name].get(part, 0.0) for name in bars]
        axes.barh(
            list(bars),
            lengths,
            left=list(starts.values()),
            height=0.6,
            color=LINE_COLOURS[number % len(LINE_COLOURS)],
            label=part,
        )
        starts = {name: starts[name] + length for name, length in zip(bars, lengths, strict=True)}
    for name, total in starts.items():
        axes.annotate(format_number(total, 3), (total, name), xytext=(4, 0), textcoords="offset points", va="center")
    for name, limit in (limits or {}).items():
        axes.axvline(limit, color="#444", linewidth=1.2, linestyle="--", label=name)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(x)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return _render_svg(figure, caption)


def plot_intervals(rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str) -> str:
    """Return a plot of intervals, with a line at zero, as an inline SVG with a caption.

    Args:
        rows: (value, low, high) by name of the interval.
        x: label of the x axis.
    """
    figure, axes = _create_figure(height=1.0 + 0.45 * max(len(rows), 1))
    for position, (value, low, high) in enumerate(rows.values()):
        errors = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar(value, position, xerr=errors, fmt="o", capsize=4, color=PLOT_COLOUR)
    axes.axvline(0, color="#999", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    return _render_svg(figure, caption)


FlowLink = tuple[str, str, int]  # from, to, count
BOX_GAP = 0.16  # gap between the boxes of a column for a label, as a fraction of the height of all rows


def plot_flow(
    columns: Sequence[Mapping[str, int]], links: Sequence[FlowLink], colours: Mapping[str, str], *, caption: str
) -> str:
    """Return a Sankey diagram as an inline SVG: heights of boxes and widths of links are proportional to their counts.

    Names must be unique across all columns. Boxes have a minimum height, so that one row among thousands is visible.

    Args:
        columns: counts by name of the box, one mapping per column, from left to right.
        links: (source box, target box, count).
        colours: colour by name of the box; a link has the colour of its target.
    """
    from matplotlib.patches import Rectangle

    total = max(sum(column.values()) for column in columns)
    slots = max(len(column) for column in columns)
    figure, axes = _create_figure(height=max(2.4, 0.55 * slots + 1))
    axes.set_axis_off()
    column_of: dict[str, int] = {}
    tops: dict[str, float] = {}  # top edges of the boxes; the height of all rows is 1
    lowest = 1.0
    for number, column in enumerate(columns):
        top = 1.0
        for name, count in column.items():
            size = max(count / total, 0.006)
            column_of[name], tops[name], lowest = number, top, min(lowest, top - size)
            colour = colours.get(name, PLOT_COLOUR)
            axes.add_patch(Rectangle((number, top - size), 0.07, size, color=colour, linewidth=0))
            axes.text(number + 0.09, top - size / 2, f"{name} {count:,}", va="center", fontsize=9.5)
            top -= max(size, BOX_GAP / 2) + BOX_GAP / 2
    left, right = dict(tops), dict(tops)  # top edges of the next link at each box: links are stacked
    for source, target, count in links:
        width, colour = max(count / total, 0.004), colours.get(target, PLOT_COLOUR)
        axes.add_patch(_create_ribbon(column_of[source], left[source], right[target], width, colour))
        left[source] -= width
        right[target] -= width
    axes.set_xlim(0, len(columns) - 0.35)
    axes.set_ylim(lowest - 0.03, 1.03)
    return _render_svg(figure, caption)


def _create_ribbon(column: int, left: float, right: float, width: float, colour: str) -> PathPatch:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    start, end = column + 0.07, column + 1
    middle = (start + end) / 2
    corners = [
        (start, left), (middle, left), (middle, right), (end, right),
        (end, right - width), (middle, right - width), (middle, left - width), (start, left - width), (start, left),
    ]  # fmt: skip
    codes = [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3, Path.CLOSEPOLY]
    return PathPatch(Path(corners, codes), facecolor=colour, alpha=0.25, linewidth=0)


def _use_whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def _create_figure(height: float = 3.2) -> tuple[Figure, Axes]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    matplotlib.rcParams["svg.fonttype"] = "none"  # keep text as text: searchable and accessible
    matplotlib.rcParams["text.parse_math"] = False  # a label with $ is a name, not a formula
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=LINE_COLOURS)
    return figure, axes


def _render_svg(figure: Figure, caption: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return (
        f'<figure role="region" aria-label="Plot" tabindex="0">{SCROLL_HINT}{svg[svg.index("<svg") :]}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
