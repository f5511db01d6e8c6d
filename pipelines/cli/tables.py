"""Tables of dataset versions as text: wrapped to the width of a terminal, unwrapped in a file or a pipe."""

from __future__ import annotations

import io
import itertools
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.common.runtime.counts import format_count

if TYPE_CHECKING:
    from rich.table import Table

    from components.data_versioning.stage import Entry
    from pipelines.provenance.erasure_search import ErasureReport

UNWRAPPED_COLUMNS = 10_000
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_COLUMNS = 24
MAX_EXAMPLES = 5  # ids or files of one kind
CHANGE_KINDS = ("before", "after", "added", "removed", "changed", "moved in", "moved out", "kept")
NUMERIC_COLUMNS = ("rows", "bytes", "items", "+/−", *CHANGE_KINDS)


def render(*parts: Table | str) -> list[str]:
    """Render tables and texts as lines."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNWRAPPED_COLUMNS
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return [line.rstrip() for line in buffer.getvalue().rstrip("\n").split("\n")]


def build_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a plain table; numeric columns are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMERIC_COLUMNS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    return table


def format_curve(values: Sequence[float]) -> str:
    """Format a series as block characters and its last value, such as "█▅▃▁ 1.204"; "" for fewer than two values."""
    if len(values) < 2:
        return ""
    count = min(len(values), CURVE_COLUMNS)
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, scale = min(means), (max(means) - min(means)) or 1.0
    blocks = "".join(BLOCKS[round((mean - low) / scale * (len(BLOCKS) - 1))] for mean in means)
    return f"{blocks} {values[-1]:.4g}"


def format_history(name: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the result of `tuneline registry history`: one line per move of an alias of the model `name`."""
    if not entries:
        return [f"{name} has no recorded history"]
    rows = []
    for entry in entries:
        forced = f" [forced despite: {entry['forced']}]" if entry["forced"] else ""
        is_done = entry["state"] == "done"
        state = "" if is_done else f" [{entry['state']}: {entry['note'] or 'interrupted or in progress'}]"
        moved = [entry[key] or "–" for key in ("kind", "alias", "from", "to", "by")]
        rows.append((str(entry["number"]), entry["at"], *moved, f"{entry['reason']}{forced}{state}"))
    return render(build_table(("entry", "time", "kind", "alias", "from", "to", "user", "reason"), rows))


def format_list(entries: Sequence[Entry]) -> list[str]:
    """Format the result of `tuneline data list`."""
    if not entries:
        return ["no published revisions"]
    rows = []
    for entry in entries:
        kept = entry.rows.get("kept", sum(entry.splits.values()) if entry.splits else "?")
        splits = (
            f"{entry.splits[name]:,}" if name in entry.splits else "–" for name in ("train", "validation", "test")
        )
        message = entry.message.partition("\n")[0]
        tags = _format_tags(entry.tag, entry.tags)
        rows.append((tags, _format_date(entry.date), entry.author, kept, " / ".join(splits), message))
    return render(build_table(["revision", "date", "author", "rows", "train/validation/test", "message"], rows))


def _format_tags(tag: str, others: Sequence[str]) -> str:
    return f"{tag} ({', '.join(others)})" if others else tag


def _format_date(date: str) -> str:
    return date[:16].replace("T", " ")


def format_revision(revision: Mapping[str, Any]) -> list[str]:
    """Format the result of `tuneline data show`."""
    fields = {
        "revision": f"{_format_tags(revision['tag'], revision['tags'])}, commit {revision['rev'][:12]}",
        "published": f"{_format_date(revision['date'])} by {revision['author']}",
        "message": revision["message"],
        "content": revision["content_sha256"],
        "repository": revision["repo"],
        "remote": revision["remote"],
    }
    width = max(map(len, fields))
    lines = [f"{name:<{width}}  {value}" for name, value in fields.items() if value or name != "message"]
    tables = []
    if rows := revision["rows"]:
        counts = [("in", rows.get("in", "")), *((f"kept in {name}", n) for name, n in revision["splits"].items())]
        rejected = sorted(rows.get("rejected", {}).items(), key=lambda reason: -reason[1])
        counts += [(f"rejected: {reason}", n) for reason, n in rejected]
        tables.append(build_table(["outcome", "rows"], [*counts, ("quarantined", rows.get("quarantined", 0))]))
    if revision["inputs"]:
        inputs = [(one["uri"], one["kind"], one["content_sha256"][:12]) for one in revision["inputs"]]
        tables.append(build_table(["input", "kind", "sha256"], inputs))
    files = [(file["path"], file["bytes"], file["sha256"][:12]) for file in revision["files"]]
    return [*lines, *render(*tables, build_table(["file", "bytes", "sha256"], files))]


def format_diff(diff: Mapping[str, Any]) -> list[str]:
    """Format the result of `tuneline data diff`."""
    rows = diff["rows"]
    if diff["from"] == diff["to"] or not any(rows[kind] for kind in ("added", "removed", "changed", "moved")):
        head = f"{diff['from']} and {diff['to']} contain the same {format_count(rows['after'], 'row')}"
    else:
        counts = ", ".join(f"{rows[kind]:,} {kind}" for kind in ("added", "removed", "changed", "moved", "kept"))
        head = f"{diff['from']} → {diff['to']}: {rows['before']:,} → {rows['after']:,} rows: {counts}"
    splits = diff["splits"].items()
    by_split = [(name, *(split[kind.replace(" ", "_")] for kind in CHANGE_KINDS)) for name, split in splits]
    tables = [build_table(["split", *CHANGE_KINDS], by_split)]
    if diff["moved"]:
        moves = [
            (f"{move['from']} → {move['to']}", move["rows"], _format_examples(move["examples"], move["rows"]))
            for move in diff["moved"]
        ]
        tables.append(build_table(["moved", "rows", "examples"], moves))
    changes = [
        (f"{kind} in {name}", split[kind], _format_examples(split["examples"][kind], split[kind]))
        for name, split in splits
        for kind in ("added", "removed", "changed")
        if split[kind]
    ]
    if changes:
        tables.append(build_table(["change", "rows", "examples"], changes))
    reasons = [*diff["reasons"].items(), ("(quarantined)", diff["quarantined"])]
    rejected = [(reason, n["before"], n["after"], f"{n['after'] - n['before']:+,}") for reason, n in reasons]
    return [head, *render(*tables, build_table(["rejected as", "before", "after", "+/−"], rejected))]


def _format_examples(examples: Sequence[str], count: int) -> str:
    return ", ".join(examples[:MAX_EXAMPLES]) + (" …" if count > MAX_EXAMPLES else "")


def format_search(report: ErasureReport) -> list[str]:
    """Format the result of `tuneline data find`."""
    searched = report.searched
    contents = format_count(searched["contents"], "distinct content")
    head = f"searched {format_count(searched['revisions'], 'revision')} ({contents})"
    if report.has_matches:
        counts = {"revision": report.revisions, "model": report.models, "package": report.packages}
        if report.extracts:
            counts["extract"] = report.extracts
        verdict = "found: " + ", ".join(format_count(len(items), kind) for kind, items in counts.items())
    else:
        verdict = "not found" if report.is_complete else "not found in the searched part"
    tables = _build_search_tables(report)
    lines = [head, verdict, *(render(*tables) if tables else [])]
    if not report.is_complete:
        lines += ["", f"INCOMPLETE RESULT: {format_count(len(report.not_searched), 'item')} could not be searched"]
        for gap in report.not_searched:
            lines += [f"  {gap['what']}: {gap['why']}", f"    {gap['hint']}"]
    return lines


def _build_search_tables(report: ErasureReport) -> list[Table]:
    """Build the tables with rows; copies of a revision in the store, which list no matches, come last."""
    datasets = [*((one["tag"], one) for one in report.revisions), *((one["uri"], one) for one in report.datasets)]
    matches: list[tuple[object, ...]] = [
        (
            where,
            match["table"],
            match["rows"],
            _format_examples(match["ids"] or match["at"], match["rows"]),
            _format_examples(match["sources"], len(match["sources"])),
        )
        for where, dataset in datasets
        for match in dataset["places"]
    ]
    matches += [(where, "(same as its revision)", "", "", "") for where, dataset in datasets if not dataset["places"]]
    models = [(one["sha256"][:12], _format_versions(one["versions"]), one["uri"]) for one in report.models]
    packages = [
        (one["sha256"][:12], _format_versions(one["versions"]), "deployed" if one["in_service"] else "", one["uri"])
        for one in report.packages
    ]
    tables: list[tuple[list[str], Sequence[Sequence[object]]]] = [
        (["dataset", "table", "rows", "ids", "source"], matches),
        (
            ["extract", "rows", "database", "files"],
            [
                (one["sha256"][:12], "" if one["rows"] is None else one["rows"], one["address"], one["uri"])
                for one in report.extracts
            ],
        ),
        (["model", "registered as", "files"], models),
        (["evaluation", "files"], [(one["sha256"][:12], one["uri"]) for one in report.evaluations]),
        (["package", "version", "", "files"], packages),
        (
            ["MLflow run", "name", "experiment"],
            [(one["run_id"], one["name"], one["experiment"]) for one in report.runs],
        ),
    ]
    return [build_table(columns, rows) for columns, rows in tables if rows]


def _format_versions(versions: Sequence[Mapping[str, Any]]) -> str:
    names = (
        f"{version['name']} {version['version']}" + "".join(f" @{alias}" for alias in version["aliases"])
        for version in versions
    )
    return ", ".join(names) or "—"
