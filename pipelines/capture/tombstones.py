"""Tombstones: a file for each erased subject, so that rows which arrive later in a file are not kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import InputError
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import TOMBSTONES, Row


class Tombstone(BaseModel):
    """The erasure of a subject.

    Attributes:
        subject: keyed hash of the subject.
        requested: Unix time up to which the subject's rows are erased.
        requested_by: who ran the command.
        finished: Unix time at which all files had been searched, or None.
        rows: number of erased rows.
        files: number of files that contained them.
        feedback: number of erased lines of feedback.
        exported: number of rows erased from exported files.
        corrected: ids of the answers that the subject has corrected, until the erasure is complete. The feedback is
            erased before, and a repeated erasure searches the exported rows again.
    """

    model_config = ConfigDict(extra="allow")

    subject: str
    requested: int
    requested_by: str
    finished: int | None = None
    rows: int = 0
    files: int = 0
    feedback: int = 0
    exported: int = 0
    corrected: list[str] = []


def read_tombstones(folder: Path) -> dict[str, Tombstone]:
    """Return the tombstones by subject.

    Raises:
        InputError: a tombstone is damaged.
    """
    found = {}
    for path in (folder / TOMBSTONES).glob("*.json"):
        try:
            tombstone = Tombstone.model_validate_json(filesystem.read_bytes(path))
        except ValidationError:
            hint = "Restore the file, or delete it and run the erasure of its subject again."
            raise InputError(f"the tombstone {path} is damaged", hint=hint) from None
        found[tombstone.subject] = tombstone
    return found


def write_tombstone(folder: Path, tombstone: Tombstone) -> Path:
    """Write the tombstone of a subject, and return its path. Gateways notice the new file, and seal their files."""
    path = folder / TOMBSTONES / f"{tombstone.subject}.json"
    artifact_folder.write_atomically(path, json.dumps(tombstone.model_dump(), indent=2) + "\n")
    return path


def is_erased(row: Row, erased: Mapping[str, Tombstone]) -> bool:
    """Return whether the row's subject was erased after the row's request."""
    tombstone = erased.get(row["tuneline"]["subject"] or "")
    return tombstone is not None and row["timestamp"] <= tombstone.requested


def is_held(settings: CaptureSettings, model: str) -> bool:
    """Return whether the model's traffic is under a legal hold."""
    return model in settings.models and settings.models[model].legal_hold
