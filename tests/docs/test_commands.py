"""The commands of the README and the pages run in a folder like a reader's.

The commands of the README are in the long tier, those of the pages in the stress tier: they customize models, start servers and compile
pipelines.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli.main import app
from tests import kubernetes_api, preloaded_server
from tests.data_curation.document_files import build_pdf, pdf_text
from tests.datasets import QUESTION_WORDS
from tests.kfp_api import KfpApi, State, serving
from tests.kubernetes_api import KubernetesApi
from tests.pipelines.capture import traffic
from tests.pipelines.command import PRELOADED, ROOT, environment, get_command
from tests.pipelines.synthesis.stand_in_teacher import serve_teacher
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "components").glob("*/README.md"))]
README, FIRST_RUN = PAGES[0], ROOT / "docs" / "tutorials" / "first-run.md"
UNREACHABLE_PROXY = "http://127.0.0.1:9"  # the documented commands need no network beyond this machine
PROGRAMS = ("tuneline", "make", "python", "pip")


def read_blocks(page: Path) -> list[str]:
    """Return the command blocks of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def write_rows(path: Path) -> None:
    pairs = [(f"How do I {verb} a {noun}?", f"To {verb} a {noun}, open desk {n}.") for n, (verb, noun) in enumerate(QUESTION_WORDS)]  # fmt: skip
    path.write_text("".join(json.dumps({"prompt": q, "completion": a, "source": "desk"}) + "\n" for q, a in pairs))


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a reader's folder: raw data, a model, a configuration, and the programs on the PATH."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("raw.jsonl", "my-tickets.jsonl", "tickets.jsonl"):
        write_rows(folder / name)
    (folder / "archive").mkdir()
    with gzip.open(folder / "archive" / "old.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["Who keeps the archive?", "The archivist keeps it."]])
    with (folder / "helpdesk.csv").open("w", newline="") as file:
        tickets = [[f"I must {v} a {n}", f"It is the {n} of desk {i}.", f"Then {v} it."] for i, (v, n) in enumerate(QUESTION_WORDS)]  # fmt: skip
        csv.writer(file).writerows([["subject", "body", "agent_reply"], *tickets])
    with closing(sqlite3.connect(folder / "support.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject, body, agent_reply, status)")
        closed = [(*ticket, "closed") for ticket in tickets]
        connection.executemany("INSERT INTO tickets (subject, body, agent_reply, status) VALUES (?, ?, ?, ?)", closed)
    with (folder / "pairs.jsonl").open("w") as file:
        for verb, noun in QUESTION_WORDS:
            row = {"prompt": f"May I {verb} a {noun}?", "chosen": f"Yes, {verb} the {noun}.", "rejected": "No."}
            file.write(json.dumps(row) + "\n")
    (folder / "handbook").mkdir()
    (folder / "manuals").mkdir()
    sections = [f"## How to {verb} a {noun}\n\nTo {verb} a {noun}, open desk {n}.\n" for n, (verb, noun) in enumerate(QUESTION_WORDS)]  # fmt: skip
    (folder / "handbook" / "desks.md").write_text("\n".join(["# Desks", *sections]))
    (folder / "manuals" / "pump.pdf").write_bytes(build_pdf([pdf_text("The manual of the pump.", 60, 700)]))
    tiny_model(folder / "my-llama")
    settings = {
        "data_curation": {"sources": [str(folder / "raw.jsonl")]},
        "fine_tuning": {"base_model": str(folder / "my-llama"), "max_steps": 2},
    }
    (folder / "customization.yaml").write_text(
        json.dumps({**settings, "evaluation": {"generations": 0, "suite": "none"}})
    )
    registry = {"model_registry": {"name": "instructed"}}  # no incumbent, so that the chain continues with DPO
    (folder / "sft.yaml").write_text(
        json.dumps({**settings, **registry, "evaluation": {"generations": 0, "suite": "none"}})
    )
    preferences = {"fine_tuning": {"objective": "dpo", "max_steps": 2}, "model_registry": {"name": "preferred"}}
    sources = {"data_curation": {"sources": [str(folder / "pairs.jsonl")]}}
    (folder / "dpo.yaml").write_text(
        json.dumps({**sources, **preferences, "evaluation": {"generations": 0, "suite": "none"}})
    )
    rewarded = {**settings["fine_tuning"], "objective": "grpo", "grpo": {"rewards": [{"kind": "no_repetition"}], "max_answer_tokens": 8}}  # fmt: skip
    (folder / "grpo.yaml").write_text(json.dumps({"fine_tuning": rewarded}))
    scored = {"objective": "reward", "max_steps": 2}
    names = {"model_registry": {"name": "helpfulness"}}
    (folder / "reward.yaml").write_text(json.dumps({**sources, "fine_tuning": scored, **names}))
    scored = {**rewarded, "grpo": {**rewarded["grpo"], "rewards": [{"kind": "reward_model", "model": "previous"}]}}
    del scored["base_model"]
    (folder / "rlhf.yaml").write_text(json.dumps({**settings, "fine_tuning": scored, "evaluation": {"suite": "none"}}))
    (folder / "platform.yaml").write_text("volume: {claim: tuneline}\n")
    shutil.copy(ROOT / "docs" / "examples" / "ci.sh", folder / "ci.sh")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "service").mkdir()
    traffic.write_questions(folder / "service", datetime(2026, 10, 20, 9, tzinfo=UTC), days=22, a_day=30)
    line = {"id": "chatcmpl-0", "key": "a", "correction": "Open desk 3.", "time": "2026-10-20T10:00:00Z"}
    (folder / "service" / "feedback.jsonl").write_text(json.dumps(line) + "\n")
    _write_programs(folder / "bin")
    return folder


def _write_programs(folder: Path) -> None:
    folder.mkdir()
    for program in PROGRAMS:
        path = folder / program
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{ROOT}/tests/docs/shims.py" {program} "$@"\n')
        path.chmod(0o755)
    (folder / "kfp").symlink_to(Path(sys.executable).parent / "kfp")


def run_block(block: str, folder: Path, **extra: str) -> None:
    """Run a block in bash up to the first failure."""
    text = block.replace("/models/my-llama", str(folder / "my-llama")).replace("source .venv/bin/activate", "true")
    text = text.replace("my-project/store/<digest>", '"$(dirname my-project/store/*/tuneline/config.pbtxt)/.."')
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    shims = {"PATH": path, "TUNELINE_ROOT": str(ROOT), "SHIMS": str(folder / "bin"), "POLL_SECONDS": "0.2"}
    variables = environment(**shims, **preloaded_server.get_variables(*PRELOADED), **extra)
    start = time.monotonic()
    result = subprocess.run(
        ["bash", "-e", "-c", text], cwd=folder, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    print(f"{time.monotonic() - start:.0f} s: {block}")
    assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"


@pytest.fixture(scope="module")
def readme_folder(reader_folder: Path) -> Path:
    """Run the commands of the README."""
    for block in read_blocks(README):
        run_block(block, reader_folder)
    return reader_folder


@pytest.fixture(scope="module")
def first_run_folder(readme_folder: Path) -> Path:
    """Run the other commands of the first tutorial; the other pages continue in this folder."""
    for block in read_blocks(FIRST_RUN):
        if block not in read_blocks(README):
            run_block(block, readme_folder)
    return readme_folder


@pytest.fixture(scope="module")
def api() -> KfpApi:
    return KfpApi(script=[State("SUCCEEDED")])


@pytest.mark.long
def test_readme_commands_customize_a_model(readme_folder: Path) -> None:
    assert all(read_blocks(page) for page in (README, FIRST_RUN))
    results = [
        run["result"]
        for path in readme_folder.glob(".tuneline/runs/*/run.json")
        if (run := json.loads(path.read_text())).get("result")
    ]
    assert results
    assert all(Path(result["artifacts"]["model"], "manifest.json").exists() for result in results)


@pytest.mark.stress  # half a minute of CPU per page; the fast tier checks the options of the commands
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in (README, FIRST_RUN) and read_blocks(page)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_page_commands_succeed(page: Path, first_run_folder: Path, api: KfpApi) -> None:
    block_count = 0
    with (
        serving(api) as kubeflow,
        kubernetes_api.serving(KubernetesApi(kubernetes_api.minimal_objects())) as cluster,
        serve_teacher() as teacher,
    ):
        config = kubernetes_api.kubeconfig(first_run_folder / "kubeconfig", cluster.url)
        for block in read_blocks(page):
            run_block(
                block, first_run_folder, KFP_ENDPOINT=kubeflow.url, KUBECONFIG=str(config), HTTPS_PROXY=UNREACHABLE_PROXY,
                TEACHER_URL=teacher.url,
            )  # fmt: skip
            block_count += 1
    assert block_count > 0


@pytest.mark.parametrize(
    "page", [page for page in PAGES if read_blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_documented_commands_have_known_options(page: Path) -> None:
    for block in read_blocks(page):
        for line in re.findall(r"^ *(?:\w+=\S+ +)*tuneline ([a-z].*)", block.replace("\\\n", " "), re.MULTILINE):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(itertools.takewhile(lambda word: not re.fullmatch(r"[|<>&;()]+", word), lexer))
            command: Any = get_command(app)
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            command.make_context("tuneline", words)


def test_commands_are_only_in_executed_blocks() -> None:
    for page in PAGES:
        outside = BLOCK.sub("", page.read_text(encoding="utf-8"))
        fenced = re.findall(r"^```\w*\n(.*?)^```", outside, re.MULTILINE | re.DOTALL)
        commands = [
            line
            for text in fenced
            for line in text.splitlines()
            if re.match(r"(\$ )?(tuneline|make|kfp|dvc|mlflow|pip) [a-z]", line)
        ]
        assert commands == [], f"{page.name} shows commands in a block that is not marked sh"


def test_file_links_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
