"""report.html: what went in, what was kept, what was dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from components.common import report
from components.data_curation.cleaning import Drop
from components.data_curation.readers import Unread
from components.data_curation.rows import Row
from components.data_curation.sources import Source

EXAMPLES = 3  # of each reason
SHOWN = 300  # characters of an example
LENGTHS = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)  # characters: the upper ends of the classes


def render(
    summary: Mapping[str, Any],
    sources: Sequence[Source],
    kept: Sequence[Row],
    dropped: Sequence[tuple[Row, Drop]],
    unread: Sequence[Unread],
) -> str:
    """The report as one HTML page."""
    rows = summary["rows"]
    sections = {
        "At a glance": report.tiles({"rows in": rows["in"], "kept": rows["kept"], **summary["splits"]}),
        "What was dropped": _reasons(rows),
        "Splits": _splits(summary["splits"], rows["kept"]),
        "Lengths": _lengths(kept),
        "Examples of dropped rows": _examples(dropped),
        "Unreadable places": _unread(unread),
        "Sources": report.table(["file", "bytes", "sha256"], [[s.name, s.bytes, s.sha256] for s in sources]),
    }
    return report.page("Data curation", f"{rows['kept']:,} of {rows['in']:,} rows kept; kind of rows: {summary['rows_kind']}", sections)


def _reasons(rows: Mapping[str, Any]) -> str:
    counts = {"kept": rows["kept"], **rows["rejected"], "quarantined (unreadable)": rows["quarantined"]}
    shown = {name: count for name, count in counts.items() if count}
    note = "Every row that went in is counted once: it was kept, dropped for the reason named, or unreadable."
    return report.bar_plot(shown, x="rows", caption=note)


def _splits(splits: Mapping[str, int], kept: int) -> str:
    note = "Rows with equal or similar text, or with equal or similar answers, always lie in the same split."
    return report.table(["split", "rows", "share"], [[n, c, f"{c / kept:.1%}"] for n, c in splits.items()]) + report.paragraph(note, "soft")


def _lengths(kept: Sequence[Row]) -> str:
    counts = Counter(next((top for top in LENGTHS if len(row.text()) <= top), 0) for row in kept)
    bars = {f"up to {top:,}": counts[top] for top in LENGTHS} | {f"more than {LENGTHS[-1]:,}": counts[0]}
    return report.bar_plot(bars, x="kept rows", caption="Characters of all messages of a row.")


def _examples(dropped: Sequence[tuple[Row, Drop]]) -> str:
    seen: Counter[str] = Counter()
    lines = []
    for row, why in sorted(dropped, key=lambda one: one[1].reason):
        seen[why.reason] += 1
        if seen[why.reason] <= EXAMPLES:
            lines.append([why.reason, why.detail, f"{row.file}:{row.line}", _short(row.text())])
    return report.table(["reason", "detail", "where", "text"], lines) if lines else ""


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + " …"


def _unread(unread: Sequence[Unread]) -> str:
    if not unread:
        return ""
    table = report.table(["file", "line", "why"], [[one.file, one.line, one.why] for one in unread[:20]])
    return table + report.paragraph(f"{len(unread):,} in all; quarantine.jsonl lists every one.", "soft")
