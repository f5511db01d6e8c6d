"""Checkpoints of a history outside of MLflow's database: number, seal and signature of the newest closed entry.

A database that lacks the entry of its checkpoint was truncated; one with another seal was rewritten. A checkpoint may
lag behind: a process that ends between the entry and its checkpoint leaves the older one.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import RegistryError, TunelineError
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.model_registry import signers, trust_root

FOLDER_VARIABLE = "TUNELINE_CHECKPOINTS"
NOTES_FOLDER = "checkpoints"  # in the artifact store


class Checkpoint(BaseModel):
    """The newest closed entry of a history.

    Attributes:
        entries: number of the entry, which is the number of entries up to it.
        head: seal of the entry.
        signature: signature of the entry; "" if it has none.
    """

    model: str
    entries: int
    head: str
    signature: str = ""


def is_writing() -> bool:
    """Return whether this process writes checkpoints: it signs, or TUNELINE_CHECKPOINTS is set."""
    return signers.is_signing() or bool(os.environ.get(FOLDER_VARIABLE))


def is_reading() -> bool:
    """Return whether this process compares histories with their checkpoints."""
    return is_writing() or bool(os.environ.get(trust_root.TRUST_VARIABLE))


def describe_location(model: str) -> str:
    """Return the location of a model's checkpoint for messages."""
    folder = os.environ.get(FOLDER_VARIABLE)
    store = artifact_store.describe_store(Workdir.from_environment().store)
    return f"{folder or f'{store}/{NOTES_FOLDER}'}/{_get_filename(model)}"


def write(model: str, number: int, seal: str, signature: str) -> None:
    """Write a checkpoint unless a newer one exists.

    Raises:
        RegistryError: the checkpoint cannot be written; the entry itself is recorded.
    """
    try:
        existing = read(model)
        if existing is not None and existing.entries > number:
            return
        text = Checkpoint(model=model, entries=number, head=seal, signature=signature).model_dump_json() + "\n"
        if folder := os.environ.get(FOLDER_VARIABLE):
            Path(folder).mkdir(parents=True, exist_ok=True)
            artifact_folder.write_atomically(Path(folder) / _get_filename(model), text)
        else:
            artifact_store.write_note(Workdir.from_environment().store, f"{NOTES_FOLDER}/{_get_filename(model)}", text)
    except (OSError, TunelineError) as error:
        raise RegistryError(
            f"entry {number} of the history of {model} is recorded, but its checkpoint was not written: {error}",
            hint=f"Make {describe_location(model)} writable. tuneline writes the checkpoint with the next history entry.",
        ) from None


def read(model: str) -> Checkpoint | None:
    """Return the checkpoint of a model's history; None if it does not exist.

    Raises:
        RegistryError: the checkpoint is unreadable.
    """
    name = _get_filename(model)
    if folder := os.environ.get(FOLDER_VARIABLE):
        path = Path(folder) / name
        text = filesystem.read_text(path, errors="replace") if path.exists() else None
    else:
        text = artifact_store.read_note(Workdir.from_environment().store, f"{NOTES_FOLDER}/{name}")
    if text is None:
        return None
    try:
        return Checkpoint.model_validate_json(text)
    except ValidationError:
        raise RegistryError(
            f"the checkpoint {describe_location(model)} is unreadable",
            hint=f"Restore the file from a backup, or check the history with `tuneline registry audit {model}`.",
        ) from None


def _get_filename(model: str) -> str:
    return f"{quote(model, safe='')}.json"
