"""Digests of the local files that tasks read. The files are inputs of the evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from components.common.artifacts import hashing
from components.common.runtime.errors import ConfigurationError, InputError
from components.evaluation.tasks import record_files
from components.evaluation.tasks.config import TaskSettings


def digest_task_files(tasks: Sequence[TaskSettings]) -> dict[str, str]:
    """Return the SHA-256 digest (hex) of every file that the tasks read, by path.

    Raises:
        ConfigurationError: A file does not exist, or a task file is invalid; the message contains the setting.
    """
    digests: dict[str, str] = {}
    for number, settings in enumerate(tasks):
        for field, path in settings.list_file_paths().items():
            key = f"evaluation.tasks[{number}].{field}"
            digests[path] = hashing.sha256_file(record_files.require_file(path, key))
            try:
                referenced = settings.list_referenced_files(field)
            except InputError as error:
                raise ConfigurationError(f"{key}: {error.message}", hint=error.hint) from None
            for file in map(str, referenced):
                digests[file] = hashing.sha256_file(record_files.require_file(file, key))
    return digests
