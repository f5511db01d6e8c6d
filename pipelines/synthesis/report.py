"""report.html of a synthesis: yield, reject reasons, diversity, cost and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.common.reporting.html_report import (
    render_cards,
    render_page,
    render_paragraph,
    render_table,
    render_tiles,
)
from components.data_curation.quality_scoring.llm_judge import render_row
from pipelines.synthesis.synthesis import SynthesizedRows

SHOWN_ROWS = 5
SHOWN_CHARACTERS = 1_500


def render_report(summary: Mapping[str, Any], result: SynthesizedRows) -> str:
    """Return the report as HTML.

    Args:
        summary: the summary of the manifest.
        result: the rows.
    """
    rows, tokens, diversity = summary["rows"], summary["tokens"], summary["diversity"]
    figures = {
        "rows": rows["accepted"],
        "requested": rows["requested"],
        "yield": summary["yield"],
        "documents": summary["documents"],
        "requests": summary["requests"],
        "cost": summary["cost"],
    }
    costs = [
        ("prompts", tokens["input"], summary["prices"]["input"]),
        ("answers", tokens["output"], summary["prices"]["output"]),
    ]
    basis = " Some token counts are estimated because the endpoint does not report them."
    sections = {
        "Yield": render_tiles(figures) + render_paragraph(summary["note"], "bad"),
        "Reject reasons": render_table(("reason", "answers"), list(rows["rejected"].items()))
        if rows["rejected"]
        else render_paragraph("No answer was rejected."),
        "Passages": render_table(
            ("", "passages"),
            [
                ("used", summary["passages"]),
                *summary["rejected_passages"].items(),
                ("unreadable", summary["unreadable"]),
            ],
        ),
        "Diversity": render_tiles({f"distinct-{n}": diversity[f"distinct_{n}"] for n in (1, 2, 3)})
        + render_table(("first word of the question", "questions"), list(diversity["openings"].items()))
        + render_table(("document", "rows"), list(diversity["documents"].items())),
        "Cost": render_table(("part", "tokens", "price per million"), costs)
        + render_paragraph(basis if tokens["estimated"] else ""),
        "Provenance": render_table(("", "name", "sha256"), _list_origins(summary)),
        "Accepted rows": _render_rows(result.rows),
        "Rejected answers": _render_rejected(result),
    }
    return render_page("Synthetic rows", f"{rows['accepted']:,} rows by {summary['teacher']['name']}", sections)


def _list_origins(summary: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    models = [(role, summary[role]["name"], summary[role]["sha256"]) for role in ("teacher", "judge") if summary[role]]
    return [*models, *(("template", one["name"], one["sha256"]) for one in summary["templates"])]


def _render_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    cards = {}
    for row in rows[:SHOWN_ROWS]:
        meta = row["meta"]
        page = f", page {meta['page']}" if "page" in meta else f", passage {meta['passage']}"
        evidence = "\n".join(f"> {text}" for text in meta["evidence"])
        cards[f"{row['source']}{page}"] = f"{render_row(dict(row))[:SHOWN_CHARACTERS]}\n\n{evidence}"
    return render_cards(cards)


def _render_rejected(result: SynthesizedRows) -> str:
    """Return the first rejected answer of each reason."""
    first = {row.reason: row for row in reversed(result.rejected)}
    cards = {
        f"{reason}: {row.detail[:SHOWN_CHARACTERS]}": row.text[:SHOWN_CHARACTERS]
        for reason, row in sorted(first.items())
    }
    return render_cards(cards) if cards else ""
