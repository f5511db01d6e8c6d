"""Measure the size and shape of the code: `python -m tests.quality [--list] [PATH…]`, without PATH all packages.

Each figure is printed beside its target. `--list` adds the places behind the figures. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tuneline", "components", "pipelines")
BASELINE_TOKENS = 340_850  # components and pipelines before the clean-up of November 2026

BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.With, ast.AsyncWith, ast.Assert, ast.comprehension, ast.match_case,
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measurement:
    """Counts over all files, and the places behind them."""

    tokens: int = 0
    lines: int = 0
    long_lines: list[str] = field(default_factory=list)
    annotations: int = 0
    any_annotations: list[str] = field(default_factory=list)
    lengths: list[tuple[int, str]] = field(default_factory=list)
    complexities: list[tuple[int, str]] = field(default_factory=list)
    private_functions: int = 0
    used_once: list[str] = field(default_factory=list)


def python_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the first lines of all docstrings."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | Function))
    return {
        node.body[0].lineno
        for node in owners
        if node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    }


def count_tokens(text: str, tree: ast.Module) -> int:
    """Count tokens as Python's tokenizer gives them, without comments, docstrings, line ends and indentation."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
    docstrings = docstring_lines(tree)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        1
        for t in tokens
        if t.type not in skipped
        and not (t.type == tokenize.STRING and t.start[0] in docstrings and t.string.endswith(('"""', "'''")))
    )


def complexity(function: Function) -> int:
    """Return McCabe's cyclomatic complexity (IEEE TSE 2(4), 1976): decisions plus one; nested functions count for themselves."""
    decisions, pending = 1, list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.BoolOp):
            decisions += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            decisions += 1 + len(node.ifs)
        elif isinstance(node, BRANCHES) and not isinstance(node, ast.With | ast.AsyncWith | ast.Assert):
            decisions += 1
        pending.extend(ast.iter_child_nodes(node))
    return decisions


def references(tree: ast.Module) -> Counter[str]:
    """Count how often each name is used: as a name, an attribute or an imported name."""
    used: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used[node.id] += 1
        elif isinstance(node, ast.Attribute):
            used[node.attr] += 1
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
    return used


def annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, Function) and node.returns is not None:
            yield node.returns


def measure_file(path: Path, measurement: Measurement) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
    measurement.tokens += count_tokens(text, tree)
    for number, line in enumerate(text.splitlines(), 1):
        measurement.lines += 1
        if len(line) > 120:
            measurement.long_lines.append(f"{name}:{number}")
    for annotation in annotations(tree):
        measurement.annotations += 1
        if any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation)):
            measurement.any_annotations.append(f"{name}:{annotation.lineno}")
    used = references(tree)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            where = f"{name}:{node.lineno} {node.name}"
            measurement.lengths.append(((node.end_lineno or node.lineno) - node.lineno + 1, where))
            measurement.complexities.append((complexity(node), where))
            if node.name.startswith("_") and not node.name.endswith("__"):
                measurement.private_functions += 1
                if used[node.name] == 1:
                    measurement.used_once.append(where)


# Generated pages of docs/reference/, and reference that is tables and measurements.
UNCOUNTED_PAGES = (
    *(
        "artifacts",
        "cli",
        "cluster-emulation",
        "configuration",
        "errors",
        "evaluation-tasks",
        "images-check",
        "json",
        "platform",
    ),
    *("python-api", "recipes", "sizing-validation", "soak", "vllm"),
)


def count_words() -> int:
    """Count the words of the hand-written pages in docs/ outside code blocks."""
    pages = [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.stem not in UNCOUNTED_PAGES and not page.stem.startswith("benchmarks-")
    ]
    texts = (
        re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL) for page in pages
    )
    return sum(len(text.split()) for text in texts)


def main() -> int:
    """Print the figures of the given paths; return 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "paths", nargs="*", type=Path, help="Files and folders to measure; default: components and pipelines."
    )
    parser.add_argument("--list", action="store_true", help="List the places behind the figures.")
    arguments = parser.parse_args()
    measurement = Measurement()
    for file in python_files([path.resolve() for path in arguments.paths] or [ROOT / name for name in PACKAGES]):
        measure_file(file, measurement)
    lengths = sorted(measurement.lengths)
    once = len(measurement.used_once) / max(1, measurement.private_functions)
    wide = len(measurement.long_lines) / max(1, measurement.lines)
    untyped = len(measurement.any_annotations) / max(1, measurement.annotations)
    p95, longest, most_complex = lengths[int(len(lengths) * 0.95)][0], lengths[-1][0], max(measurement.complexities)[0]
    figures = [
        ("functions", f"{len(lengths)}", "", True),
        ("function length, median", f"{lengths[len(lengths) // 2][0]} lines", "", True),
        ("function length, 95th percentile", f"{p95} lines", "<= 45", p95 <= 45),
        ("function length, longest", f"{longest} lines", "<= 90", longest <= 90),
        ("cyclomatic complexity, highest", f"{most_complex}", "<= 15", most_complex <= 15),
        ("private functions referenced once", f"{len(measurement.used_once)} of {measurement.private_functions}, {once:.1%}", "<= 40%", once <= 0.40),
        ("lines over 120 characters", f"{len(measurement.long_lines)} of {measurement.lines}, {wide:.1%}", "<= 1%", wide <= 0.01),
        ("annotations with Any", f"{len(measurement.any_annotations)} of {measurement.annotations}, {untyped:.1%}", "<= 6%", untyped <= 0.06),
        ("words of hand-written documentation", f"{(words := count_words())}", "<= 35000", words <= 35_000),
        ("code tokens", f"{measurement.tokens}", "", True),
    ]  # fmt: skip
    if not arguments.paths:
        limit = int(BASELINE_TOKENS * 0.92)
        figures[-1] = ("code tokens", f"{measurement.tokens}", f"<= {limit}", measurement.tokens <= limit)
    for label, value, target, met in figures:
        print(f"{label:36} {value:24} {target:12} {'' if met else 'missed'}".rstrip())
    if arguments.list:
        print("\nprivate functions referenced once:", *measurement.used_once, sep="\n  ")
        print("\nlines over 120 characters:", *measurement.long_lines, sep="\n  ")
        print("\nannotations with Any:", *measurement.any_annotations, sep="\n  ")
        print("\nlongest functions:", *[f"{size:4} {where}" for size, where in lengths[-20:]], sep="\n  ")
        print(
            "\nmost complex functions:",
            *[f"{size:4} {where}" for size, where in sorted(measurement.complexities)[-20:] if size > 10],
            sep="\n  ",
        )
    return 0 if all(met for *_, met in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
