"""The export of captured answers for the next version: training rows, and a share of the traffic held back to evaluate it.

The export is written to a private folder and renamed, so that a killed export leaves no rows. A held-back subject or
conversation has no training row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder, hashing
from components.common.regression_suite import ITEMS_FOLDER, TASKS
from components.common.runtime import filesystem
from components.common.runtime.errors import ConfigurationError, InputError, OutputOccupiedError
from components.common.workspace import job_folders
from pipelines.capture import exported_rows, training_rows
from pipelines.capture.exported_rows import (
    CONVERSATIONS_FILENAME,
    EXPORT_FILENAME,
    FILENAMES,
    HELD_BACK_FILENAME,
    PREFERENCES_FILENAME,
)
from pipelines.capture.settings import CaptureSettings

if TYPE_CHECKING:
    from pipelines.config.customization_config import Customization

GROUP = "group"  # field of a row: its subject, or its conversation


@dataclass(frozen=True)
class ExportOptions:
    """Which rows are exported.

    Attributes:
        model: name of the model that answered; "": all models.
        include_unrated: include answers without feedback.
        held_back: share of the subjects whose rows are for evaluation only.
    """

    model: str = ""
    include_unrated: bool = False
    held_back: float = 0.0


@dataclass(frozen=True)
class Export:
    """The contents of an exported folder.

    Attributes:
        conversations: number of SFT rows.
        preferences: number of preference pairs.
        held_back: number of rows for evaluation.
        left_out: number of answers in no file: their conversation also occurs in held-back rows of another subject, or
            they are held back and an evaluation cannot compare them.
        files: SHA-256 by name of a file.
        erased: whether rows were removed after the export, because their subject was erased.
    """

    conversations: int
    preferences: int
    held_back: int
    left_out: int
    files: dict[str, str]
    erased: bool = False


def is_held_back(group: str, share: float) -> bool:
    """Return whether a group is held back. The answer depends on the group and the share only: a group does not change
    sides in a later export, and a larger share keeps the held-back groups."""
    return int(hashing.digest(["held back", group])[:13], 16) < share * 16**13


def export(
    settings: CaptureSettings, feedback: Mapping[str, Mapping[str, Any]], output: Path, options: ExportOptions
) -> Export:
    """Write the rows to a new folder, or accept a folder that has the same rows. Call it under the lock.

    Raises:
        InputError: no captured answer gives a row.
        OutputOccupiedError: the folder has other contents.
    """
    hint = "Choose another folder with -o."
    earlier = read_export(output) if (output / EXPORT_FILENAME).is_file() else None
    if earlier is None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputOccupiedError(f"{output} is not an empty folder", hint=hint)
    with draft_export(settings, feedback, output, options) as (draft, result):
        if earlier is not None:
            if replace(earlier, erased=False) == result:
                return result
            raise OutputOccupiedError(f"{output} contains an export of other rows", hint=hint)
        artifact_folder.fsync(draft)
        filesystem.rename(draft, output)
        artifact_folder.fsync(output.parent)
    return result


@contextmanager
def draft_export(
    settings: CaptureSettings, feedback: Mapping[str, Mapping[str, Any]], output: Path, options: ExportOptions
) -> Iterator[tuple[Path, Export]]:
    """Write the rows to a private folder beside `output`, which is removed at the end unless it was renamed.

    Raises:
        InputError: no captured answer gives a row.
    """
    with (
        exported_rows.recorded(settings, output),
        job_folders.private_folder(output.parent, f".{output.name}", mode=0o700) as draft,
    ):
        result = _write_rows(settings, feedback, draft, options)
        if not (result.conversations or result.preferences or result.held_back):
            raise InputError(
                f"no captured answer in {settings.location} yields a training row",
                hint="Add the feedback files with --feedback, or include answers without feedback with --unrated.",
            )
        with open(draft / EXPORT_FILENAME, "x", encoding="utf-8", opener=_open_private) as file:
            file.write(json.dumps(asdict(result), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        yield draft, result


def _write_rows(
    settings: CaptureSettings, feedback: Mapping[str, Mapping[str, Any]], folder: Path, options: ExportOptions
) -> Export:
    def read() -> Iterator[training_rows.TrainingRows]:
        answers = training_rows.read_training_rows(
            settings, feedback, options.model or None, include_unrated=options.include_unrated
        )
        return (rows for rows in answers if rows.conversation is not None)

    def is_held(rows: training_rows.TrainingRows) -> bool:
        return is_held_back(rows.group, options.held_back)

    held_conversations = {rows.conversation_key for rows in read() if is_held(rows)} if options.held_back else set()
    counts = dict.fromkeys(FILENAMES, 0)
    left_out = 0
    with ExitStack() as files:
        streams = {
            kind: files.enter_context(open(folder / name, "x", encoding="utf-8", opener=_open_private))
            for kind, name in FILENAMES.items()
        }
        for rows in read():
            selected = {"conversations": rows.conversation, "preferences": rows.preference}
            if is_held(rows) and _is_text(rows.conversation):
                selected = {"held_back": rows.conversation}
            elif is_held(rows) or rows.conversation_key in held_conversations:
                left_out += 1
                continue
            for kind, row in selected.items():
                if row is not None:
                    streams[kind].write(json.dumps({**row, GROUP: rows.group}, ensure_ascii=False) + "\n")
                    counts[kind] += 1
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    for kind, name in FILENAMES.items():
        if not counts[kind]:
            (folder / name).unlink(missing_ok=True)  # curation refuses a file without rows
    digests = {path.name: hashing.sha256_file(path) for path in sorted(folder.glob("*.jsonl"))}
    return Export(counts["conversations"], counts["preferences"], counts["held_back"], left_out=left_out, files=digests)


def _is_text(conversation: Mapping[str, Any] | None) -> bool:
    """Return whether a conversation has text and no tool calls, as the rows of an evaluation."""
    messages = conversation["messages"] if conversation else []
    is_text = all(isinstance(each.get("content"), str) and not each.get("tool_calls") for each in messages)
    return is_text and bool(messages) and bool(messages[-1]["content"].strip())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def has_lost_rows(folder: Path) -> bool:
    """Return whether rows were removed from an exported folder, because their subject was erased."""
    try:
        return bool(json.loads(filesystem.read_text(folder / EXPORT_FILENAME)).get("erased"))
    except (OSError, ValueError, AttributeError):
        return False


def read_export(folder: Path) -> Export:
    """Return the contents of an exported folder.

    Raises:
        InputError: the folder is not an export, or a file has changed since.
    """
    hint = "Export the traffic to another folder with `tuneline traffic export`."
    try:
        result = Export(**json.loads((folder / EXPORT_FILENAME).read_text(encoding="utf-8")))
        digests = {name: hashing.sha256_file(folder / name) for name in result.files}
    except (OSError, ValueError, TypeError):
        raise InputError(f"{folder} is not an export of captured traffic", hint=hint) from None
    if digests != result.files:
        raise InputError(f"the exported rows in {folder} have changed", hint=hint)
    return result


def check_objective(customization: Customization) -> None:
    """Check that captured answers give rows of the objective.

    Raises:
        ConfigurationError: the objective learns from plain text.
    """
    if not {"sft", "preference"} & set(customization.fine_tuning.objective_spec.row_mappings):
        raise ConfigurationError(
            f"fine_tuning.objective is {customization.fine_tuning.objective}, but captured traffic has no rows for this objective",
            hint="Set fine_tuning.objective to an objective other than text.",
        )


def add_exported_rows(customization: Customization, folder: Path) -> None:
    """Add exported rows to the sources of a customization, for curation together with its other rows.

    The held-back rows and the items of the regression suite become evaluation sets of the decontamination, and rows of
    a subject share a split, unless the customization groups its rows by another field.

    Raises:
        InputError: the folder is not an export, or has no rows of the kind that the objective requires.
    """
    from components.data_curation.reading.source_settings import SourceEntry

    read_export(folder)
    curation = customization.data_curation
    is_supervised = "sft" in customization.fine_tuning.objective_spec.row_mappings
    rows = folder / (CONVERSATIONS_FILENAME if is_supervised else PREFERENCES_FILENAME)
    if not rows.exists():
        raise InputError(
            f"{folder} has no {rows.name}, which the objective {customization.fine_tuning.objective} requires",
            hint="Collect corrections and ratings, or lower the share that is held back.",
        )
    held_back = folder / HELD_BACK_FILENAME
    suite = [ITEMS_FOLDER / file for _, file in TASKS.values() if file]
    sets = [*([held_back] if held_back.exists() else []), *suite]
    decontamination = curation.decontamination
    customization.data_curation = curation.model_copy(
        update={
            "sources": [*curation.sources, SourceEntry(path=str(rows.absolute()))],
            "group_by": curation.group_by or GROUP,
            "decontamination": decontamination.model_copy(
                update={"sets": [*decontamination.sets, *(str(path.absolute()) for path in sets)]}
            ),
        }
    )
