"""Checkpoints: completeness, selection for a resume, and rotation.

transformers resumes from the highest-numbered folder, even if it is incomplete. Therefore each training run saves in a
separate folder, writes a marker with the digest of every file last, and then moves the checkpoint to its place. A run
that lost its lock while the file server was unreachable cannot change the checkpoints of its successor.
"""

# Pickled files are loaded with weights_only, after their digests are verified.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder, hashing
from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ArtifactDamagedError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders

if TYPE_CHECKING:
    import torch

MARKER_FILENAME = "complete.json"
# Every trained tensor under its parameter's name. PEFT's adapter file lacks the network that generates p-tuning's virtual
# tokens, and transformers saves fused experts under other names, which its resume ignores.
TRAINABLE_FILENAME = "trainable.safetensors"
STATE_FILENAME = "trainer_state.json"
SAVING_PREFIX = "saving"  # saving.<owner tag> in the folder of checkpoints: unfinished checkpoints of a training run


def create_saving_folder(folder: Path) -> Path:
    """Create the folder in which a training run saves, and remove those of earlier runs.

    Args:
        folder: folder of checkpoints; the caller holds its lock.
    """
    for abandoned in folder.glob(f"{SAVING_PREFIX}.*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    saving = folder / f"{SAVING_PREFIX}.{job_folders.create_owner_tag()}"
    saving.mkdir(exist_ok=True)  # NFS repeats a call whose answer was lost
    return saving


def publish(saved: Path, folder: Path, verify_lock: Callable[[], None]) -> None:
    """Mark a saved checkpoint as complete, and move it to the folder of checkpoints.

    Raises:
        BusyError: another training run has taken over the folder.
        OSError: the checkpoint cannot be moved; another training run has removed it.
    """
    mark_complete(saved)
    verify_lock()  # after the marker, because the digests of a large checkpoint take minutes
    aside = saved.parent / "replaced"  # a checkpoint of this step that the training run did not resume from
    job_folders.move_into_place(saved, folder / saved.name, lambda: None, aside)
    shutil.rmtree(aside, ignore_errors=True)


def mark_complete(checkpoint: Path) -> None:
    """Write the completion marker of a saved checkpoint."""
    files = {
        path.relative_to(checkpoint).as_posix(): hashing.sha256_file(path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    artifact_folder.write_atomically(checkpoint / MARKER_FILENAME, json.dumps(files, indent=1))


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file in the marker exists and matches its digest."""
    try:
        files: dict[str, str] = json.loads(filesystem.read_text(checkpoint / MARKER_FILENAME))
        return bool(files) and all(hashing.sha256_file(checkpoint / name) == sha for name, sha in files.items())
    except (OSError, ValueError):
        return False


def find_newest(folder: Path, reporter: Reporter, is_suitable: Callable[[dict[str, Any]], bool]) -> Path | None:
    """Return the newest complete checkpoint whose trainer state satisfies `is_suitable`, or None.

    Skips a checkpoint if the best checkpoint up to its step is missing or damaged, because the result would differ.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=parse_step, reverse=True):
        if not is_complete(checkpoint):
            reporter.note(f"skipping {checkpoint.name}: it is incomplete or damaged")
        elif (best := find_best(checkpoint)) and best != checkpoint and not is_complete(best):
            reporter.note(f"skipping {checkpoint.name}: its best checkpoint, {best.name}, is incomplete or damaged")
        elif is_suitable(read_state(checkpoint)):
            return checkpoint
    return None


def rotate(folder: Path, keep: int) -> None:
    """Delete all checkpoints except the newest `keep` complete checkpoints and the best checkpoint.

    The rotation of transformers is unsuitable: it runs before the newest checkpoint has its marker, and counts the best
    checkpoint towards `keep`.
    """
    complete = sorted(
        (path for path in folder.glob("checkpoint-*") if (path / MARKER_FILENAME).exists()),
        key=parse_step,
        reverse=True,
    )
    if not complete:
        return
    kept = {*complete[:keep], find_best(complete[0])}
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint not in kept and parse_step(checkpoint) < parse_step(complete[0]):
            shutil.rmtree(checkpoint, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the trainer's state after this checkpoint's step, with the keys of transformers' TrainerState."""
    state: dict[str, Any] = json.loads((checkpoint / STATE_FILENAME).read_text(encoding="utf-8"))
    return state


def find_best(checkpoint: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss up to this checkpoint, or None without validation.

    The recorded step determines the path, because the folder may have been moved.
    """
    step = read_state(checkpoint).get("best_global_step")
    return checkpoint.with_name(f"checkpoint-{step}") if step else None


def parse_step(checkpoint: Path) -> int:
    """Return the optimizer step after which a checkpoint was saved."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def save_trainable(model: torch.nn.Module, checkpoint: Path) -> None:
    """Write every trained tensor in full precision, unless the model's files contain them all under their names."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    saved: set[str] = set()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            saved.update(file.keys())
    if trained.keys() - saved:
        tensors = {name: value.detach().contiguous() for name, value in trained.items()}
        save_file(tensors, checkpoint / TRAINABLE_FILENAME)


def restore_trainable(model: torch.nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights into the model: every trained tensor, or the whole model.

    Raises:
        ArtifactDamagedError: the checkpoint lacks a trained tensor.
    """
    import torch
    from safetensors.torch import load_file

    trainable = checkpoint / TRAINABLE_FILENAME
    paths = [trainable] if trainable.exists() else sorted(checkpoint.glob("model*.safetensors"))
    parameters = dict(model.named_parameters())
    missing = {name for name, value in parameters.items() if value.requires_grad}
    with torch.no_grad():
        for path in paths:
            for name, value in load_file(path).items():
                if name in parameters:  # buffers and the second name of a tied weight are not parameters
                    parameters[name].copy_(value)
                    missing.discard(name)
    if missing:
        raise ArtifactDamagedError(
            f"{checkpoint} lacks {format_count(len(missing), 'trained tensor')}, for example {min(missing)}",
            hint="delete this checkpoint; the training then resumes from an earlier one",
        )
