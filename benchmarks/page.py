"""Write docs/reference/benchmarks-curation.md, which is not edited by hand, and provide tables and facts of the other pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from typing import Any

GIB, MIB = 1024**3, 1024**2
FAR = (100_000_000, 1_000_000_000)  # rows that the fits are extrapolated to
OURS = "tuneline, near duplicates only"
GOALS = {"datatrove": 10, "text-dedup": 5}  # minimum CPU time of the peer, as a multiple of tuneline's
SPEEDUP = 1.6  # of the default curation's rows per CPU second, over the baseline
RECALL, PRECISION, SPEED, MEMORY = 0.97, 0.95, 2_000, 6 * GIB

HEAD = """# Data curation, measured

`make bench-curation` writes this page in about an hour. CPU seconds cover all processes of a command, including imports. Memory
is the highest total of these processes, sampled ten times a second. Sections were measured at different commits.
"""

TITLES = (
    "## The corpus",
    "## Near duplicates, compared with other tools",
    "## Near duplicates in public text",
    "## Default curation, compared with an earlier commit",
    "## The whole curation",
    "## Rows that share a long template",
    "## A million rows and extrapolation",
)

CORPUS = """## The corpus

The corpus contains {documents:,} documents of {mean:.0f} characters on average, in random order, built from Python's docstrings and language
reference. Each sentence joins the beginning of one sentence to the end of another, so that documents are similar only if one is a copy of the other.
{near:.0%} of the documents are edited copies with a similarity of 0.50, 0.55, … or 0.95, equally often; {equal:.0%} are equal to another
document, and {rewritten:.0%} differ from another document only in case and white space. The same Python version gives the same bytes, with the sha256
`{sha256}`.

Similarity is the Jaccard similarity of the sets of word 5-grams. Words are lower-case runs of letters, digits and
underscores. An exact comparison found all {pairs:,} pairs with a similarity of at least 0.7 (true pairs); {high:,} of them have at least 0.8.
Keeping one document of each connected group would remove {surplus:,} documents.
"""

MEASURES = """- **recall**: share of the true pairs with at least one document removed; **recall ≥ 0.8**: the same for pairs with a similarity of at least 0.8
- **precision**: share of the removed documents that are in a true pair
- **far**: share of the removed documents without a true partner among the kept documents. If a is similar to b and b to c,
  most tools keep only a; tuneline removes a row only if a kept row is similar to it

All tools read the same JSONL file and use word 5-grams and 128 permutations. Some differences result from how the tools split words.
"""

PUBLIC = """## Near duplicates in public text

{about}

The corpus contains {documents:,} documents of {mean:.0f} characters on average; its sha256 is `{sha256}`. An exact comparison found {pairs:,} true pairs;
{high:,} of them have a similarity of at least 0.8. Keeping one document of each connected group would remove {surplus:,} documents. Columns are as above.
"""

CONSTANT_COST = """Small datasets gain less because of constant costs: imports, the digest of the code, the engine's process, charts and the
tokenizer.
"""

BASELINE = """## Default curation, compared with an earlier commit

CPU seconds are those of `tuneline curate` without a configuration: the median of the alternating runs of both checkouts.
Runs per checkout and source: {repeats}. The baseline is commit `{baseline}`. Memory is the highest peak (PSS). The defaults of the checkouts may differ.
"""


MACHINES = (24, 64, 512)  # GiB
CORES = 64
ENTRY = 16  # bytes: a 64-bit bucket and a 64-bit row

ASKED = """Consequences:

- Memory: {fits}. `data_curation.engine: ray` distributes the preparation of rows and the search for candidates. One machine compares the
  candidates exactly and assigns the splits; its memory follows the fit above.
- Divide a corpus that is too large for one machine by source or language, with one `data_versioning.name` per part. A row that occurs in two
  parts stays in both. Curating the corpus in several rounds does not help, because rows of earlier versions cost as much as new rows.
- CPU time is divided among cores, because chunks of rows are independent: {cores} cores would take {durations}.
- Shared disk: every row has {count} entries of {entry} bytes (bucket and row), {bands} in total for these sizes. A worker processes one band at a time, so
  {count} workers can run at once.
"""


def markdown(results: dict[str, Any], previous: str = "") -> str:
    """Return the page: the measured parts, and the sections of the previous page for the others."""
    writers = {
        "fuzzy": _fuzzy,
        "public": _public,
        "baseline": _baseline,
        "curation": _curation,
        "template": _template,
        "scale": _scale,
    }
    sections = _split_sections(previous)
    for part, write in writers.items():
        if part in results:
            sections |= _split_sections(write(results[part]))
    ordered = sorted(sections, key=lambda title: TITLES.index(title) if title in TITLES else len(TITLES))
    return "\n".join([HEAD, *(sections[title] + "\n" for title in ordered)]).rstrip() + "\n"


def _split_sections(text: str) -> dict[str, str]:
    """Return the sections of a page by title."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.rstrip("\n") for part in parts if part.startswith("## ")}


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        [cell.replace("|", "\\|").replace("\n", " ") for cell in cells] for cells in [head, ["---"] * len(head), *rows]
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def made_with(part: dict[str, Any]) -> str:
    machine = f"{part['processor']}, {part['cores']} cores, {part['memory'] / GIB:.0f} GiB, Python {part['python']}"
    return f"```text\n{part['command']}\n```\n\nMeasured at commit `{part['commit']}` on {machine}; load average {part['load']} at the start.\n"


def _public(part: dict[str, Any]) -> str:
    made = part["corpus"]
    described = PUBLIC.format(**made, **part["truth"], mean=made["characters"] / made["documents"], about=part["about"])
    return "\n".join([described, made_with(part), _compare_tools(part)])


def _baseline(part: dict[str, Any]) -> str:
    runs = [run for run in part["runs"] if "rows" in run]
    rows, goals = list[list[str]](), list[str]()
    for source in dict.fromkeys(run["source"] for run in runs):
        cpu, memory = dict[str, float](), dict[str, float]()
        for name in part["commits"]:
            measured = [run for run in runs if (run["source"], run["checkout"]) == (source, name)]
            cpu[name] = median(run["cost"]["cpu"] for run in measured)
            memory[name] = max(run["cost"]["pss"] for run in measured)
            count, kept = measured[0]["rows"]["in"], measured[0]["rows"]["kept"]
            ratio = f"{cpu['baseline'] / cpu[name]:.2f}"
            figures = [f"{count:,}", f"{kept:,}", f"{cpu[name]:.1f}", f"{count / cpu[name]:,.0f}"]
            rows.append([source, name, *figures, ratio, f"{memory[name] / MIB:,.0f} MiB"])
        speedup = cpu["baseline"] / cpu["this checkout"]
        goals.append(f"{source} {met(speedup >= SPEEDUP)} ({speedup:.2f})")
    goal = f"Goal: {SPEEDUP} times the rows per CPU second of the baseline: {'; '.join(goals)}.\n"
    head = ["rows from", "commit", "rows", "kept", "CPU s", "rows per CPU s", "ratio", "peak memory"]
    repeats = max(1, len(runs) // max(1, len(rows)))
    described = BASELINE.format(repeats=repeats, baseline=part["commits"]["baseline"])
    failed = "".join(f"\n{run['name']} failed: {run['error']}\n" for run in part["runs"] if "error" in run)
    return "\n".join([described, made_with(part), table_of(head, rows) + failed, goal, CONSTANT_COST])


def _compare_tools(part: dict[str, Any]) -> str:
    """Return the table of costs and scores of all tools, and the errors of those that failed."""
    ours = next((tool["cost"]["cpu"] for tool in part["tools"] if tool["name"] == OURS and "cost" in tool), None)
    head = ["", "CPU s", "× tuneline", "wall s", "peak memory", "removed", "recall", "recall ≥ 0.8", "precision", "far"]
    failed = "".join(
        f"\n**{tool['name']}** was not measured: {tool['error']}\n" for tool in part["tools"] if "error" in tool
    )
    return table_of(head, [_tool(tool, ours) for tool in part["tools"] if "cost" in tool]) + failed


def _fuzzy(part: dict[str, Any]) -> str:
    from benchmarks import corpus

    made, truth = part["corpus"], part["truth"]
    described = CORPUS.format(
        **made,
        **truth,
        mean=made["characters"] / made["documents"],
        near=corpus.NEAR,
        equal=corpus.EQUAL,
        rewritten=corpus.REWRITTEN,
    )
    ours = next((tool["cost"]["cpu"] for tool in part["tools"] if tool["name"] == OURS and "cost" in tool), None)
    settings = table_of(
        ["", "version", "bands × rows", "settings"],
        [[t["name"], t["version"], t["bands"], t["flags"]] for t in part["tools"]],
    )
    return "\n".join(
        [
            described,
            "## Near duplicates, compared with other tools\n",
            made_with(part),
            _compare_tools(part),
            MEASURES,
            settings,
            _goals(part, ours),
        ]
    )


def _tool(tool: dict[str, Any], ours: float | None) -> list[str]:
    cost, score = tool["cost"], tool["score"]
    times = f"{cost['cpu'] / ours:.1f}" if ours else ""
    shares = [f"{score[name]:.3f}" for name in ("recall", "recall_high", "precision", "far")]
    return [
        tool["name"],
        f"{cost['cpu']:.1f}",
        times,
        f"{cost['wall']:.1f}",
        f"{cost['rss'] / MIB:,.0f} MiB",
        f"{score['removed']:,}",
        *shares,
    ]


def _goals(part: dict[str, Any], ours: float | None) -> str:
    """Return the goals and whether they are met."""
    lines = []
    for tool in part["tools"]:
        if "cost" not in tool:
            continue
        if tool["name"] == OURS:
            for name, goal in (("recall", RECALL), ("precision", PRECISION)):
                lines.append(
                    f"- {name} of at least {goal}: {met(tool['score'][name] >= goal)} ({tool['score'][name]:.3f})"
                )
        elif ours and tool["name"] in GOALS:
            times = tool["cost"]["cpu"] / ours
            lines.append(
                f"- at most 1/{GOALS[tool['name']]} of {tool['name']}'s CPU time: {met(times >= GOALS[tool['name']])} (1/{times:.1f})"
            )
    return "Goals:\n\n" + "\n".join(lines) + "\n"


def met(yes: bool) -> str:
    return "met" if yes else "**missed**"


def _curation(part: dict[str, Any]) -> str:
    head = ["settings", "CPU s", "documents per CPU second", "wall s", "peak memory", "kept", "dropped and quarantined"]
    table = table_of(head, [_run(run) for run in part["runs"]])
    made = part["corpus"]
    mean = made["characters"] / made["documents"]
    text = f"The benchmark processes {made['documents']:,} documents of the same kind, {mean:.0f} characters on average, from JSONL to the dataset's files.\n"
    goals = [
        f"Goal for the default: at least {SPEED:,} documents per CPU second: {met(made['documents'] / run['cost']['cpu'] >= SPEED)}.\n"
        for run in part["runs"][:1]
        if "rows" in run
    ]
    return "\n".join(["## The whole curation\n", made_with(part), text, table, *goals, _profile(part)])


def _run(run: dict[str, Any]) -> list[str]:
    cost = run["cost"]
    name = " ".join([run["name"], *(f"(`{setting}`)" for setting in run["settings"])])
    if "error" in run:
        return [name, f"failed: {run['error']}", "", "", "", "", ""]
    rows = run["rows"]
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in rows["rejected"].items())
    speed = f"{rows['in'] / cost['cpu']:,.0f}"
    return [
        *(
            name,
            f"{cost['cpu']:.1f}",
            speed,
            f"{cost['wall']:.1f}",
            f"{cost['pss'] / MIB:,.0f} MiB",
            f"{rows['kept']:,}",
        ),
        f"{dropped or 'none'}; {rows['quarantined']:,} quarantined",
    ]


def _profile(part: dict[str, Any]) -> str:
    """Return the CPU seconds by process and by module."""
    texts = []
    if parts := part["runs"][0]["cost"]["parts"]:
        texts.append("CPU seconds of the default by process, as sampled:\n")
        texts.append(
            table_of(
                ["process", "CPU s"],
                [[f"`{name}`", f"{seconds:.1f}"] for name, seconds in parts.items() if seconds >= 0.1],
            )
        )
    if profile := part["profile"]:
        whole = sum(profile.values())
        texts.append(
            "By module, including the overhead of cProfile; the time of a library is attributed to the module that calls it:\n"
        )
        rows = [
            [f"`{name}`", f"{seconds:.1f}", f"{seconds / whole:.0%}"]
            for name, seconds in profile.items()
            if seconds >= whole / 200
        ]
        texts.append(table_of(["module", "s", "share"], rows))
    return "\n".join(texts)


TEMPLATE = """## Rows that share a long template

Documents of 125 words share the first 100: any two have a similarity of 0.66, and thousands fall into the same bucket. In a
bucket of more than {crowd} rows, each row is compared only with the first row and with {near} neighbours. Every twentieth document
shares 9 more words with another and has a similarity of 0.77 to that document; **found** counts the pairs with one document removed.
"""


def _template(part: dict[str, Any]) -> str:
    from components.data_curation.engine import MAX_FULL_BUCKET_ROWS, NEIGHBOURHOOD_ROWS

    rows = [
        [
            *(
                f"{run['documents']:,}",
                f"{run['cost']['cpu']:.1f}",
                f"{run['cost']['cpu'] / run['documents'] * 1e6:,.0f} µs",
            ),
            *(f"{run['cost']['pss'] / MIB:,.0f} MiB", f"{run['cost']['disk'] / MIB:,.0f} MiB"),
            *(f"{run['found']:,} of {run['planted']:,}", f"{run['found'] / run['planted']:.3f}", f"{run['removed']:,}"),
        ]
        for run in part["runs"]
    ]
    head = ["rows", "CPU s", "per row", "peak memory (PSS)", "peak disk", "found", "recall", "removed"]
    return "\n".join(
        [TEMPLATE.format(crowd=MAX_FULL_BUCKET_ROWS, near=NEIGHBOURHOOD_ROWS), made_with(part), table_of(head, rows)]
    )


def _scale(part: dict[str, Any]) -> str:
    head = [
        "rows",
        "input",
        "CPU s",
        "rows per CPU second",
        "wall s",
        "peak memory (PSS)",
        "sum of RSS",
        "peak disk",
        "dataset",
        "kept",
    ]
    done = [run for run in part["runs"] if "rows" in run]
    table = table_of(head, [_sized(run) for run in done])
    failed = "".join(f"\n{run['documents']:,} rows failed: {run['error']}\n" for run in part["runs"] if "error" in run)
    goal = "".join(
        f"\nGoal: a million rows within {MEMORY / GIB:.0f} GiB: {met(run['cost']['pss'] <= MEMORY)}.\n"
        for run in done
        if run["documents"] == 1_000_000
    )
    return "\n".join(["## A million rows and extrapolation\n", made_with(part), table + failed + goal, _slopes(done)])


def _sized(run: dict[str, Any]) -> list[str]:
    cost, rows = run["cost"], run["rows"]
    return [
        *(
            f"{rows['in']:,}",
            f"{run['input'] / MIB:,.0f} MiB",
            f"{cost['cpu']:.0f}",
            f"{rows['in'] / cost['cpu']:,.0f}",
            f"{cost['wall']:.0f}",
        ),
        *(f"{cost[name] / MIB:,.0f} MiB" for name in ("pss", "rss", "disk")),
        *(f"{run['output'] / MIB:,.0f} MiB", f"{rows['kept']:,}"),
    ]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the line with the least squares through points."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x


def _slopes(runs: list[dict[str, Any]]) -> str:
    if len({run["documents"] for run in runs}) < 2:
        return "One size is not enough for a fit.\n"
    rows = []
    for name, key, unit, factor in (
        ("memory", "pss", "GiB", GIB),
        ("peak disk", "disk", "GiB", GIB),
        ("CPU", "cpu", "h", 3600),
    ):
        slope, start = line([(run["documents"], run["cost"][key]) for run in runs])
        each = f"{slope * 1e6:.0f} µs" if key == "cpu" else f"{slope:,.0f} bytes"
        begin = f"{start:.0f} s" if key == "cpu" else f"{start / MIB:,.0f} MiB"
        rows.append([name, begin, each, *(f"{(start + slope * far) / factor:,.0f} {unit}" for far in FAR)])
    table = table_of(["", "constant", "per row", *(f"at {far:,} rows" for far in FAR)], rows)
    return "Linear fits of these measurements, extrapolated:\n\n" + table + "\n" + _grown(runs) + "\n" + _asked(runs)


def _grown(runs: list[dict[str, Any]]) -> str:
    """Return the fits of the memory by process."""
    names = sorted({name for run in runs for name, held in run["cost"]["memory"].items() if held > 20 * MIB})
    lines = {name: line([(run["documents"], run["cost"]["memory"].get(name, 0)) for run in runs]) for name in names}
    rows = [[f"`{name}`", f"{start / MIB:,.0f} MiB", f"{slope:,.0f} bytes"] for name, (slope, start) in lines.items()]
    return "Memory by process (RSS, each at its own peak):\n\n" + table_of(["process", "constant", "per row"], rows)


def _asked(runs: list[dict[str, Any]]) -> str:
    from components.data_curation.engine import BAND_COUNT

    cpu, _ = line([(run["documents"], run["cost"]["cpu"]) for run in runs])
    memory, start = line([(run["documents"], run["cost"]["pss"]) for run in runs])
    fits = (
        "; ".join(f"{size} GiB hold {max(0, size * GIB - start) / memory / 1e6:,.0f} million rows" for size in MACHINES)
        if memory > 0
        else ""
    )
    durations = " and ".join(f"{far * cpu / 60 / CORES:,.0f} minutes for {far:,} rows" for far in FAR)
    bands = " and ".join(f"{far * BAND_COUNT * ENTRY / GIB:,.0f} GiB" for far in FAR)
    return ASKED.format(
        fits=fits or "memory does not grow with the rows",
        durations=durations,
        bands=bands,
        cores=CORES,
        count=BAND_COUNT,
        entry=ENTRY,
    )
