"""Which checkpoints are whole.

transformers takes the highest-numbered folder for the newest checkpoint without looking whether it was written to its end. Here a
marker with the size and digest of every file is written last of all, and only a folder that agrees with its marker is resumed from:
its files are pickles, read (weights_only) after their digests check.
"""

from __future__ import annotations

import json
from pathlib import Path

from components.common import artifacts, hashing
from components.common.progress import Reporter

MARKER = "complete.json"


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


def newest(folder: Path, reporter: Reporter) -> Path | None:
    """The newest whole checkpoint that has steps left, or None. A torn one is skipped, and said.

    One saved after the last step is passed over: the trainer would do another step before it looks whether any is left. The steps from
    the checkpoint before are done again, with the same result.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        if is_complete(checkpoint):
            if _has_steps_left(checkpoint):
                return checkpoint
            continue
        reporter.note(f"{checkpoint.name} is not whole and is skipped")
    return None


def _has_steps_left(checkpoint: Path) -> bool:
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return bool(state["global_step"] < state["max_steps"])


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint was saved after."""
    return int(checkpoint.name.rsplit("-", 1)[1])
