"""Console script: run a command, report errors to people or scripts, and set the exit code."""

from __future__ import annotations

import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
import typer.main

from components.common.runtime import process_control
from components.common.runtime.errors import (
    InterruptedRunError,
    TunelineError,
    UsageError,
    translate_system_error,
    wrap_unexpected_error,
)
from components.common.workspace.artifact_store import DEFAULT_WORKDIR
from pipelines.cli import (
    pipeline_run,
    doctor,
    run_history,
    comparison,
    costs,
    stage_commands,
    registry,
    verification,
    exports,
    release_policy,
    deployment,
    gateway,
    chat,
    explain,
    reproduction,
    synthesize,
    dataset_versions,
    base_models,
    garbage_collection,
    kubeflow,
    sizing,
    storage_probing,
    storage_benchmarking,
    traffic,
    captured_traffic,
    traffic_drift,
    shadow_comparison,
    retraining,
)
from pipelines.cli.application import app, print_text

TYPER_INTERRUPT_CODE = 130  # typer's exit code for a KeyboardInterrupt
# Only in an installation; a checkout has these pages in docs/, as the hints say.
INSTALLED_PAGES = Path(__file__).parents[2] / "tuneline" / "docs"
# Commands of other tools, and the command that does this here.
COMMANDS_OF_OTHER_TOOLS = {
    "eval": "evaluate", "fine-tune": "finetune", "generate": "chat", "inference": "chat",
    "prepare": "curate", "preprocess": "curate", "sft": "finetune", "train": "finetune", "tune": "finetune",
}  # fmt: skip


def main() -> None:
    """Run the command, report its error, and exit with the documented code."""
    arguments = sys.argv[1:]
    process_control.restrict_new_files()
    process_control.install_stop_handlers()
    process_control.relax_garbage_collector()
    try:
        command = typer.main.get_command(app)
        hide_flag_types(command)
        code = command(arguments, prog_name="tuneline", standalone_mode=False)
        if code == TYPER_INTERRUPT_CODE:
            code = _report_error(InterruptedRunError("interrupted", hint="Run the same command again."), arguments)
    except TunelineError as error:
        code = _report_error(error, arguments)
    except Exception as error:
        code = _report_error(_convert_error(error, arguments), arguments)
    sys.exit(code if isinstance(code, int) else 0)


def hide_flag_types(command: Any) -> None:
    """Omit the type `<bool>`, which typer 0.26 and later print beside each flag, from the help of a command tree."""
    for option in command.get_params(typer.Context(command)):  # includes --help
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        hide_flag_types(subcommand)


def _convert_error(error: Exception, arguments: list[str]) -> TunelineError:
    """Convert an error of click or the operating system; print the traceback of any other error, which is a bug."""
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        hint = f"Run `{context.command_path} --help`." if context else "Run `tuneline --help`."
        message = error.format_message()
        option = getattr(error, "option_name", "").lstrip("-")
        for parameter in context.command.params if context and option else []:
            if parameter.param_type_name == "argument" and parameter.name.startswith(option):
                hint = f"{parameter.name.upper()} has no option name: omit --{option}."
        if arguments and message.startswith("No such command") and (known := COMMANDS_OF_OTHER_TOOLS.get(arguments[0])):
            message = f"No such command '{arguments[0]}'. Did you mean '{known}'?"
        return UsageError(message, hint=hint)
    paths = [Path(argument) for argument in arguments if not argument.startswith("-")]
    if translated := translate_system_error(error, [*paths, Path(DEFAULT_WORKDIR)]):
        return translated
    if isinstance(error, OSError):
        message = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
        if isinstance(error, (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)):
            return UsageError(
                message, hint="Check that each path in the command exists and is a file or a folder as expected."
            )
        converted = TunelineError(message, hint="Check the path and its permissions.")
        converted.kind = "system"
        return converted
    print_text("".join(traceback.format_exception(error)), end="", file=sys.stderr)
    return wrap_unexpected_error(error, "See the traceback above.")


def _report_error(error: TunelineError, arguments: list[str]) -> int:
    """Print an error for people, or as a JSON object for scripts, and return its exit code."""
    process_control.acknowledge_stop()
    hint = error.hint
    if INSTALLED_PAGES.exists():
        hint = re.sub(r"(?<![\w/.-])docs/(?=how-to/|reference/)", f"{INSTALLED_PAGES}/", hint)
    if "--json" in arguments:
        print(json.dumps({"error": {**error.as_dict(), "hint": hint}}))
    else:
        where = f"{error.stage}: " if error.stage else ""
        print(f"tuneline: {where}{error.message}", file=sys.stderr)
        if hint:
            print(f"  {hint}", file=sys.stderr)
    return error.exit_code
