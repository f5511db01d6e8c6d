"""Self-contained HTML pages: no script, no network. Plots are SVG by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5c6575; --line: #d9dee7; --good: #147a4b; --bad: #b3261e; --paper: #fff; --wash: #f5f7fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --soft: #9aa4b5; --line: #39414f; --good: #5fd39a; --bad: #ff8a80; --paper: #14181f; --wash: #1c222c } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
p.sub, .soft, figcaption { color: var(--soft) } .good { color: var(--good) } .bad { color: var(--bad) }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0 }
.tile { background: var(--wash); border-radius: .5rem; padding: .6rem 1rem } .tile b { display: block; font-size: 1.3rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .85rem }
code { overflow-wrap: anywhere } figure { margin: 1rem 0; background: #fff; border-radius: .5rem } figure svg { width: 100%; height: auto; display: block }
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
    """A value as escaped text: thousands separated, four significant digits."""
    if isinstance(value, bool) or value is None:
        return escape({True: "yes", False: "no", None: "–"}[value])
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    text = escape(str(value))
    return f"<pre>{text}</pre>" if "\n" in text else text


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


def bar_plot(values: Mapping[str, float], *, x: str, caption: str) -> str:
    """Horizontal bars by name as an inline SVG with a caption."""
    figure, axes = _figure(height=0.8 + 0.38 * max(len(values), 1))
    bars = axes.barh(list(values), list(values.values()), color="#4472b0")
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(x)
    return _svg(figure, caption)


def interval_plot(rows: Mapping[str, tuple[float, float, float]], *, x: str, caption: str) -> str:
    """Estimates with their intervals (value, low, high) by name, and a line at zero."""
    figure, axes = _figure(height=1.0 + 0.45 * max(len(rows), 1))
    for place, (value, low, high) in enumerate(rows.values()):
        axes.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", capsize=4, color="#4472b0")
    axes.axvline(0, color="#999", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    return _svg(figure, caption)


def _figure(height: float = 3.2) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
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
