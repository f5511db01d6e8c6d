"""User-facing errors. Each error has a stable kind, a message, a hint and an exit code.

The command line prints the message and the hint, and exits with the code. A pipeline step writes the error to the run's
events. Any other exception is a bug in tuneline; its traceback is in the stage's log.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from components.common.runtime.filesystem import find_nearest_existing_path
from components.common.runtime.terminal import escape_controls

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: temporary failure, retry
RESUME_HINT = "Run the same command again to resume."


class TunelineError(Exception):
    """A failure with a stable kind, a message (the problem) and a hint (the action)."""

    kind = "failed"
    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "", stage: str = "") -> None:
        self.message = escape_controls(message)
        super().__init__(self.message)
        self.hint = escape_controls(hint)
        self.stage = stage
        self.details: dict[str, str] = {}  # additional keys for scripts, such as the run ID

    def as_dict(self) -> dict[str, str]:
        """Return the object under the key "error" of `--json` output: stage, kind, message, hint and the details."""
        contract = {"stage": self.stage, "kind": self.kind, "message": self.message, "hint": self.hint}
        return {**contract, **self.details, **contract}

    @staticmethod
    def from_dict(data: Mapping[str, str], exit_code: int = EXIT_FAILED) -> TunelineError:
        """Rebuild an error that a step in another process recorded.

        Args:
            data: the object that `as_dict` returned.
        """
        error = TunelineError(data["message"], hint=data.get("hint", ""), stage=data.get("stage", ""))
        error.kind = data.get("kind", TunelineError.kind)
        error.exit_code = exit_code
        return error


class ConfigurationError(TunelineError):
    """An invalid configuration, detected before the run starts."""

    kind = "configuration"
    exit_code = EXIT_USAGE


class UsageError(TunelineError):
    """An invalid command line."""

    kind = "usage"
    exit_code = EXIT_USAGE


class InputError(TunelineError):
    """Input data that cannot be used: an empty source, too few rows for the split, an unknown format."""

    kind = "input"


class ArtifactDamagedError(TunelineError):
    """An unfinished artifact, or an artifact with a file that differs from the manifest."""

    kind = "artifact_damaged"


class OutputOccupiedError(TunelineError):
    """An output folder that contains other files."""

    kind = "output_occupied"
    exit_code = EXIT_USAGE


class EngineMissingError(TunelineError):
    """A required engine (Triton, git, an MLflow server) that is not installed or does not answer."""

    kind = "engine_missing"


class BusyError(TunelineError):
    """Another job holds the lock on the same resource."""

    kind = "busy"


class TrainingError(TunelineError):
    """A training failure that a retry or more steps would not fix."""

    kind = "training"


class RegistryError(TunelineError):
    """A rejected registry operation: an unknown model or version, or a promotion without an accepted evaluation."""

    kind = "registry"


class DiskFullError(TunelineError):
    """A disk or a quota without free space."""

    kind = "disk_full"


class NotWritableError(TunelineError):
    """A folder without write access."""

    kind = "not_writable"


# The service, the disk or the permission is missing at the moment; not a finding about the files.
TEMPORARY_ERRORS = (EngineMissingError, DiskFullError, NotWritableError)


class InterruptedRunError(TunelineError):
    """An interruption; the same command resumes the work."""

    kind = "interrupted"
    exit_code = EXIT_INTERRUPTED


# Messages of libraries that do not chain the OSError: SQLite, Rust's safetensors, pyarrow, PyTorch.
NO_SPACE_MESSAGES = (
    "no space left on device",
    "database or disk is full",
    "os error 28",
    "disk quota exceeded",
    "file write failed",
    "unexpected pos ",
    "basic_ios::clear: iostream error",
)
NEARLY_FULL_BYTES = 1 << 20
READ_ONLY_MESSAGES = ("readonly database", "read-only file system", "unable to open database file")


def translate_system_error(error: BaseException, folders: Sequence[Path] = ()) -> TunelineError | None:
    """Return a DiskFullError or NotWritableError with the folder; None for any other error.

    The error of a failed write may lack the path. Candidates are the paths in the error, `folders`, and the folders to
    which tuneline writes. On a full disk, the first full candidate is reported. If no candidate is full, because the
    incomplete file was deleted, the candidate with the least free space is reported.
    """
    chain = list(iterate_exception_chain(error))
    named = [Path(os.fsdecode(e.filename)) for e in chain if isinstance(e, OSError) and e.filename]
    candidates = (*named, *folders, *_list_configured_folders())
    if any(_is_no_space(e) for e in chain):
        full = next((path for path in candidates if _get_free_bytes(path) < NEARLY_FULL_BYTES), None)
        full = full or min(candidates, key=_get_free_bytes)
        return DiskFullError(
            f"no space left in {_find_nearest_folder(full)}: {_get_free_bytes(full) / 1e6:,.1f} MB free",
            hint="Free some disk space, then run the same command again to resume.",
        )
    reason = next(filter(None, map(_describe_write_error, chain)), None)
    if reason is None:
        return None
    denied = next((path for path in candidates if not os.access(find_nearest_existing_path(path), os.W_OK)), None)
    return NotWritableError(
        f"{_find_nearest_folder(denied) if denied else 'a folder'} cannot be written: {reason}",
        hint="Grant this user write access, or choose another folder.",
    )


def wrap_unexpected_error(error: BaseException, traceback_location: str) -> TunelineError:
    """Return a TunelineError for a bug in tuneline.

    Args:
        traceback_location: text about the location of the traceback, for the hint.
    """
    wrapped = TunelineError(
        f"{type(error).__name__}: {error}", hint=f"Report this bug in tuneline: {traceback_location}"
    )
    wrapped.kind = "unexpected"
    return wrapped


def iterate_exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that error, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def get_first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or else the name of its class."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def _is_no_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(message in str(error).lower() for message in NO_SPACE_MESSAGES)


def _describe_write_error(error: BaseException) -> str | None:
    """Return the reason of a denied write; None for any other error."""
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "the file system is read-only"
    if (
        isinstance(error, PermissionError)
        and error.filename
        and not os.access(find_nearest_existing_path(Path(os.fsdecode(error.filename))), os.W_OK)
    ):
        return "permission denied"
    read_only = any(message in str(error).lower() for message in READ_ONLY_MESSAGES)
    return "the file system is read-only" if read_only else None


def _list_configured_folders() -> list[Path]:
    """Return the folders in the environment to which tuneline writes."""
    names = ("TUNELINE_WORKDIR", "TUNELINE_STORE", "TUNELINE_STATE", "TUNELINE_CACHE")
    values = [value for name in names if (value := os.environ.get(name)) and "://" not in value]
    return [*map(Path, values), Path(tempfile.gettempdir()), Path.cwd()]


def _find_nearest_folder(path: Path) -> Path:
    existing = find_nearest_existing_path(path.absolute())
    return existing if existing.is_dir() else existing.parent


def _get_free_bytes(folder: Path) -> float:
    try:
        return shutil.disk_usage(find_nearest_existing_path(folder)).free
    except OSError:
        return float("inf")
