"""Errors told to people: what is wrong, and the next thing to try.

Every error a user can cause is a TunelineError. The command line prints its message and hint and ends with its exit code; a pipeline
step writes it to the run's events so that the run names the stage, the cause and the hint. Anything else is a bug of ours and keeps
its traceback in the stage's log.
"""

from __future__ import annotations

from typing import Any

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again, the work is resumable


class TunelineError(Exception):
    """A failure with a kind (stable, for scripts), a message (what happened) and a hint (what to do)."""

    kind = "failed"
    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "", stage: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.stage = stage

    def as_dict(self) -> dict[str, str]:
        """The object that `--json` prints under "error"."""
        return {"stage": self.stage, "kind": self.kind, "message": self.message, "hint": self.hint}

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


class TrainingError(TunelineError):
    """Training went wrong in a way that more steps would not mend."""

    kind = "training"


class RegistryError(TunelineError):
    """The registry refuses: an unknown model or version, or a promotion without an accepted evaluation."""

    kind = "registry"


class InterruptedRunError(TunelineError):
    """The work was interrupted and the same command goes on from where it stopped."""

    kind = "interrupted"
    exit_code = EXIT_INTERRUPTED
