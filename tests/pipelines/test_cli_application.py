"""Shared setup of commands: the screen is released before a result or an error is printed."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from components.common.runtime import reporters
from components.common.runtime.errors import UsageError
from components.common.runtime.reporters import SilentReporter
from pipelines.cli import application
from tests.pipelines.command import COMMAND, environment, run_in_process


class ScreenReporter(SilentReporter):
    """A reporter that occupies the screen until it is closed."""

    is_active = True

    def close(self) -> None:
        self.is_active = False


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> ScreenReporter:
    reporter = ScreenReporter()
    monkeypatch.setattr(reporters, "create_console_reporter", lambda **_: reporter)
    monkeypatch.setenv("TUNELINE_WORKDIR", "before")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///before.db")
    return reporter


def test_screen_is_released_after_a_command(screen: ScreenReporter, tmp_path: Path) -> None:
    with application.open_workdir("curate", False, tmp_path) as (reporter, work):
        assert reporter is screen
        assert screen.is_active
        assert work.root == tmp_path
    assert not screen.is_active


def test_screen_is_released_before_an_error_is_raised(screen: ScreenReporter, tmp_path: Path) -> None:
    with pytest.raises(UsageError), application.open_workdir("curate", False, tmp_path):
        raise UsageError("wrong")
    assert not screen.is_active


def test_workdir_is_created_only_for_writing_commands(screen: ScreenReporter, tmp_path: Path) -> None:
    workdir = tmp_path / "wd"
    with application.open_workdir("lineage", False, workdir, "sqlite:///given.db") as (_, work):
        assert work.tracking_uri == "sqlite:///given.db"
        assert not workdir.exists()
    with application.open_workdir("promote", False, workdir, "", writes=True) as (_, work):
        assert work.tracking_uri == "sqlite:///given.db"
        assert workdir.is_dir()


@pytest.mark.parametrize(("options", "is_warned"), [((), True), (("-c", "customization.yaml"), False)])
def test_unused_configuration_of_the_folder_is_reported(
    tmp_path: Path, options: tuple[str, ...], is_warned: bool
) -> None:
    (tmp_path / "customization.yaml").write_text("seed: 1\n", encoding="utf-8")
    process = run_in_process("compile", *options, "-o", "pipeline.yaml", "--json", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert ("customization.yaml in this folder is not used" in process.stderr) == is_warned


def test_escape_sequences_in_results_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    application.print_result({"text": "\x1b[2J"}, False, ["a\tb", "the card says \x1b[2J\x9b31m"])
    assert capsys.readouterr().out == "a\tb\nthe card says \\x1b[2J\\x9b31m\n"
    application.print_result({"text": "\x1b[2J"}, True, [])
    assert capsys.readouterr().out == '{"text": "\\u001b[2J"}\n'


@pytest.mark.parametrize(
    ("shell", "registration"),
    [
        ("bash", "complete -o default -F _tuneline_completion tuneline"),
        ("zsh", "#compdef tuneline"),
        ("fish", "complete --command tuneline"),
    ],
)
def test_completion_script_is_printed(tmp_path: Path, shell: str, registration: str) -> None:
    process = run_in_process(cwd=tmp_path, _TUNELINE_COMPLETE=f"source_{shell}")
    assert process.returncode == 0
    assert registration in process.stdout


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """Bash runs the command that it completes, as it does when a user presses Tab."""
    program = tmp_path / "bin" / "tuneline"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "completion.bash"
    script.write_text(run_in_process(cwd=tmp_path, _TUNELINE_COMPLETE="source_bash").stdout)
    lines = [f"source {shlex.quote(str(script))}"]
    for words in (["tuneline", "compa"], ["tuneline", "status", "--wa"]):
        lines += [
            f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}",
            "_tuneline_completion tuneline",
            "echo ${COMPREPLY[@]}",
        ]
    path = f"{program.parent}:{os.environ['PATH']}"
    process = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert process.stdout.splitlines() == ["compare", "--watch"], process.stderr


def test_help_shows_no_type_beside_a_flag(tmp_path: Path) -> None:
    for command in ([], ["status"], ["registry", "audit"]):
        help_text = run_in_process(*command, "--help", cwd=tmp_path).stdout
        assert "--help" in help_text
        assert "bool" not in help_text
