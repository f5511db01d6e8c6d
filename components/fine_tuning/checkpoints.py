"""Which checkpoints are whole, and what they hold beside what the trainer saves.

transformers takes the highest-numbered folder for the newest checkpoint without looking whether it was written to its end. Here a
marker with the size and digest of every file is written last of all, and only a folder that agrees with its marker is resumed from:
its files are pickles, read (weights_only) after their digests check.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing
from components.common.progress import Reporter

MARKER = "complete.json"
# Every tensor that is trained. The adapter that PEFT saves of p-tuning is what its network made, without the network.
TRAINABLE = "trainable.safetensors"
STATE = "trainer_state.json"


def mark_complete(checkpoint: Path) -> None:
    """Write the marker of a checkpoint that has just been saved."""
    files = {p.relative_to(checkpoint).as_posix(): hashing.sha256_file(p) for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    artifacts.write_atomically(checkpoint / MARKER, json.dumps(files, indent=1))


def is_complete(checkpoint: Path) -> bool:
    """Whether every file the marker names is there and unchanged."""
    try:
        files: dict[str, str] = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        return bool(files) and all(hashing.sha256_file(checkpoint / name) == sha for name, sha in files.items())
    except (OSError, ValueError):
        return False


def newest(folder: Path, reporter: Reporter, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> Path | None:
    """The newest whole checkpoint that `fits`, asked with what the trainer knew; None where there is none. A torn one is skipped, and said.

    One whose best checkpoint is gone or torn is skipped too: it could not end as it would have.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        if not is_complete(checkpoint):
            reporter.note(f"{checkpoint.name} is not whole and is skipped")
        elif (best := best_of(checkpoint)) and best != checkpoint and not is_complete(best):
            reporter.note(f"{checkpoint.name} is skipped: the best checkpoint so far, {best.name}, is not whole")
        elif fits(state_of(checkpoint)):
            return checkpoint
    return None


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints and the best.

    Only once a newer one is whole: the trainer's own rotation removes the last but one before the last has its marker, and counts the best
    among those it keeps.
    """
    whole = sorted((c for c in folder.glob("checkpoint-*") if (c / MARKER).exists()), key=step_of, reverse=True)
    if not whole:
        return
    kept = {*whole[:keep], best_of(whole[0])}
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint not in kept and step_of(checkpoint) < step_of(whole[0]):
            shutil.rmtree(checkpoint, ignore_errors=True)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """What the trainer knew after this checkpoint's step."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def best_of(checkpoint: Path) -> Path | None:
    """The checkpoint with the lowest validation loss up to this one, by its step: the folder may have moved. None without validation."""
    step = state_of(checkpoint).get("best_global_step")
    return checkpoint.with_name(f"checkpoint-{step}") if step else None


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint was saved after."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def save_trainable(model: Any, checkpoint: Path) -> None:
    """Write every tensor that is trained, in full precision."""
    from safetensors.torch import save_file

    save_file(
        {name: value.detach().contiguous() for name, value in model.named_parameters() if value.requires_grad}, checkpoint / TRAINABLE
    )


def restore_trainable(model: Any, checkpoint: Path) -> None:
    """Put the weights of a checkpoint into the model: every tensor that is trained, or, in full tuning, the whole model's."""
    import torch
    from safetensors.torch import load_file

    if (checkpoint / TRAINABLE).exists():
        saved = load_file(checkpoint / TRAINABLE)
    else:
        saved = {name: value for path in sorted(checkpoint.glob("model*.safetensors")) for name, value in load_file(path).items()}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in saved.items():
            if name in parameters:  # buffers, and the second name of a tied weight, are no parameters
                parameters[name].copy_(value)
