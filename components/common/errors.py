"""Errors told to people: what is wrong, and the next thing to try.

Every error a user can cause is a TunelineError. The command line prints its message and hint and ends with its exit code; a pipeline
step writes it to the run's events so that the run names the stage, the cause and the hint. Anything else is a bug of ours and keeps
its traceback in the stage's log.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from components.common.paths import existing

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again, the work is resumable
GOES_ON = "Run the same command again: it goes on from where it stopped."


class TunelineError(Exception):
    """A failure with a kind (stable, for scripts), a message (what happened) and a hint (what to do)."""

    kind = "failed"
    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "", stage: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.stage = stage
        self.details: dict[str, str] = {}  # what a script goes on with, such as the id of a run

    def as_dict(self) -> dict[str, str]:
        """The object that `--json` prints under "error": these four keys, and the details there are."""
        contract = {"stage": self.stage, "kind": self.kind, "message": self.message, "hint": self.hint}
        return {**contract, **self.details, **contract}

    @staticmethod
    def from_dict(data: dict[str, Any], exit_code: int = EXIT_FAILED) -> TunelineError:
        """Rebuild an error that a step in another process wrote down."""
        error = TunelineError(data["message"], hint=data.get("hint", ""), stage=data.get("stage", ""))
        error.kind = data.get("kind", TunelineError.kind)
        error.exit_code = exit_code
        return error


class ConfigurationError(TunelineError):
    """Configuration that cannot be meant: raised before any work is done."""

    kind = "configuration"
    exit_code = EXIT_USAGE


class UsageError(TunelineError):
    """A command line that cannot be meant."""

    kind = "usage"
    exit_code = EXIT_USAGE


class InputError(TunelineError):
    """Data that was read and cannot be used: an empty source, too few rows for the split, an unknown format."""

    kind = "input"


class ArtifactDamagedError(TunelineError):
    """A file of a finished artifact is not what its manifest says, or the artifact was never finished."""

    kind = "artifact_damaged"


class OutputOccupiedError(TunelineError):
    """The output folder holds something else."""

    kind = "output_occupied"
    exit_code = EXIT_USAGE


class EngineMissingError(TunelineError):
    """An engine that the step needs (Triton, git, an MLflow server) is missing or does not answer."""

    kind = "engine_missing"


class BusyError(TunelineError):
    """Another job works on the very same thing right now."""

    kind = "busy"


class TrainingError(TunelineError):
    """Training went wrong in a way that more steps would not mend."""

    kind = "training"


class RegistryError(TunelineError):
    """The registry refuses: an unknown model or version, or a promotion without an accepted evaluation."""

    kind = "registry"


class DiskFullError(TunelineError):
    """A disk, or a quota, has no space left."""

    kind = "disk_full"


class NotWritableError(TunelineError):
    """A folder that has to be written cannot be."""

    kind = "not_writable"


class InterruptedRunError(TunelineError):
    """The work was interrupted and the same command goes on from where it stopped."""

    kind = "interrupted"
    exit_code = EXIT_INTERRUPTED


# How libraries say what the system told them, where they do not pass the OSError on: SQLite, Rust's safetensors, pyarrow, PyTorch.
NO_SPACE = ("no space left on device", "database or disk is full", "os error 28", "disk quota exceeded", "file write failed")
NEARLY_FULL = 1 << 20  # bytes
NO_WRITING = ("readonly database", "read-only file system", "unable to open database file")


def of_the_machine(error: BaseException, folders: Sequence[Path] = ()) -> TunelineError | None:
    """What the machine refused (no space, no permission to write), told with the folder; None for any other error.

    A failed write does not say where it was: of the folders that tuneline writes to, and those given, it is the first that is full,
    or the one with the least space where what failed was taken away again.
    """
    named = [Path(os.fsdecode(found.filename)) for found in _chain(error) if isinstance(found, OSError) and found.filename]
    if any(_is_no_space(found) for found in _chain(error)):
        places = (*named, *folders, *_written())
        where = next((place for place in places if _free(place) < NEARLY_FULL), min(places, key=_free))
        hint = f"Free some space there. {GOES_ON}"
        return DiskFullError(f"no space left in {_folder(where)}: {_free(where) / 1e6:,.1f} MB are free, and more is needed", hint=hint)
    why = next((why for found in _chain(error) if (why := _no_writing(found))), None)
    if why is None:
        return None
    refused = next((folder for folder in (*named, *folders, *_written()) if not os.access(existing(folder), os.W_OK)), None)
    return NotWritableError(
        f"{_folder(refused) if refused else 'a folder'} cannot be written: {why}",
        hint="Let this user write there, or name another folder; then run the same command again.",
    )


def unexpected(error: BaseException, where: str) -> TunelineError:
    """A fault of ours, as it is told; `where` says what of its traceback."""
    told = TunelineError(f"{type(error).__name__}: {error}", hint=f"This is a fault of tuneline, not of your input: {where}")
    told.kind = "unexpected"
    return told


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _is_no_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(sign in str(error).lower() for sign in NO_SPACE)


def _no_writing(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "the file system is read-only"
    if isinstance(error, PermissionError) and error.filename and not os.access(existing(Path(os.fsdecode(error.filename))), os.W_OK):
        return "permission denied"
    return "the file system is read-only" if any(sign in str(error).lower() for sign in NO_WRITING) else None


def _written() -> list[Path]:
    """The folders that tuneline writes to, as its environment names them."""
    names = ("TUNELINE_WORKDIR", "TUNELINE_STORE", "TUNELINE_STATE", "TUNELINE_CACHE")
    named = [os.environ[name] for name in names if os.environ.get(name)]
    return [*(Path(name) for name in named if "://" not in name), Path(tempfile.gettempdir()), Path.cwd()]


def _folder(path: Path) -> Path:
    """The folder that is there of the way to a path."""
    found = existing(path.absolute())
    return found if found.is_dir() else found.parent


def _free(folder: Path) -> float:
    try:
        return shutil.disk_usage(existing(folder)).free
    except OSError:
        return float("inf")
