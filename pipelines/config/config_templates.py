"""Commented templates of customization.yaml and platform.yaml, generated from the configuration models."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from components.common.artifacts import output_paths
from components.common.runtime.errors import OutputOccupiedError
from pipelines.config.customization_config import Customization
from pipelines.config.customization_presets import read_preset
from pipelines.config.platform_config import Platform

CONFIG_FILENAMES = ("customization.yaml", "platform.yaml")
COMMENT_WIDTH = 140
CUSTOMIZATION_HEADER = """\
# A tuneline customization: every key with its default and its effect. Omitted keys keep their defaults.
# Run it with: tuneline run -c customization.yaml
"""
PLATFORM_HEADER = """\
# A Kubeflow cluster for tuneline: every key with its default and its effect. Omitted keys keep their defaults.
# Compile for it with: tuneline compile -c customization.yaml -p platform.yaml -o pipeline.yaml
"""


def write_templates(folder: Path, preset: str = "") -> tuple[Path, Path]:
    """Write a commented customization.yaml and platform.yaml into `folder`: both files completely, or neither.

    Args:
        folder: output folder.
        preset: name of the preset that customization.yaml contains. "": every key with its default.

    Returns:
        The paths of customization.yaml and platform.yaml.

    Raises:
        OutputOccupiedError: one of the files exists.
        UsageError: `folder` is not a folder and cannot be created, or the preset does not exist.
    """
    customization, platform = (folder / name for name in CONFIG_FILENAMES)
    texts = {
        customization: read_preset(preset) if preset else render_template(Customization(), CUSTOMIZATION_HEADER),
        platform: render_template(Platform(), PLATFORM_HEADER),
    }
    output_paths.check_folder(folder, must_exist=False)
    for path in texts:
        if path.exists() or path.is_symlink():
            raise OutputOccupiedError(f"{path} already exists", hint="Choose another folder, or remove the file first.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for path, text in texts.items():
            output_paths.write_file(path, text)
    except BaseException:
        for path in texts:  # neither file existed before; a single file would block the next attempt
            path.unlink(missing_ok=True)
        raise
    return customization, platform


def render_template(model: BaseModel, head: str) -> str:
    """Return the text of a YAML file with every key of a model, its effect as a comment, and its default.

    Args:
        model: the model with the default values.
        head: the comment lines before the first key.
    """
    return head + "\n".join(_list_template_lines(model)) + "\n"


def _list_template_lines(model: BaseModel, indent: str = "") -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value, comment = getattr(model, name), f"{indent}# "
        if not indent:
            yield ""
        yield from textwrap.wrap(
            field.description or "", COMMENT_WIDTH, initial_indent=comment, subsequent_indent=comment
        )
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _list_template_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {dump_field(model, name)}"


def dump_field(model: BaseModel, name: str) -> str:
    """Return a field's value as one line of YAML; of a list, without what the model adds, such as the suite's tasks."""
    value = getattr(model, name)
    if isinstance(value, list):
        stated = model.model_copy()
        stated.model_fields_set.add(name)
        value = stated.model_dump(mode="json", include={name}, exclude_unset=True).get(name, value)
    return dump_value(value)


def dump_value(value: object) -> str:
    """Return a value as one line of YAML; a model is dumped without its unset fields."""
    plain = [_dump_model(item) for item in value] if isinstance(value, list) else _dump_model(value)
    dumped: str = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, allow_unicode=True, width=100_000)
    return dumped.removesuffix("...\n").strip()


def _dump_model(value: object) -> object:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
