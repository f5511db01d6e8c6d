"""Self-contained HTML pages: no script, no network. Plots are SVG by matplotlib, never smaller than their labels can be read: they scroll."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

DIGEST = re.compile(r"[0-9a-f]{40,64}(\+changes)?")
STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5c6575; --line: #d9dee7; --good: #147a4b; --bad: #b3261e; --paper: #fff; --wash: #f5f7fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --soft: #9aa4b5; --line: #39414f; --good: #5fd39a; --bad: #ff8a80; --paper: #14181f; --wash: #1c222c } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
p.sub, .soft { color: var(--soft) } figcaption { color: #5c6575; padding: 0 .7rem .5rem } .good { color: var(--good) } .bad { color: var(--bad) }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0 }
.tile { background: var(--wash); border-radius: .5rem; padding: .6rem 1rem } .tile b { display: block; font-size: 1.3rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .85rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; margin: .6rem 0 1.8rem }
.card { background: var(--wash); border-radius: .5rem; padding: .6rem .9rem } .card h3, h3.asked { overflow-wrap: anywhere; font-size: .85rem; color: var(--soft); margin: 0 0 .3rem; font-weight: 600 }
ul.tree, ul.tree ul { list-style: none; margin: 0; padding-left: 1.1rem; border-left: 1px solid var(--line) } ul.tree { padding-left: 0; border: 0 } ul.tree li { margin: .5rem 0 }
ul.tree b { margin-right: .4rem } ul.tree code { font-size: .85rem }
code { overflow-wrap: anywhere } figure { margin: 1rem 0; background: #fff; border-radius: .5rem } figure svg { width: 100%; min-width: 40rem; height: auto; display: block }
figure { overflow-x: auto } p { overflow-wrap: anywhere } td code { display: inline-block; min-width: 9rem } td pre { min-width: 15rem }
td:first-child:not(.n) { overflow-wrap: anywhere; min-width: 8rem }
"""


def page(title: str, subtitle: str, sections: Mapping[str, str]) -> str:
    """A page from ready HTML sections by heading; title and subtitle are plain text."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in sections.items() if html)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="sub">{escape(subtitle)}</p>{body}</body></html>\n'
    )


def tiles(figures: Mapping[str, Any]) -> str:
    """The few figures a reader looks for first."""
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{show(v)}</b>{escape(k)}</div>' for k, v in figures.items()) + "</div>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; numbers, and the heads above them, stand right. Cells are escaped."""
    numeric = [any(_is_number(row[i]) for row in rows) for i in range(len(head))]

    def cell(tag: str, column: int, value: Any) -> str:
        return f'<{tag} class="n">{show(value)}</{tag}>' if numeric[column] else f"<{tag}>{show(value)}</{tag}>"

    top = "".join(cell("th", i, name) for i, name in enumerate(head))
    lines = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{lines}</table></div>'


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def show(value: Any) -> str:
    """A value as escaped text: thousands separated, four significant digits; a digest may break anywhere."""
    if isinstance(value, bool) or value is None:
        return escape({True: "yes", False: "no", None: "–"}[value])
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    text = escape(str(value))
    if DIGEST.fullmatch(text):
        return f"<code>{text}</code>"
    return f"<pre>{text}</pre>" if "\n" in text else text


def cards(texts: Mapping[str, str], asked: str = "") -> str:
    """Texts side by side under their titles, one above the other on a narrow screen; `asked` stands above them all."""
    above = f'<h3 class="asked">asked</h3><pre>{escape(asked)}</pre>' if asked else ""
    inner = "".join(f'<div class="card"><h3>{escape(title)}</h3><pre>{escape(text)}</pre></div>' for title, text in texts.items())
    return f'{above}<div class="cards">{inner}</div>'


def tree(root: str, children: Mapping[str, Sequence[str]], label: Callable[[str], tuple[str, str, str]]) -> str:
    """A nested list from `root` over `children`; `label` gives a node's name, code and remark."""
    name, code, remark = label(root)
    inner = "".join(tree(child, children, label) for child in children.get(root, ()))
    item = f'<b>{escape(name)}</b><code>{escape(code)}</code> <span class="soft">{escape(remark)}</span>{inner}'
    return f'<ul class="tree"><li>{item}</li></ul>'


def paragraph(text: str, mood: str = "") -> str:
    """A paragraph; mood "good" or "bad" colours it."""
    return f'<p class="{escape(mood)}">{escape(text)}</p>'


def line_plot(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, caption: str) -> str:
    """Lines by name, each (xs, ys), as an inline SVG with a caption."""
    figure, axes = _figure()
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, marker="o" if len(xs) < 30 else None, markersize=3.5, label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False)
    return _svg(figure, caption)


def bar_plot(values: Mapping[str, float], *, x: str, caption: str, colours: Mapping[str, str] | None = None) -> str:
    """Horizontal bars by name as an inline SVG with a caption; `colours` sets some of them apart."""
    figure, axes = _figure(height=0.8 + 0.38 * max(len(values), 1))
    bars = axes.barh(list(values), list(values.values()), color=[(colours or {}).get(name, "#4472b0") for name in values])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(x)
    return _svg(figure, caption)


def interval_plot(rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str) -> str:
    """Estimates with their intervals (value, low, high) by name, and a line at zero."""
    figure, axes = _figure(height=1.0 + 0.45 * max(len(rows), 1))
    for place, (value, low, high) in enumerate(rows.values()):
        axes.errorbar(value, place, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], fmt="o", capsize=4, color="#4472b0")
    axes.axvline(0, color="#999", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    return _svg(figure, caption)


Link = tuple[str, str, int]


def flow_plot(columns: Sequence[Mapping[str, int]], links: Sequence[Link], colours: Mapping[str, str], *, caption: str) -> str:
    """A flow from left to right: each column's boxes are as high as their counts, each link (from, to, count) as wide.

    Names are unique over all columns. A box is never thinner than a line, so that one row among thousands is seen too.
    """
    total = max(sum(column.values()) for column in columns)
    slots = max(len(column) for column in columns)
    figure, axes = _figure(height=max(2.4, 0.55 * slots + 1))
    axes.set_axis_off()
    places = [_stacked(column, total) for column in columns]
    for number, boxes in enumerate(places):
        for name, (top, size) in boxes.items():
            axes.add_patch(_box(number, top, size, colours.get(name, "#4472b0")))
            axes.text(number + 0.09, top - size / 2, f"{name} {columns[number][name]:,}", va="center", fontsize=9)
    for band in _bands(links, places, total):
        axes.add_patch(_ribbon(*band, colours))
    axes.set_xlim(0, len(columns) - 0.35)
    axes.set_ylim(min(top - size for boxes in places for top, size in boxes.values()) - 0.03, 1.03)
    return _svg(figure, caption)


GAP = 0.16  # between the boxes of a column, of the height of all rows: room for a label


def _stacked(column: Mapping[str, int], total: int) -> dict[str, tuple[float, float]]:
    """Where each box of a column stands: (top, height), the whole being 1 high."""
    boxes, top = {}, 1.0
    for name, count in column.items():
        size = max(count / total, 0.006)
        boxes[name] = (top, size)
        top -= max(size, GAP / 2) + GAP / 2
    return boxes


def _bands(
    links: Sequence[Link], places: Sequence[Mapping[str, tuple[float, float]]], total: int
) -> Iterator[tuple[int, str, str, float, float, float]]:
    """Each link as (column, from, to, its top left, its top right, its width); links leave and enter a box one below the other."""
    column_of = {name: number for number, boxes in enumerate(places) for name in boxes}
    out = {name: top for boxes in places for name, (top, _) in boxes.items()}
    into = dict(out)
    for source, target, count in links:
        width = max(count / total, 0.004)
        yield column_of[source], source, target, out[source], into[target], width
        out[source] -= width
        into[target] -= width


def _box(column: int, top: float, size: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column, top - size), 0.07, size, color=colour, linewidth=0)


def _ribbon(column: int, source: str, target: str, left: float, right: float, width: float, colours: Mapping[str, str]) -> Any:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    start, end = column + 0.07, column + 1
    middle = (start + end) / 2
    corners = [
        (start, left), (middle, left), (middle, right), (end, right),
        (end, right - width), (middle, right - width), (middle, left - width), (start, left - width), (start, left),
    ]  # fmt: skip
    codes = [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3, Path.CLOSEPOLY]
    return PathPatch(Path(corners, codes), facecolor=colours.get(target, "#4472b0"), alpha=0.25, linewidth=0)


def _figure(height: float = 3.2) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    matplotlib.rcParams["svg.fonttype"] = "none"  # words and figures stay text: they can be searched, read aloud and checked
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any, caption: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{escape(caption)}</figcaption></figure>"
