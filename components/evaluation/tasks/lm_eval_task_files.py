"""Local lm-eval task files: parsing, referenced files and safety checks, without importing lm-eval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.yaml_loading import LimitedLoader, load_yaml
from components.evaluation.tasks.config import TASK_FILE_SUFFIXES

TaskFile = dict[str, Any]  # the YAML mapping of a task file

LOCAL_DATASET_BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # builders of the datasets library for local files
CODE_EVAL_METRIC = "code_eval"  # the metric that executes code


@dataclass(frozen=True)
class FunctionReference:
    """Target of `!function module.name`: code next to the task file."""

    module: str


class TaskFileLoader(LimitedLoader):
    """YAML loader that records the targets of lm-eval's `!function` without importing them."""

    def construct_function(self, node: yaml.ScalarNode) -> FunctionReference:
        """Return the reference to a function's module."""
        return FunctionReference(str(self.construct_scalar(node)).rpartition(".")[0])


TaskFileLoader.add_constructor("!function", TaskFileLoader.construct_function)


def is_task_file(task: str) -> bool:
    """Return whether a task is the path of a task file, not a name in lm-eval."""
    return task.endswith(TASK_FILE_SUFFIXES)


def load_task_file(path: Path) -> TaskFile:
    """Return the content of a task file without its includes.

    Raises:
        InputError: The file cannot be read or is not a valid task file.
    """
    hint = "See lm-eval's documentation of task files."
    try:
        content = load_yaml(path.read_text(encoding="utf-8"), TaskFileLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} is not a valid task file: {error}", hint=hint) from None
    if not isinstance(content, dict):
        raise InputError(f"{path} contains {content or 'no content'!s:.60}; expected a mapping", hint=hint)
    return content


def load_with_includes(path: Path) -> TaskFile:
    """Return the content of a task file merged with its includes.

    Raises:
        InputError: The file or an included file cannot be read or is not a valid task file.
    """
    content = load_task_file(path)
    for included in _list_includes(content, path):
        content = {**load_with_includes(included), **content}
    return content


def _list_includes(content: TaskFile, path: Path) -> list[Path]:
    include = content.get("include")
    return [path.parent / name for name in ([include] if isinstance(include, str) else include or [])]


def list_referenced_files(path: Path) -> list[Path]:
    """Return the task file and all files it reads: includes, code and data.

    Raises:
        InputError: The file or an included file cannot be read or is not a valid task file.
    """
    content, files = load_task_file(path), [path]
    for included in _list_includes(content, path):
        files += list_referenced_files(included)
    files += [path.parent / f"{module}.py" for module in sorted(set(_list_modules(content)))]
    return [*files, *list_data_files(content, path)]


def list_data_files(content: TaskFile, path: Path) -> list[Path]:
    """Return the data files of a task file. Relative paths start at the folder of the task file."""
    files = (content.get("dataset_kwargs") or {}).get("data_files") or []
    by_split = files.values() if isinstance(files, dict) else [files]
    return [path.parent / name for names in by_split for name in ([names] if isinstance(names, str) else names)]


def resolve_data_paths(files: object, path: Path) -> object:
    """Return the value of `data_files` with absolute paths. Relative paths start at the folder of the task file."""
    if isinstance(files, dict):
        return {split: resolve_data_paths(names, path) for split, names in files.items()}
    if isinstance(files, list):
        return [resolve_data_paths(name, path) for name in files]
    return str((path.parent / str(files)).resolve())


def check_safe(content: TaskFile, path: Path) -> None:
    """Raise ConfigurationError for a task file that executes generated code."""
    if content.get("unsafe_code") or CODE_EVAL_METRIC in path.read_text(encoding="utf-8") + str(content):
        raise ConfigurationError(
            f"{path.name}: the task executes generated code, which is not supported",
            hint="Remove the task.",
        )


def check_local(content: TaskFile, path: Path) -> None:
    """Raise ConfigurationError for a task file whose data is not on this machine."""
    dataset = content.get("dataset_path")
    if dataset not in LOCAL_DATASET_BUILDERS or not list_data_files(content, path):
        raise ConfigurationError(
            f"{path}: dataset_path is {dataset!r}; expected one of {', '.join(LOCAL_DATASET_BUILDERS)},"
            " with local data_files",
            hint="Set dataset_path: json, and dataset_kwargs.data_files to a local file.",
        )


def _list_modules(value: object) -> Iterator[str]:
    if isinstance(value, FunctionReference):
        yield value.module
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _list_modules(inner)
