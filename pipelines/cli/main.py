"""The console script: errors as people and scripts are told them, and the exit codes of the contract."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from components.common import process
from components.common.errors import InterruptedRunError, TunelineError, UsageError, of_the_machine, unexpected
from components.common.places import DEFAULT_WORKDIR
from pipelines.cli import run, doctor, runs, stages, registry, deploying, reproduce, data, models, housekeeping, cluster, storage
from pipelines.cli.app import app

INTERRUPTED_BY_TYPER = 130  # what typer makes of a KeyboardInterrupt


def main() -> None:
    """The console script: run the command, tell errors as errors are told, exit with the contract's codes."""
    arguments = sys.argv[1:]
    process.hear_stops()
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED_BY_TYPER:
            code = _tell(InterruptedRunError("interrupted", hint="Run the same command again."), arguments)
    except TunelineError as error:
        code = _tell(error, arguments)
    except Exception as error:
        code = _tell(_from_other(error, arguments), arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _from_other(error: Exception, arguments: list[str]) -> TunelineError:
    """What click or the machine says, as an error for people; anything else is a fault of ours and keeps its traceback."""
    if hasattr(error, "format_message"):
        hint = "tuneline --help lists the commands, tuneline COMMAND --help their options."
        return UsageError(error.format_message(), hint=hint)
    named = [Path(argument) for argument in arguments if not argument.startswith("-")]
    told = of_the_machine(error, [*named, Path(DEFAULT_WORKDIR)])
    if told is None and isinstance(error, OSError):
        told = _refused_path(error)
    if told is None:
        traceback.print_exception(error)
        told = unexpected(error, "please report the traceback.")
    return told


def _refused_path(error: OSError) -> TunelineError:
    """What the system said of a path. A file where a folder is meant, or nothing where something is, is wrong usage."""
    message = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    if isinstance(error, (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)):
        return UsageError(message, hint="Check the paths of the command: a folder cannot stand where a file is, nor the other way round.")
    told = TunelineError(message, hint="Check the path and its permissions.")
    told.kind = "system"
    return told


def _tell(error: TunelineError, arguments: list[str]) -> int:
    """Print an error for a person, or as an object for a script."""
    process.end_stop()
    if "--json" in arguments:
        print(json.dumps({"error": error.as_dict()}))
    else:
        where = f"{error.stage}: " if error.stage else ""
        print(f"tuneline: {where}{error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
    return error.exit_code
