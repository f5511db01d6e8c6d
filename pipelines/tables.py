"""Dataset versions as people read them: tables on a terminal, folded to its width; in a file or a pipe as wide as they are."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.data_versioning.stage import Entry
    from pipelines.erasure import Answer

UNFOLDED = 10_000  # columns
SHOWN = 5  # ids or files of one kind
COUNTED = ("rows", "bytes", "things", "before", "after", "added", "removed", "changed", "moved in", "moved out", "kept", "+/−")


def lines_of(*parts: Any) -> list[str]:
    """Rich tables and texts as lines."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNFOLDED
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.rstrip("\n").split("\n")]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> Any:
    """A plain table; numbers stand right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in COUNTED else "left", overflow="fold")
    for row in rows:
        made.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    return made


def listed(entries: Sequence[Entry]) -> list[str]:
    """`tuneline data list`."""
    if not entries:
        return ["nothing is published yet"]
    rows = [(_tags(e.tag, e.tags), _moment(e.date), e.author, _kept(e), _splits(e.splits), _first_line(e.message)) for e in entries]
    return lines_of(table(["revision", "date", "author", "rows", "train/validation/test", "message"], rows))


def _tags(tag: str, others: Sequence[str]) -> str:
    return f"{tag} ({', '.join(others)})" if others else tag


def _moment(date: str) -> str:
    return date[:16].replace("T", " ")


def _kept(entry: Entry) -> int | str:
    kept = entry.rows.get("kept", sum(entry.splits.values()) if entry.splits else None)
    return kept if isinstance(kept, int) else "?"


def _splits(splits: dict[str, int]) -> str:
    return " / ".join(f"{splits[name]:,}" if name in splits else "–" for name in ("train", "validation", "test"))


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0]


def shown(found: dict[str, Any]) -> list[str]:
    """`tuneline data show`."""
    facts = [
        ("revision", f"{_tags(found['tag'], found['tags'])}, commit {found['rev'][:12]}"),
        ("published", f"{_moment(found['date'])} by {found['author']}"),
        *([("message", found["message"])] if found["message"] else []),
        ("content", found["content_sha256"]),
        ("repository", found["repo"]),
        ("remote", found["remote"]),
    ]
    width = max(len(name) for name, _ in facts)
    return [*(f"{name:<{width}}  {value}" for name, value in facts), *lines_of(*_held(found))]


def _held(found: dict[str, Any]) -> list[Any]:
    rows, parts = found["rows"], []
    if rows:
        counts = [("in", rows.get("in", "")), *((f"kept in {name}", n) for name, n in found["splits"].items())]
        counts += [(f"rejected: {reason}", n) for reason, n in sorted(rows.get("rejected", {}).items(), key=lambda one: -one[1])]
        parts.append(table(["what became of the rows", "rows"], [*counts, ("quarantined", rows.get("quarantined", 0))]))
    if found["inputs"]:
        parts.append(
            table(["made from", "kind", "sha256"], [(one["uri"], one["kind"], one["content_sha256"][:12]) for one in found["inputs"]])
        )
    parts.append(table(["file", "bytes", "sha256"], [(one["path"], one["bytes"], one["sha256"][:12]) for one in found["files"]]))
    return parts


KINDS = ("before", "after", "added", "removed", "changed", "moved in", "moved out", "kept")


def compared(found: dict[str, Any]) -> list[str]:
    """`tuneline data diff`."""
    rows = found["rows"]
    if found["from"] == found["to"] or not any(rows[kind] for kind in ("added", "removed", "changed", "moved")):
        head = f"{found['from']} and {found['to']} hold the same {rows['after']:,} rows"
    else:
        told = ", ".join(f"{rows[kind]:,} {kind}" for kind in ("added", "removed", "changed", "moved", "kept"))
        head = f"{found['from']} → {found['to']}: {rows['before']:,} → {rows['after']:,} rows: {told}"
    by_split = [(name, *(split[kind.replace(" ", "_")] for kind in KINDS)) for name, split in found["splits"].items()]
    parts = [table(["split", *KINDS], by_split)]
    if found["moved"]:
        moves = [(f"{one['from']} → {one['to']}", one["rows"], _some(one["examples"], one["rows"])) for one in found["moved"]]
        parts.append(table(["moved", "rows", "for example"], moves))
    changes = [(kind, n, _some(ids, n)) for kind, n, ids in _examples(found)]
    parts += [table(["rows that were", "rows", "for example"], changes)] if changes else []
    dropped = [(why, n["before"], n["after"], f"{n['after'] - n['before']:+,}") for why, n in found["reasons"].items()]
    read = found["quarantined"]
    dropped.append(("(could not be read)", read["before"], read["after"], f"{read['after'] - read['before']:+,}"))
    return [head, *lines_of(*parts, table(["dropped as", "before", "after", "+/−"], dropped))]


def _examples(found: dict[str, Any]) -> list[tuple[str, int, list[str]]]:
    kinds = ("added", "removed", "changed")
    told = [(f"{kind} in {name}", split[kind], split["examples"][kind]) for name, split in found["splits"].items() for kind in kinds]
    return [one for one in told if one[1]]


def _some(ids: Sequence[str], there_are: int) -> str:
    return ", ".join(ids[:SHOWN]) + (" …" if there_are > SHOWN else "")


def answered(answer: Answer) -> list[str]:
    """`tuneline data find`."""
    searched = answer.searched
    head = f"searched {searched['revisions']:,} revisions ({searched['contents']:,} different contents)"
    parts: list[Any] = []
    if answer.revisions or answer.datasets:
        parts.append(table(["where", "table", "rows", "ids", "read from"], _places(answer)))
    if answer.models:
        models = [(one["sha256"][:12], _versions(one["versions"]), one["uri"]) for one in answer.models]
        parts.append(table(["model", "registered as", "files"], models))
    if answer.evaluations:
        parts.append(table(["evaluation", "files"], [(one["sha256"][:12], one["uri"]) for one in answer.evaluations]))
    if answer.packages:
        packages = [
            (p["sha256"][:12], _versions(p["versions"]), "in service" if p["in_service"] else "", p["uri"]) for p in answer.packages
        ]
        parts.append(table(["package", "of", "", "files"], packages))
    if answer.runs:
        parts.append(table(["MLflow run", "name", "experiment"], [(r["run_id"], r["name"], r["experiment"]) for r in answer.runs]))
    body = lines_of(*parts) if parts else []
    return [head, _verdict(answer), *body, *_gaps(answer)]


def _verdict(answer: Answer) -> str:
    if not answer.found:
        return "not found" if answer.complete else "not found in what could be searched"
    counts = ((len(answer.revisions), "revision"), (len(answer.models), "model"), (len(answer.packages), "package"))
    return "found: " + ", ".join(f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in counts)


def _places(answer: Answer) -> list[tuple[Any, ...]]:
    held = [(one["tag"], one["places"]) for one in answer.revisions]
    held += [(one["uri"], one["places"]) for one in answer.datasets]
    told: list[tuple[Any, ...]] = [
        (where, p["table"], p["rows"], _some(p["ids"] or p["at"], p["rows"]), _some(p["sources"], len(p["sources"])))
        for where, places in held
        for p in places
    ]
    return told + [(one["uri"], "(as in its revision)", "", "", "") for one in answer.datasets if not one["places"]]


def _versions(versions: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{v['name']} {v['version']}" + (f" @{' @'.join(v['aliases'])}" if v["aliases"] else "") for v in versions) or "—"


def _gaps(answer: Answer) -> list[str]:
    if answer.complete:
        return []
    told = [line for gap in answer.not_searched for line in (f"  {gap['what']}: {gap['why']}", f"    {gap['hint']}")]
    return ["", f"THIS ANSWER IS NOT COMPLETE: {len(answer.not_searched):,} could not be searched", *told]


PAGES: dict[str, Callable[[Any], list[str]]] = {"listed": listed, "shown": shown, "compared": compared, "found": answered}
