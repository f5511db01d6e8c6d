"""report.html of a dataset: numbers of kept, rejected and quarantined rows, with reasons and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from components.common.language_identification import HAN_SCRIPT
from components.common.reporting.html_report import (
    plot_bars,
    plot_flow,
    render_cards,
    render_page,
    render_paragraph,
    render_table,
    render_tiles,
)
from components.common.runtime.counts import format_count
from components.data_curation.filters import row_filters  # noqa: F401  registers the reasons of all filters
from components.data_curation.filters.reject_reasons import DUPLICATE_GROUP, REJECT_REASONS, SEMANTIC_DUPLICATE
from components.data_curation.quality_scoring.scorer_interface import ScorerStatistics
from components.data_curation.reading.raw_records import Source
from components.data_curation.report_statistics import (
    KEPT,
    LENGTH_CLASSES,
    LONGEST_CLASS,
    QUARANTINED,
    REJECTED,
    CurationStatistics,
)
from components.data_curation.token_statistics import TokenStatistics

MAX_SHOWN_FILES = 40
MAX_SHOWN_LANGUAGES = 12
SIMILARITY_STEP = 5  # percent
BLUE, GREEN, ORANGE, GREY = "#4472b0", "#2f8f5b", "#c9772b", "#8a93a3"
FIGURE_LABELS = {"auc": "AUC, cross-validation"}
LANGUAGE_LABELS = {"und": "undetermined", HAN_SCRIPT: "Chinese or Japanese"}
ACTION_DESCRIPTIONS = {"redact": "replaced by a placeholder", "drop": "row rejected", "keep": "counted only"}


def render(summary: Mapping[str, Any], sources: Sequence[Source], statistics: CurationStatistics) -> str:
    """Return the report as an HTML page.

    Args:
        summary: the manifest's summary, with the keys rows, splits and rows_kind.
        sources: the raw files.
        statistics: the counts and examples of the curation.
    """
    rows, splits = summary["rows"], summary["splits"]
    figures = {"rows in": rows["in"], "kept": rows["kept"], "rejected": sum(rows["rejected"].values())}
    if rows["quarantined"]:
        figures[QUARANTINED] = rows["quarantined"]
    if tokens := statistics.tokens:
        figures["tokens, estimated" if tokens.is_estimated else "tokens"] = tokens.total
    shares = [[name, count, f"{count / rows['kept']:.1%}"] for name, count in splits.items()]
    sections = {
        "Overview": render_tiles(figures) + "".join(render_paragraph(note) for note in statistics.notes),
        **_render_rows(rows, splits, statistics),
        **_render_findings(statistics),
        "Quality scores": "".join(_render_scorer(one) for one in statistics.quality_scores),
        "Splits": render_table(["split", "rows", "share"], shares)
        + render_paragraph("Similar rows, and rows with similar answers, are in the same split.", "soft"),
        "Tokens": _render_tokens(tokens) if tokens else "",
        "Documents": _render_documents(statistics) if statistics.documents else "",
        **_render_texts(rows["rejected"], statistics),
        **_render_files(sources, rows["quarantined"], statistics),
    }
    subtitle = f"{rows['kept']:,} of {format_count(rows['in'], 'row')} kept; row kind: {summary['rows_kind']}"
    return render_page("Data curation", subtitle, sections)


def _render_rows(rows: Mapping[str, Any], splits: Mapping[str, int], statistics: CurationStatistics) -> dict[str, str]:
    """Return the sections on the row flow, the reject reasons and the duplicates."""
    rejected = rows["rejected"]
    groups: Counter[str] = Counter()
    for reason, count in rejected.items():
        groups[REJECT_REASONS[reason].group] += count
    results = {KEPT: rows["kept"], **dict(groups.most_common()), QUARANTINED: rows["quarantined"]}
    results = {name: count for name, count in results.items() if count}
    filled = {name: count for name, count in splits.items() if count}
    links = [("read", name, count) for name, count in results.items()]
    links += [(KEPT, name, count) for name, count in filled.items()]
    colours = {"read": BLUE, **dict.fromkeys(results, ORANGE), QUARANTINED: GREY}
    colours |= dict.fromkeys((KEPT, *filled), GREEN)
    flow_caption = "Every row is counted once: kept, rejected for one reason, or quarantined."
    reasons = render_paragraph("No row was rejected.")
    if rejected:
        caption = "rejected.parquet lists every rejected row with its reason and details, such as the measured value."
        reasons = plot_bars(_rank(rejected), x="rows", caption=caption, colours=dict.fromkeys(rejected, ORANGE))
    repeated = [
        [reason, REJECT_REASONS[reason].meaning, count, f"{count / rows['in']:.1%}"]
        for reason, count in rejected.items()
        if REJECT_REASONS[reason].group == DUPLICATE_GROUP
    ]
    duplicates = (
        render_table(["reason", "meaning", "rows", "share"], repeated)
        if repeated
        else render_paragraph("No duplicates.")
    )
    for reason, similarities in statistics.similarities.items():
        duplicates += _plot_similarities(reason, similarities)
    return {
        "Row flow": plot_flow([{"read": rows["in"]}, results, filled], links, colours, caption=flow_caption),
        "Reject reasons": reasons,
        "Duplicates": duplicates,
    }


def _plot_similarities(reason: str, similarities: Sequence[float]) -> str:
    """Plot a histogram of the similarity to the kept row, for rows rejected for one reason."""
    counts = Counter(
        min(int(similarity * 100) // SIMILARITY_STEP, 100 // SIMILARITY_STEP - 1) for similarity in similarities
    )
    bars = {
        f"{step * SIMILARITY_STEP / 100:.2f}–{(step + 1) * SIMILARITY_STEP / 100:.2f}": counts[step]
        for step in range(min(counts), 100 // SIMILARITY_STEP)
    }
    measure = "similarity to the kept row. Context that recurs across rows, such as a system prompt, is ignored."
    if reason == SEMANTIC_DUPLICATE.name:
        measure = (
            "cosine similarity to the kept row: the lower of the value for the prompts and the value for the answers."
        )
    caption = f"{reason}: {measure}"
    return plot_bars(bars, x="rows", caption=caption, colours=dict.fromkeys(bars, ORANGE))


def _render_findings(statistics: CurationStatistics) -> dict[str, str]:
    """Return the sections on evaluation sets and personal data."""
    sets = [
        [name, counts["rejected_rows"], counts["items"], counts["unsearchable"]]
        for name, counts in sorted(statistics.evaluation_sets.items(), key=lambda item: -item[1]["rejected_rows"])
    ]
    kinds = [
        [kind.replace("_", " "), count.found, count.rows, ACTION_DESCRIPTIONS.get(count.action, count.action)]
        for kind, count in sorted(statistics.personal.items(), key=lambda item: (-item[1].found, item[0]))
    ]
    sets_note = (
        "A row that overlaps with an item is rejected. The row's detail in "
        "rejected.parquet identifies the item. An item is unsearchable if its question is too short, is a common phrase, "
        "or contains only numbers and single letters. The other texts of such an item are still compared."
    )
    kinds_note = "Counts cover all rows, including rejected rows. The report omits the detected values."
    sets_table = render_table(["evaluation set", "rejected rows", "items", "unsearchable items"], sets)
    kinds_table = render_table(["kind", "found", "rows", "action"], kinds)
    no_sets = "data_curation.decontamination.sets is empty: rows were not compared with evaluation items."
    return {
        "Evaluation sets": sets_table + render_paragraph(sets_note, "soft") if sets else render_paragraph(no_sets),
        "Personal data and secrets": kinds_table + render_paragraph(kinds_note, "soft")
        if kinds
        else render_paragraph("No personal data or secrets found."),
    }


def _render_scorer(statistics: ScorerStatistics) -> str:
    """Render a scorer's figures, and its histogram with the threshold."""
    scorer, bins = statistics.scorer, statistics.count_bins()
    limits = [f"below {scorer.minimum:,.10g}"] if scorer.minimum is not None else []
    limits += [f"above {scorer.maximum:,.10g}"] if scorer.maximum is not None else []
    figures: dict[str, object] = {"rows scored": len(statistics.scores), "rejected": statistics.rejected}
    figures |= {"rows without a score": statistics.unscored} if statistics.unscored else {}
    figures |= {FIGURE_LABELS.get(name, name.replace("_", " ")): value for name, value in statistics.figures.items()}
    threshold = "No threshold is set."
    if limits:
        threshold = (
            f"Orange: rejected, because the score is {limits[0]}."
            if statistics.rejected
            else f"No score is {limits[0]}."
        )
    caption = f"Rows by score: {scorer.description}. {threshold}"
    rejected = {name: ORANGE for name, _, is_rejected in bins if is_rejected}
    title = f'<h3 class="reason">{escape(scorer.name)}</h3>'
    bars = plot_bars({name: count for name, count, _ in bins}, x="rows", caption=caption, colours=rejected)
    notes = "".join(render_paragraph(note) for note in statistics.notes)
    return title + render_tiles(figures) + bars + notes


def _render_tokens(tokens: TokenStatistics) -> str:
    """Render the token figures, the length histogram and the packing at the maximum row length."""
    figures = {"mean tokens per row": tokens.mean, "median": tokens.percentiles[50]}
    figures |= {f"{p}th percentile": count for p, count in tokens.percentiles.items() if p != 50}
    tops = sorted({*(1 << n for n in range(40)), *tokens.histogram, tokens.max_length})
    shown = tops[tops.index(min(tokens.histogram)) : tops.index(max(tokens.histogram)) + 1]
    names = {top: f"{max((end for end in tops if end < top), default=0) + 1:,}–{top:,}" for top in shown}
    bars = {name: tokens.histogram.get(top, 0) for top, name in names.items()}
    longer = {name: ORANGE for top, name in names.items() if top > tokens.max_length}
    length = f"than the maximum row length of {tokens.max_length:,} tokens"
    legend = (
        f"Orange: longer {length}. Training truncates these rows. Exceptions: the objective text splits them; grpo, "
        "rloo and distill leave out rows whose prompt is longer."
        if longer
        else f"No row is longer {length}."
    )
    packing = [
        ["maximum row length", f"{tokens.max_length:,} tokens"],
        ["rows beyond the maximum", f"{tokens.truncated_rows:.1%}"],
        ["tokens beyond the maximum", f"{tokens.truncated_tokens:.1%}"],
        ["utilization, one row per sequence", f"{tokens.unpacked_utilization:.1%}; the rest is padding"],
        [
            "utilization, packed",
            f"{tokens.packed_utilization:.1%}, in {tokens.sequences:,} sequences instead of {tokens.measured:,}",
        ],
        ["rows that the chat template rejects", f"{tokens.refused_by_template:,}"],
    ]
    basis = f"a sample of {tokens.sampled:,} of" if tokens.is_estimated else "all"
    skipped = tokens.sampled - tokens.measured - tokens.refused_by_template
    without = f"The count excludes {format_count(skipped, 'answer')} labelled bad. " if skipped else ""
    note = (
        f"Tokens are counted in {basis} {tokens.rows:,} rows, with the chat template and tokenizer of {tokens.model}. "
        f"{without}Packing uses best-fit decreasing and does not split rows."
    )
    return (
        render_tiles({**figures, "longest": tokens.longest})
        + plot_bars(bars, x="rows", caption=f"Rows by length in tokens. {legend}", colours=longer)
        + render_table(["", ""], packing)
        + render_paragraph(note, "soft")
    )


def _render_documents(statistics: CurationStatistics) -> str:
    """Render the counts by type of document, and the lengths of the chunks."""
    rows = [
        [f".{name}", count.files, count.pages or "–", count.chunks, count.pages_without_text]
        for name, count in statistics.documents.items()
    ]
    bars = {f"up to {top:,}": count for top, count in sorted(statistics.chunk_tokens.items())}
    versions = ", ".join(f"{name} {version}" for name, version in statistics.extractors.items())
    return (
        render_table(["type", "files", "pages", "chunks", "pages without text"], rows)
        + (plot_bars(bars, x="chunks", caption="Chunks by length in tokens.") if bars else "")
        + render_paragraph(f"Documents are split by section. Text extraction: {versions or 'tuneline'}.", "soft")
    )


def _render_texts(rejected: Mapping[str, int], statistics: CurationStatistics) -> dict[str, str]:
    """Return the sections on lengths and languages of kept rows, and on examples of rejected rows."""
    lengths = {f"up to {top:,}": statistics.lengths[top] for top in LENGTH_CLASSES}
    lengths[f"more than {LENGTH_CLASSES[-1]:,}"] = statistics.lengths[LONGEST_CLASS]
    ranked = list(_rank(statistics.languages).items())
    shown, others = ranked[:MAX_SHOWN_LANGUAGES], ranked[MAX_SHOWN_LANGUAGES:]
    languages = {LANGUAGE_LABELS.get(code, code): count for code, count in shown}
    if others:
        languages[format_count(len(others), "other language")] = sum(count for _, count in others)
    caption = "ISO 639 codes, identified by fastText's lid.176. Undetermined: too little text, or program code."
    if (sampled := statistics.languages.total()) < statistics.lengths.total():
        caption = f"A sample of {sampled:,} of {statistics.lengths.total():,} kept rows. {caption}"
    html = ""
    for reason, examples in sorted(statistics.examples.items(), key=lambda item: (-rejected.get(item[0], 0), item[0])):
        count = format_count(rejected.get(reason, len(examples)), "row")
        html += f'<h3 class="reason">{escape(reason)} · {count}</h3>'
        html += render_cards({f"{example.location}: {example.detail}": example.text for example in examples})
    return {
        "Lengths": plot_bars(lengths, x="kept rows", caption="Total length of the messages of a row, in characters."),
        "Languages": plot_bars(languages, x="kept rows", caption=caption) if languages else "",
        "Examples of rejected rows": html,
    }


def _render_files(sources: Sequence[Source], quarantined: int, statistics: CurationStatistics) -> dict[str, str]:
    """Return the sections on files. Files with the same name are counted together, as in rejected.parquet."""
    table = ""
    if statistics.unread:
        records = [[record.file, record.line, record.reason] for record in statistics.unread]
        note = f"quarantine.jsonl lists {format_count(quarantined, 'quarantined record')} in total."
        table = render_table(["file", "line", "reason"], records) + render_paragraph(note, "soft")
    sizes: Counter[str] = Counter()
    for source in sources:
        sizes[source.name] += source.bytes
    lines, kept = [], sum(results[KEPT] for results in statistics.by_source.values())
    for name in {**sizes, **statistics.by_source}:
        results = statistics.by_source.get(name, Counter())
        share = f"{results[KEPT] / max(1, kept):.1%}"
        lines.append(
            [name, results.total(), results[KEPT], share, results[REJECTED], results[QUARANTINED], sizes.get(name)]
        )
    header = ["file", "rows", "kept", "share of kept", "rejected", QUARANTINED, "bytes"]
    digests = [[source.name, source.sha256] for source in sources]
    return {
        "Quarantined records": table,
        "Sources": _render_first_files(header, lines),
        "Source digests": _render_first_files(["file", "sha256"], digests),
    }


def _render_first_files(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    table = render_table(header, lines[:MAX_SHOWN_FILES])
    if len(lines) > MAX_SHOWN_FILES:
        note = f"The table shows the first {MAX_SHOWN_FILES} of {len(lines):,} files. manifest.json lists all files."
        table += render_paragraph(note, "soft")
    return table


def _rank(counts: Mapping[str, int]) -> dict[str, int]:
    """Sort counts in descending order, and equal counts by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
