"""`tuneline chat` in the terminal, with the gateway in front of models that answer from a script."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.gateway import api_keys
from tests.pipelines.chat.fake_models import FakeModels, running_gateway
from tests.pipelines.command import COMMAND, environment, refusal, run_in_process

TIMEOUT_SECONDS = 120.0  # on a busy machine, a new Python takes long to start


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[str, FakeModels]]:
    models = FakeModels()
    with running_gateway(models) as url:
        yield url, models


def converse(url: str, lines: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> tuple[str, str]:
    """Return what a chat with these lines prints on standard output and standard error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    result = run_in_process("chat", url, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_one_answer_as_json(gateway: tuple[str, FakeModels], tmp_path: Path) -> None:
    url, models = gateway
    options = ("--system", "Be brief.", "--model", "registered-other", "--json")
    result = json.loads(run_in_process("chat", f"{url}/v1", "--prompt", "Hello", *options, cwd=tmp_path).stdout)
    assert result.pop("seconds") >= result.pop("first_token_seconds") > 0
    usage = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    assert result == {"answer": "other 2 {} Hello", "model": "other", "version": "8", "usage": usage}
    roles = [message["role"] for message in models.requests[-1]["messages"]]
    assert roles == ["system", "user"]


def test_one_answer_as_text_has_no_control_characters(gateway: tuple[str, FakeModels], tmp_path: Path) -> None:
    result = run_in_process("chat", gateway[0], "--prompt", "controls", cwd=tmp_path)
    assert result.stdout == "red \\x1b[31m and \\x07 bell\n"


def test_conversation_keeps_its_turns_and_runs_commands(
    gateway: tuple[str, FakeModels], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, models = gateway
    before = len(models.requests)
    lines = "one\n/system Be brief.\n/set temperature=0.5\n/set max_tokens=9\ntwo\n/reset\n/set temperature=\n/model other\n//three\n"
    output, _ = converse(url, lines, monkeypatch, tmp_path)
    assert output == (
        'echo 1 {} one\necho 4 {"max_tokens": 9, "temperature": 0.5} two\nother 2 {"max_tokens": 9} /three\n'
    )
    contents = [[message["content"] for message in request["messages"]] for request in models.requests[before:]]
    assert contents == [["one"], ["Be brief.", "one", "echo 1 {} one", "two"], ["Be brief.", "/three"]]


def test_mistakes_are_explained_and_the_chat_goes_on(
    gateway: tuple[str, FakeModels], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, models = gateway
    lines = "/what\n/set speed=9\n/set seed=fast\n/model none\nrefuse\nbreak\nHello\n/model\n/quit\nnot sent\n"
    output, errors = converse(url, lines, monkeypatch, tmp_path)
    for text in (
        "/what is not a command",
        "speed is not a setting; expected temperature, top_p, max_tokens, seed",
        "seed is 'fast'; expected a whole number",
        "has no model 'none'; existing models: echo, other",
        "the prompt has 9000 tokens; at most 2048 are allowed",
        "the answer was interrupted: the model failed to answer",
        "* echo\n  other",
    ):
        assert text in errors
    assert output.endswith("echo 1 {} Hello\n"), "refused and broken answers are not part of the conversation"
    assert models.requests[-1]["messages"] == [{"role": "user", "content": "Hello"}]


def test_key_comes_from_the_environment(tmp_path: Path) -> None:
    secret = api_keys.create_key(tmp_path / "keys.yaml", "team", {})
    with running_gateway(FakeModels(), keys=tmp_path / "keys.yaml") as url:
        error = refusal(2, "chat", url, "--prompt", "Hello", cwd=tmp_path)
        assert "status 401" in error["message"]
        assert "TUNELINE_API_KEY" in error["hint"]
        result = run_in_process("chat", url, "--prompt", "Hello", cwd=tmp_path, TUNELINE_API_KEY=secret)
    assert result.stdout == "echo 1 {} Hello\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("http://127.0.0.1:9",), "--json requires --prompt"),
        (("http://127.0.0.1:9", "--prompt", " "), "--prompt is empty"),
        (("no/such/folder", "--prompt", "Hello"), "is neither a URL, nor an existing folder, nor NAME@ALIAS"),
        (("package/repositry", "--prompt", "Hello"), "the folder package/repositry does not exist"),
        (("ftp://host", "--prompt", "Hello"), "is neither a URL, nor an existing folder, nor NAME@ALIAS"),
        (("http://", "--prompt", "Hello"), "is not the URL of a server"),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "package" / "repository").mkdir(parents=True)
    assert message in refusal(2, "chat", *arguments, cwd=tmp_path)["message"]


def test_folder_that_is_not_a_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = run_in_process("chat", "folder", "--prompt", "Hello", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("tuneline: the folder folder is not a package")
    assert "use folder@champion" in result.stderr


def test_ctrl_c_stops_the_answer_and_sigterm_ends_the_chat(gateway: tuple[str, FakeModels], tmp_path: Path) -> None:
    """A terminal and signals need a child process."""
    url, models = gateway
    terminal, end = pty.openpty()
    command = [*COMMAND, "chat", url]
    chat = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdin=end, stdout=end, stderr=end)
    os.close(end)
    try:
        read_until(terminal, "> ")
        os.write(terminal, b"endless\n")
        read_until(terminal, "word word")
        chat.send_signal(signal.SIGINT)
        read_until(terminal, "stopped; Ctrl-D or /quit ends the chat")
        os.write(terminal, b"Hello\n")
        assert "version 7, 10 + 4 tokens" in read_until(terminal, "tokens/s")
        contents = [message["content"] for message in models.requests[-1]["messages"]]
        assert contents[::2] == ["endless", "Hello"]
        assert contents[1].startswith("word word")
        chat.send_signal(signal.SIGTERM)
        assert chat.wait(timeout=TIMEOUT_SECONDS) == 128 + signal.SIGTERM
    finally:
        chat.kill()
        chat.wait()
        os.close(terminal)


def read_until(terminal: int, text: str) -> str:
    """Read from a terminal until it shows the text."""
    shown, deadline = "", time.monotonic() + TIMEOUT_SECONDS
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"the terminal does not show {text!r} but:\n{shown[-2000:]}"
        shown += os.read(terminal, 4096).decode(errors="replace")
        assert time.monotonic() < deadline, f"the terminal does not show {text!r} but:\n{shown[-2000:]}"
    return shown
