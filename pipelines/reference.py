"""What the configuration models say of themselves: commented files for a start, docs/configuration.md and docs/platform.md."""

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
from components.common.scheduling import Claim, NodeAffinity, Toleration
from components.evaluation.config import Rule
from components.evaluation.tasks.config import TaskConfig
from pipelines import outputs
from pipelines.config import Customization
from pipelines.platform import Files, Platform, Resources, Scheduling, SecretKey, Stages

FILES = ("customization.yaml", "platform.yaml")
HEAD = """\
# A tuneline customization. Every key stands here with its default and its effect; what is left out keeps its default.
# Run it with: tuneline run -c customization.yaml
"""
PLATFORM_HEAD = """\
# A Kubeflow cluster for tuneline. Every key stands here with its default and its effect; what is left out keeps its default.
# Compile for it with: tuneline compile -c customization.yaml -p platform.yaml -o pipeline.yaml
"""


def write(folder: Path) -> tuple[Path, Path]:
    """Write a commented customization.yaml and platform.yaml into `folder`: both, whole, or none.

    Raises OutputOccupiedError where there is one already, UsageError where `folder` cannot be one.
    """
    customization, platform = (folder / name for name in FILES)
    texts = {customization: commented(Customization(), HEAD), platform: commented(Platform(), PLATFORM_HEAD)}
    outputs.check_folder(folder, must_exist=False)
    for path in texts:
        if path.exists() or path.is_symlink():
            raise OutputOccupiedError(f"{path} exists already", hint="Name another folder, or remove the file first.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for path, text in texts.items():
            outputs.write(path, text)
    except BaseException:
        for path in texts:  # neither was there before; one alone would keep the next try from writing the other
            path.unlink(missing_ok=True)
        raise
    return customization, platform


def commented(model: BaseModel, head: str) -> str:
    """A model's file with every key, its effect as a comment, and its default."""
    return head + "\n".join(_lines(model)) + "\n"


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


def platform_page() -> str:
    """docs/platform.md: a table a section."""
    head = "# platform.yaml\n\nGenerated from the models by `python -m pipelines.reference platform`; a test keeps it equal to them.\n"
    text = [
        head,
        "The cluster that a pipeline is compiled for: what Kubeflow can only fix when compiling. `tuneline init` writes a commented one;",
        "unknown keys are refused. [Kubeflow in ten minutes](kubeflow.md) shows its use, [Platforms](platforms.md) four whole examples",
        "and what each key becomes in a pod.\n",
        *_sections(Platform(), "", leave_out="resources"),
        *_table(f"Resources of a stage, under `resources.{'`, `resources.'.join(Stages.model_fields)}`", Resources),
        *_table("A secret's value, under `secrets`", SecretKey),
        *_table("A secret or config map as files, under `secret_files` and `config_files`", Files),
        *_table("A further volume, under `claims`", Claim),
        *_table("A toleration", Toleration),
        *_table("A condition on nodes, under `scheduling.node_affinity`", NodeAffinity),
    ]
    return "\n".join(text) + "\n"


def _table(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"### {title}\n\n| key | default | what it may be | effect |\n|---|---|---|---|"
    yield from (_row(name, field, "" if field.is_required() else field.default) for name, field in model.model_fields.items())
    yield ""


def page() -> str:
    """docs/configuration.md: a table a section."""
    head = "# Configuration\n\nGenerated from the models by `python -m pipelines.reference`; a test keeps it equal to them.\n"
    text = [
        head,
        "`tuneline init` writes a commented `customization.yaml`. Any key can be set with `--set section.key=value`, values in YAML;",
    ]
    text += ["unknown keys are refused. Paths in a file count from the file's folder, those given with `--set` from the current one.\n"]
    return "\n".join([*text, *_sections(Customization(), "")]) + "\n"


def _sections(model: BaseModel, prefix: str, leave_out: str = "") -> Iterator[str]:
    fields = type(model).model_fields
    plain = {name: field for name, field in fields.items() if not isinstance(getattr(model, name), BaseModel)}
    if plain:
        yield f"## {prefix.rstrip('.') or 'At the top'}\n\n| key | default | what it may be | effect |\n|---|---|---|---|"
        yield from (_row(prefix + name, field, getattr(model, name)) for name, field in plain.items())
        yield ""
    for name in fields:
        if isinstance(getattr(model, name), BaseModel) and name != leave_out:
            yield from _sections(getattr(model, name), f"{prefix}{name}.")
    if prefix == "evaluation.":
        yield from _table("A rule of evaluation.gate", Rule)


def _row(name: str, field: FieldInfo, value: Any) -> str:
    cells = (f"`{name}`", "" if field.is_required() else f"`{_inline(value)}`", _type(field.annotation), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "values",
    Rule: "rule",
    Toleration: "toleration",
    SecretKey: "secret's value",
    Claim: "further volume",
    Files: "name and folder",
    NodeAffinity: "condition",
    Scheduling: "keys of `scheduling`",
}


def _type(annotation: Any) -> str:
    """A type in words: "integer", "list of text", or the values allowed."""
    arguments = get_args(annotation)
    if annotation == TaskConfig:
        return "task"
    if get_origin(annotation) is list:
        return f"list of {_type(arguments[0])}"
    if get_origin(annotation) is dict:
        return f"mapping to {_type(arguments[1])}"
    if arguments:
        return " or ".join(f"`{a}`" if isinstance(a, str) else _type(a) for a in arguments)
    return WORDS.get(annotation) or str(getattr(annotation, "__name__", annotation))


if __name__ == "__main__":
    sys.stdout.write(platform_page() if sys.argv[1:] == ["platform"] else page())
