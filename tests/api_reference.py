"""The reference in docs/reference/python-api.md, generated from the signatures and docstrings of the package `tuneline`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import tuneline

BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"
FUNCTIONS = ("run", "curate", "finetune", "evaluate", "package", "serve", "size", "compare")
CLASSES = {  # with the documented methods
    "Customization": ("load", "load_demo", "set", "check", "write"),
    "Registry": ("versions", "promote", "rollback", "lineage", "audit"),
    "RunResult": ("as_dict",),
    "RunEstimate": (),
    "Comparison": ("as_dict", "write_page"),
    "TrainingSize": ("as_dict", "write_page"),
    "ClusterSize": ("as_dict", "write_page"),
    "DatasetResult": (),
    "ModelResult": (),
    "EvaluationResult": (),
    "PackageResult": (),
    "ServedPackage": ("check_alive",),
    "ModelVersion": (),
    "ModelVersions": (),
}
ENTRY = re.compile(r"^    (\w+): (.*)$")


def render_page(text: str) -> str:
    """Return the text of the page with the reference between its markers replaced."""
    before, rest = text.split(BEGIN)
    lines = [line for name in FUNCTIONS for line in _render_function(name, getattr(tuneline, name))]
    for name, methods in CLASSES.items():
        described = getattr(tuneline, name)
        lines += [f"### {name}", "", *_render_docstring(inspect.getdoc(described) or "")]
        for method in methods:
            lines += _render_function(f"{name}.{method}", getattr(described, method), level=4)
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def _render_function(name: str, function: Callable[..., object], level: int = 3) -> Iterator[str]:
    parameters = [
        str(one.replace(annotation=inspect.Parameter.empty))
        for key, one in inspect.signature(function).parameters.items()
        if key != "self"
    ]
    kinds = [one.kind for key, one in inspect.signature(function).parameters.items() if key != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    yield from [f"{'#' * level} {name}", "", "```text", f"{name}({', '.join(parameters)})", "```", ""]
    yield from _render_docstring(inspect.getdoc(function) or "")


def _render_docstring(text: str) -> Iterator[str]:
    """Render a docstring: its text without the example, and a list for each section of entries."""
    text, *sections = re.split(r"\n\n(?=(?:Args|Attributes|Returns|Raises):\n)", text)
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("    "):
            yield from [" ".join(paragraph.split()), ""]
    for section in sections:
        title, *lines = section.split("\n")
        entries: list[list[str]] = []
        for line in lines:
            match = ENTRY.match(line)
            if match or not entries:
                entries.append([f"`{match[1]}`: {match[2]}" if match else line.strip()])
            else:
                entries[-1].append(line.strip())
        yield from [title, "", *(f"- {' '.join(entry)}" for entry in entries), ""]
