"""The interface that scripts depend on equals a frozen file: options of every command, manifest fields, error kinds, exit codes.

A fast test: it imports the command line and starts nothing. After an intended change run `python -m tests.pipelines.test_contract`
and describe the change in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from components.common.artifacts.artifact_folder import Manifest
from components.common.runtime.errors import TunelineError
from pipelines.cli.main import app

GOLDEN = Path(__file__).parent / "golden" / "contract.json"
STAGES = ("data_curation", "data_versioning", "fine_tuning", "evaluation", "triton_packaging", "model_registry")


def list_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from list_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, [describe_parameter(parameter) for parameter in command.params]


def describe_parameter(parameter: Any) -> str:
    name = parameter.name if parameter.param_type_name == "argument" else "/".join(sorted(parameter.opts))
    flags = [flag for flag in ("required", "multiple") if getattr(parameter, flag, False)]
    return " ".join([name, f"default={parameter.default!r}", *flags])


def list_error_classes(base: type[TunelineError]) -> Iterator[type[TunelineError]]:
    yield base
    for subclass in base.__subclasses__():
        yield from list_error_classes(subclass)


def collect_contract() -> dict[str, Any]:
    for stage in STAGES:
        importlib.import_module(f"components.{stage}.stage")
    schema = Manifest.model_json_schema()
    return {
        "commands": dict(list_commands(typer.main.get_command(app))),
        "manifest": {
            name: sorted(model["properties"]) for name, model in {"Manifest": schema, **schema["$defs"]}.items()
        },
        "exit_codes": {error.kind: error.exit_code for error in list_error_classes(TunelineError)},
    }


def test_commands_manifests_and_exit_codes_equal_the_frozen_file() -> None:
    frozen = json.loads(GOLDEN.read_text(encoding="utf-8"))
    current = json.loads(json.dumps(collect_contract()))
    assert current["commands"] == frozen["commands"]
    assert current["manifest"] == frozen["manifest"]
    # Other tests import modules with further errors.
    assert {kind: current["exit_codes"].get(kind) for kind in frozen["exit_codes"]} == frozen["exit_codes"]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(collect_contract(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
