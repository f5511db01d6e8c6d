"""The commands of CONTRIBUTING.md in a clone; `make` only prints its commands, since `make test` takes minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_commands import BLOCK
from tests.pipelines.command import ROOT

PAGE = ROOT / "CONTRIBUTING.md"


def run(command: str, clone: Path) -> str:
    path = f"{clone / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(clone)}
    result = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that are tracked, or new and not ignored, to a repository with this environment as its .venv and a `make` that only prints."""
    folder = tmp_path_factory.mktemp("clone")
    run(
        f"git -C '{ROOT}' ls-files -z --cached --others --exclude-standard | tar -C '{ROOT}' --null -T - -c | tar -x",
        folder,
    )
    run("git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm all", folder)
    (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "make").write_text('#!/bin/sh\nexec /usr/bin/make -n -o .venv/.ready "$@"\n')
    (folder / "bin" / "make").chmod(0o755)
    return folder


def test_page_commands_succeed_and_generated_files_are_current(clone: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 2
    for block in blocks:
        run(block, clone)
    assert run("git status --porcelain --untracked-files=no", clone) == ""


def test_pre_commit_runs_the_hooks(clone: Path) -> None:
    run(".venv/bin/pre-commit run ruff-check --files components/__init__.py", clone)
    (clone / "components" / "unformatted.py").write_text("x  =  1\n")
    run("git add components/unformatted.py", clone)
    assert "ruff format" in run("! .venv/bin/pre-commit run ruff-format --files components/unformatted.py", clone)
    run("git rm -qf components/unformatted.py", clone)


def test_links_and_named_files_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    names = re.findall(r"`((?:components|pipelines|tests|docs)/[\w./]+)`", text)
    assert [name for name in [*targets, *names] if not (ROOT / name).exists()] == []
