"""What the configuration models say of themselves: a commented customization.yaml, and docs/configuration.md."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from components.common.errors import OutputOccupiedError
from pipelines.config import Customization

FILE = "customization.yaml"
HEAD = """\
# A tuneline customization. Every key stands here with its default and its effect; what is left out keeps its default.
# Run it with: tuneline run -c customization.yaml
"""


def write(folder: Path) -> Path:
    """Write a commented customization.yaml into `folder`. Raises OutputOccupiedError where there is one already."""
    path = folder / FILE
    if path.exists():
        raise OutputOccupiedError(f"{path} exists already", hint="Name another folder, or remove the file first.")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(commented(), encoding="utf-8")
    return path


def commented() -> str:
    """customization.yaml with every key, its effect as a comment, and its default."""
    return HEAD + "\n".join(_lines(Customization())) + "\n"


def _lines(model: BaseModel, indent: str = "") -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if not indent:
            yield ""
        yield from textwrap.wrap(field.description or "", 140, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_inline(value)}"


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    dumped = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, allow_unicode=True, width=100_000)
    return dumped.removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    """A value as YAML knows it; of models only what was set, so that a rule reads as it was meant."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def page() -> str:
    """docs/configuration.md: a table a section."""
    head = "# Configuration\n\nGenerated from the models by `python -m pipelines.reference`; a test keeps it equal to them.\n"
    text = [
        head,
        "`tuneline init` writes a commented `customization.yaml`. Any key can be set with `--set section.key=value`, values in YAML;",
    ]
    text += ["unknown keys are refused. Paths in a file count from the file's folder, those given with `--set` from the current one.\n"]
    return "\n".join([*text, *_sections(Customization(), "")]) + "\n"


def _sections(model: BaseModel, prefix: str) -> Iterator[str]:
    fields = type(model).model_fields
    plain = {name: field for name, field in fields.items() if not isinstance(getattr(model, name), BaseModel)}
    if plain:
        yield f"## {prefix.rstrip('.') or 'At the top'}\n\n| key | default | what it may be | effect |\n|---|---|---|---|"
        yield from (_row(prefix + name, field, getattr(model, name)) for name, field in plain.items())
        yield ""
    for name in fields:
        if isinstance(getattr(model, name), BaseModel):
            yield from _sections(getattr(model, name), f"{prefix}{name}.")
    if prefix == "evaluation.":
        from components.evaluation.config import Rule

        yield "### A rule of evaluation.gate\n\n| key | default | what it may be | effect |\n|---|---|---|---|"
        yield from (_row(name, field, field.default) for name, field in Rule.model_fields.items())
        yield ""


def _row(name: str, field: FieldInfo, value: Any) -> str:
    cells = (f"`{name}`", f"`{_inline(value)}`", _type(field.annotation), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any) -> str:
    """A type in words: "integer", "list of text", or the values allowed."""
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in names:
        return names[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is list:
        return f"list of {_type(arguments[0])}"
    if arguments:
        return " or ".join(f"`{a}`" if isinstance(a, str) else _type(a) for a in arguments)
    return "rule" if isinstance(annotation, type) and annotation.__name__ == "Rule" else str(getattr(annotation, "__name__", annotation))


if __name__ == "__main__":
    sys.stdout.write(page())
