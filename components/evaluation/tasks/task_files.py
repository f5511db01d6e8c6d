"""Task files of lm-eval on this machine: what they say and which other files they read, found without importing lm-eval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from components.common.errors import ConfigurationError, InputError
from components.evaluation.tasks.config import TASK_FILES

LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")  # builders of the datasets library that read local files
UNSAFE = "code_eval"  # the metric that runs code


@dataclass(frozen=True)
class Function:
    """What `!function module.name` names: code beside the task file."""

    module: str


def _function(loader: Any, node: Any) -> Function:
    return Function(str(loader.construct_scalar(node)).rpartition(".")[0])


@cache
def _loader() -> Any:
    class Loader(yaml.SafeLoader):
        """YAML with lm-eval's `!function`, which is told and never imported here."""

    Loader.add_constructor("!function", _function)
    return Loader


def is_path(task: str) -> bool:
    """Whether a task is named by its file, not by its name in lm-eval."""
    return task.endswith(TASK_FILES)


def loaded(path: Path) -> dict[str, Any]:
    """What a task file says, its own words alone. Raises InputError for what is no task file."""
    try:
        told = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())  # noqa: S506 a SafeLoader with one more word
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"{path} cannot be read as a task file: {error}", hint="lm-eval's documentation says how one is written."
        ) from None
    if not isinstance(told, dict):
        raise InputError(f"{path} holds no mapping, as a task file does", hint="lm-eval's documentation says how one is written.")
    return told


def whole(path: Path) -> dict[str, Any]:
    """What a task file says with what it includes."""
    told = loaded(path)
    including = told.get("include")
    for name in [including] if isinstance(including, str) else including or []:
        told = {**whole(_beside(path, name)), **told}
    return told


def named(path: Path) -> list[Path]:
    """The task file and all that it reads: files it includes, code it names, its data. Raises InputError where it says what cannot be."""
    told, found = loaded(path), [path]
    including = told.get("include")
    for name in [including] if isinstance(including, str) else including or []:
        found += named(_beside(path, name))
    found += [_beside(path, f"{module}.py") for module in sorted(set(_functions(told)))]
    return [*found, *data_files(told, path)]


def data_files(told: dict[str, Any], path: Path) -> list[Path]:
    """The data that a task file reads from this machine, relative to it."""
    files = (told.get("dataset_kwargs") or {}).get("data_files") or []
    by_split = files.values() if isinstance(files, dict) else [files]
    return [_beside(path, name) for some in by_split for name in ([some] if isinstance(some, str) else some)]


def placed(files: Any, path: Path) -> Any:
    """What `data_files` says with every path made absolute."""
    if isinstance(files, dict):
        return {split: placed(some, path) for split, some in files.items()}
    return [placed(one, path) for one in files] if isinstance(files, list) else str(_beside(path, str(files)).resolve())


def check_safe(told: dict[str, Any], path: Path) -> None:
    """Raise ConfigurationError for a task file that runs the model's code."""
    if told.get("unsafe_code") or UNSAFE in path.read_text(encoding="utf-8") or UNSAFE in str(told):
        raise ConfigurationError(f"{path.name}: the task executes code that the model wrote, and no task may", hint="Take the task out.")


def check_local(told: dict[str, Any], path: Path) -> None:
    """Raise ConfigurationError for a task file that reads its data from elsewhere."""
    dataset = told.get("dataset_path")
    if dataset not in LOCAL_FORMATS or not data_files(told, path):
        raise ConfigurationError(
            f"{path}: dataset_path is {dataset!r}, and nothing is downloaded",
            hint="Write dataset_path: json, and the file under dataset_kwargs: data_files.",
        )


def _beside(path: Path, name: str) -> Path:
    return Path(name) if Path(name).is_absolute() else path.parent / name


def _functions(value: Any) -> Iterator[str]:
    if isinstance(value, Function):
        yield value.module
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _functions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _functions(inner)
