"""The files of this machine that tasks read, with their digests: they are part of what an evaluation is made from."""

from __future__ import annotations

from collections.abc import Sequence

from components.common import hashing
from components.common.errors import ConfigurationError, InputError
from components.evaluation.tasks import reading, task_files
from components.evaluation.tasks.config import Common, LMEval, files


def digests(tasks: Sequence[Common]) -> dict[str, str]:
    """sha256 (hex) by path of every file that the tasks read. Raises ConfigurationError, naming the field, for one that is not there."""
    found: dict[str, str] = {}
    for number, settings in enumerate(tasks):
        where = f"evaluation.tasks[{number}]"
        for field, path in files(settings).items():
            found[path] = hashing.sha256_file(reading.existing(path, f"{where}.{field}"))
        if isinstance(settings, LMEval) and task_files.is_path(settings.task):
            found |= _of_task_file(settings.task, f"{where}.task")
    return found


def _of_task_file(path: str, field: str) -> dict[str, str]:
    try:
        named = task_files.named(reading.existing(path, field))
    except InputError as error:
        raise ConfigurationError(f"{field}: {error.message}", hint=error.hint) from None
    return {str(file): hashing.sha256_file(reading.existing(str(file), field)) for file in named}
