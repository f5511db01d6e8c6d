"""`tuneline chat` with packages that it serves itself, by real Triton servers. Long tier: each server takes seconds of CPU."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipelines.chat.test_chat_command import read_until
from tests.pipelines.command import COMMAND, answer, environment, refusal

pytestmark = [pytest.mark.long, pytest.mark.pipeline, pytest.mark.triton, pytest.mark.mlflow]


def test_registered_version_and_package_give_the_same_answer(first: dict[str, Any], project: Path) -> None:
    expected = json.loads((Path(first["artifacts"]["repository"]) / "proof.json").read_text())["answers"][0]
    # Other tests of the same project register further versions, which move the aliases.
    reference = f"{first['mlflow']['model_name']}@{first['mlflow']['model_version']}"
    answers = [
        answer("chat", target, "--prompt", expected["prompt"], *options, cwd=project)
        for target, options in ((first["artifacts"]["repository"], ()), (reference, ("--workdir", "wd")))
    ]
    for each in answers:
        assert each["answer"].startswith(expected["text"])
        assert each["usage"]["completion_tokens"] > 0
    assert answers[0]["answer"] == answers[1]["answer"]


def test_version_and_alias_that_do_not_exist_are_named(first: dict[str, Any], project: Path) -> None:
    name = first["mlflow"]["model_name"]
    for reference, message in ((f"{name}@nobody", "no version with the alias nobody"), ("other@champion", "other")):
        error = refusal(1, "chat", reference, "--prompt", "Hello", "--workdir", "wd", cwd=project)
        assert message in error["message"]


def test_server_runs_as_long_as_the_chat(first: dict[str, Any], project: Path) -> None:
    terminal, end = pty.openpty()
    command = [*COMMAND, "chat", first["artifacts"]["repository"]]
    chat = subprocess.Popen(command, cwd=project, env=environment(), stdin=end, stdout=end, stderr=end)
    os.close(end)
    try:
        shown = read_until(terminal, "> ")
        page = shown.partition("chat page: ")[2].split()[0]
        with urllib.request.urlopen(page, timeout=30) as response:
            assert b"<title>Chat" in response.read()
        children = psutil.Process(chat.pid).children(recursive=True)
        assert "tritonserver" in {child.name() for child in children}
        chat.send_signal(signal.SIGINT)
        read_until(terminal, "/quit ends the chat")
        os.write(terminal, b"/quit\n")  # Ctrl-D would be lost if the terminal has no prompt yet
        assert chat.wait(timeout=60) == 0
        assert [child for child in children if child.is_running()] == []
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)
