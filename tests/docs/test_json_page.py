"""docs/reference/json.md has a section for each command with --json, and the check of its keys finds others (fast tier: no command runs)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.cli import application, main  # noqa: F401 - main registers the commands
from tests import json_reference
from tests.pipelines.command import get_command


def list_commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of all commands with --json."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from list_commands(inner, (*words, name))
    if any("--json" in parameter.opts for parameter in command.params):
        yield words


def test_each_command_with_json_has_a_section() -> None:
    commands = list(list_commands(get_command(application.app)))
    assert len(commands) > 50
    # `tuneline chat` prints JSON only with --prompt.
    missing = [words for words in commands if not json_reference.find_heading([*words, "--prompt"])]
    assert missing == []


def test_check_finds_undocumented_keys() -> None:
    result = {"run": "a", "state": "killed", "stage": None, "surprise": {"inner": [1]}}
    assert json_reference.find_undocumented_keys(["cancel", "a"], result) == ["surprise.inner[]"]
    in_a_list = {"findings": [{"name": "x", "colour": "red"}], "ok": True}
    assert json_reference.find_undocumented_keys(["doctor"], in_a_list) == ["findings[].colour"]
    assert "no section" in json_reference.find_undocumented_keys(["brew", "coffee"], {})[0]
