"""report.html: what went in, what was kept, what was dropped and why; for whoever answers for the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from components.common import report
from components.data_curation import contamination, instructions, quality
from components.data_curation.facts import KEPT, LENGTHS, LONGER, QUARANTINED, REJECTED, Facts, Sample
from components.data_curation.sources import Source
from components.data_curation.tokens import TokenStatistics

SHOWN = 40  # files of the sources' table
LANGUAGES = 12  # shown one by one
UNREADABLE = "unreadable"
BLUE, GREEN, ORANGE, GREY = "#4472b0", "#2f8f5b", "#c9772b", "#8a93a3"
# What a reason is about, where its own name does not say it: the groups of the flow.
DUPLICATES, LEAKED, SIZE = "duplicates", "evaluation items", "empty, short or long"
GROUPS = {
    "language": "language",
    "personal_data": "personal data",
    contamination.REASON: LEAKED,
    **{reason: "web heuristics" for _, reason, _ in quality.RULES},
    **{reason: "conversations" for _, reason, _ in instructions.RULES},
    "empty_answer": SIZE,
}
REPEATS = {
    "exact_duplicate": "says the same as a row that is kept, but for case and spaces",
    "near_duplicate": "says nearly the same as a row that is kept",
    "near_duplicate_across_splits": "resembles published rows of two splits, which it would join",
}
DONE = {"redact": "replaced by a placeholder", "drop": "the row was dropped", "keep": "counted and left as it is"}


def render(summary: Mapping[str, Any], sources: Sequence[Source], facts: Facts) -> str:
    """The report as one HTML page. `summary` is the manifest's: rows in, kept, quarantined and rejected by reason; splits; rows_kind."""
    rows = summary["rows"]
    sections = {
        "At a glance": _glance(summary, facts) + "".join(report.paragraph(note) for note in facts.notes),
        "What became of the rows": _flow(summary),
        "Why rows were dropped": _reasons(rows["rejected"]),
        "Duplicates": _duplicates(rows),
        "Evaluation sets": _sets(facts),
        "Personal data and secrets": _personal(facts),
        "Splits": _splits(summary["splits"], rows["kept"]),
        "Tokens": _tokens(facts.tokens) if facts.tokens else "",
        "Lengths": _lengths(facts),
        "Languages": _languages(facts),
        "Examples of dropped rows": _examples(facts.samples, rows["rejected"]),
        "Unreadable places": _unread(facts, rows["quarantined"]),
        "Sources": _sources(sources, facts),
        "Digests of the sources": _digests(sources),
    }
    told = f"{rows['kept']:,} of {rows['in']:,} rows kept; kind of rows: {summary['rows_kind']}"
    return report.page("Data curation", told, sections)


def _glance(summary: Mapping[str, Any], facts: Facts) -> str:
    rows = summary["rows"]
    figures: dict[str, Any] = {"rows in": rows["in"], "kept": rows["kept"], "dropped": sum(rows["rejected"].values())}
    if rows["quarantined"]:
        figures[UNREADABLE] = rows["quarantined"]
    if facts.tokens:
        figures["tokens, about" if facts.tokens.estimated else "tokens"] = facts.tokens.total
    return report.tiles(figures)


def _flow(summary: Mapping[str, Any]) -> str:
    """From what was read, over kept rows and groups of reasons, to the splits."""
    rows, splits = summary["rows"], {name: count for name, count in summary["splits"].items() if count}
    fates = {KEPT: rows["kept"], **_grouped(rows["rejected"]), UNREADABLE: rows["quarantined"]}
    fates = {name: count for name, count in fates.items() if count}
    links = [("read", name, count) for name, count in fates.items()] + [(KEPT, name, count) for name, count in splits.items()]
    colours = {"read": BLUE, **dict.fromkeys(fates, ORANGE), UNREADABLE: GREY, KEPT: GREEN, **dict.fromkeys(splits, GREEN)}
    note = "Every row that went in is counted once: it was kept, dropped for one reason, or unreadable."
    return report.flow_plot([{"read": rows["in"]}, fates, splits], links, colours, caption=note)


def _grouped(rejected: Mapping[str, int]) -> dict[str, int]:
    """Dropped rows by what they were dropped for, the most first."""
    groups: dict[str, int] = {}
    for reason, count in rejected.items():
        name = GROUPS.get(reason) or (DUPLICATES if "duplicate" in reason else SIZE)
        groups[name] = groups.get(name, 0) + count
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def _reasons(rejected: Mapping[str, int]) -> str:
    if not rejected:
        return report.paragraph("No row was dropped.")
    most_first = dict(sorted(rejected.items(), key=lambda item: (-item[1], item[0])))
    note = "rejected.parquet holds every dropped row with its reason and what was measured."
    return report.bar_plot(most_first, x="rows", caption=note, colours=dict.fromkeys(rejected, ORANGE))


def _duplicates(rows: Mapping[str, Any]) -> str:
    found = {reason: count for reason, count in rows["rejected"].items() if reason not in GROUPS and "duplicate" in reason}
    if not found:
        return report.paragraph("No row repeats another.")
    lines = [[reason, REPEATS.get(reason, ""), count, f"{count / rows['in']:.1%}"] for reason, count in found.items()]
    return report.table(["reason", "what it means", "rows", "of all"], lines)


def _sets(facts: Facts) -> str:
    if not facts.sets:
        return report.paragraph("None was named in data_curation.decontamination.sets, so rows that hold their items were not looked for.")
    lines: list[list[Any]] = [[name, facts.leaked[name], counts["items"], counts["too_short"]] for name, counts in facts.sets.items()]
    lines.sort(key=lambda line: -line[1])
    note = (
        "A row that shares an n-gram of words with an item was removed, and names it. Items of few words, or of common ones, are not found."
    )
    return report.table(["evaluation set", "rows removed", "items", "not looked for"], lines) + report.paragraph(note, "soft")


def _personal(facts: Facts) -> str:
    if not facts.personal:
        return report.paragraph("None was found.")
    kinds = sorted(facts.personal.items(), key=lambda item: (-item[1].found, item[0]))
    lines = [[kind.replace("_", " "), one.found, one.rows, DONE.get(one.action, one.action)] for kind, one in kinds]
    note = "Counted in all rows that were read, dropped ones too. What was found is never printed here."
    return report.table(["kind", "found", "in rows", "what was done"], lines) + report.paragraph(note, "soft")


def _splits(splits: Mapping[str, int], kept: int) -> str:
    note = "Rows with equal or similar text, or with equal or similar answers, always lie in the same split."
    return report.table(["split", "rows", "share"], [[n, c, f"{c / kept:.1%}"] for n, c in splits.items()]) + report.paragraph(note, "soft")


def _tokens(tokens: TokenStatistics) -> str:
    """Figures, histogram and packing, against the training length."""
    figures: dict[str, Any] = {"tokens a row, mean": tokens.mean, "half of the rows up to": tokens.percentiles[50]}
    figures |= {f"{p} % up to": tokens.percentiles[p] for p in tokens.percentiles if p != 50} | {"longest": tokens.longest}
    return report.tiles(figures) + _token_bars(tokens) + report.table(["", ""], _fit(tokens)) + report.paragraph(_counted(tokens), "soft")


def _token_bars(tokens: TokenStatistics) -> str:
    tops = sorted({*(1 << n for n in range(40)), *tokens.histogram, tokens.max_length})
    shown = tops[tops.index(min(tokens.histogram)) : tops.index(max(tokens.histogram)) + 1]
    names = {top: f"{max((end for end in tops if end < top), default=0) + 1:,}–{top:,}" for top in shown}
    bars = {name: tokens.histogram.get(top, 0) for top, name in names.items()}
    cut = {name: ORANGE for top, name in names.items() if top > tokens.max_length}
    length = f"the training length of {tokens.max_length:,}"
    note = f"Rows by their length in tokens. {f'Orange: longer than {length}, and cut there.' if cut else f'None is longer than {length}.'}"
    return report.bar_plot(bars, x="rows", caption=note, colours=cut)


def _fit(tokens: TokenStatistics) -> list[list[str]]:
    return [
        ["training length", f"{tokens.max_length:,} tokens"],
        ["rows that are cut there", f"{tokens.truncated:.1%}"],
        ["tokens lost to it", f"{tokens.lost:.1%}"],
        ["filled, one row a sequence", f"{tokens.filled_unpacked:.1%}; the rest is padding"],
        ["filled, rows packed", f"{tokens.filled:.1%}, in {tokens.sequences:,} sequences instead of {tokens.measured:,}"],
        ["rows the chat template refuses", f"{tokens.refused:,}"],
    ]


def _counted(tokens: TokenStatistics) -> str:
    rows = f"Estimated from {tokens.looked_at:,} of {tokens.rows:,} rows" if tokens.estimated else f"Counted in all {tokens.rows:,} rows"
    left_out = tokens.looked_at - tokens.measured - tokens.refused
    without = f", without {left_out:,} answers labelled bad," if left_out else ""
    packing = "Packing is best-fit-decreasing: no row is cut in two."
    return f"{rows}{without} with the chat template and tokenizer of {tokens.model}. {packing}"


def _lengths(facts: Facts) -> str:
    bars = {f"up to {top:,}": facts.lengths[top] for top in LENGTHS} | {f"more than {LENGTHS[-1]:,}": facts.lengths[LONGER]}
    return report.bar_plot(bars, x="kept rows", caption="Characters of all messages of a row.")


def _languages(facts: Facts) -> str:
    if not facts.languages:
        return ""
    ranked = sorted(facts.languages.items(), key=lambda item: (-item[1], item[0]))
    bars = {"undetermined" if code == "und" else code: count for code, count in ranked[:LANGUAGES]}
    if rest := ranked[LANGUAGES:]:
        bars[f"{len(rest)} others"] = sum(count for _, count in rest)
    return report.bar_plot(bars, x="kept rows", caption="ISO 639 codes, by fastText's lid.176. Undetermined: too little text, or code.")


def _examples(samples: Mapping[str, Sequence[Sample]], rejected: Mapping[str, int]) -> str:
    """The first dropped rows of every reason, as cards under it, the most frequent reason first."""
    return "".join(
        f'<h3 class="asked">{escape(reason)} · {rejected.get(reason, len(some)):,} rows</h3>'
        + report.cards({f"{one.where}: {one.detail}": one.text for one in some})
        for reason, some in sorted(samples.items(), key=lambda item: (-rejected.get(item[0], 0), item[0]))
    )


def _unread(facts: Facts, quarantined: int) -> str:
    if not facts.unread:
        return ""
    table = report.table(["file", "line", "why"], [[one.file, one.line, one.why] for one in facts.unread])
    return table + report.paragraph(f"{quarantined:,} in all; quarantine.jsonl lists every one.", "soft")


def _sources(sources: Sequence[Source], facts: Facts) -> str:
    """What became of each file's rows; files of one name in several folders count together, as rejected.parquet names them."""
    sizes: dict[str, int] = {}
    for source in sources:
        sizes[source.name] = sizes.get(source.name, 0) + source.bytes
    fates = {name: facts.by_source.get(name, Counter()) for name in {**sizes, **facts.by_source}}
    lines = [[name, fate.total(), fate[KEPT], fate[REJECTED], fate[QUARANTINED], sizes.get(name)] for name, fate in fates.items()]
    return report.table(["file", "rows", "kept", "dropped", UNREADABLE, "bytes"], lines[:SHOWN]) + _more(len(lines))


def _digests(sources: Sequence[Source]) -> str:
    return report.table(["file", "sha256"], [[source.name, source.sha256] for source in sources[:SHOWN]]) + _more(len(sources))


def _more(files: int) -> str:
    return report.paragraph(f"The first {SHOWN} of {files:,}; manifest.json lists them all.", "soft") if files > SHOWN else ""
