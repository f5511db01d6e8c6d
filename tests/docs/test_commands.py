"""Every command in the README and in docs/ is run, in a folder as their readers would have it."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import kubernetes_api
from tests.kfp_api import KfpApi, State, serving
from tests.kubernetes_api import KubernetesApi
from tests.pipelines.command import ROOT, environment
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "components").glob("*/README.md"))]
README = PAGES[0]
NOWHERE = "http://127.0.0.1:9"  # no command of the documentation needs another network than that of this machine
PROGRAMS = ("tuneline", "make", "python", "pip")
THINGS = ["letter", "parcel", "invoice", "ticket", "order", "refund", "contract", "report", "meeting", "licence", "visitor", "badge"]
ACTS = ["send", "track", "cancel", "archive", "approve", "translate", "copy", "sign", "print", "return"]


def blocks(page: Path) -> list[str]:
    """The commands of a page, one text a block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def write_rows(path: Path) -> None:
    pairs = [(f"How do I {act} a {thing}?", f"To {act} a {thing}, open desk {n}.") for n, (act, thing) in enumerate(
        (act, thing) for act in ACTS for thing in THINGS)]  # fmt: skip
    path.write_text("".join(json.dumps({"prompt": q, "completion": a, "source": "desk"}) + "\n" for q, a in pairs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: raw data, a model, a configuration, and the programs on the PATH."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("raw.jsonl", "my-tickets.jsonl", "tickets.jsonl"):
        write_rows(place / name)
    (place / "archive").mkdir()
    with gzip.open(place / "archive" / "old.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["Who keeps the archive?", "The archivist keeps it."]])
    tiny_model(place / "my-llama")
    settings = {
        "data_curation": {"sources": [str(place / "raw.jsonl")]},
        "fine_tuning": {"base_model": str(place / "my-llama"), "max_steps": 2},
    }
    (place / "customization.yaml").write_text(json.dumps({**settings, "evaluation": {"generations": 0}}))
    (place / "platform.yaml").write_text("volume: {claim: tuneline}\n")
    shutil.copy(ROOT / "docs" / "examples" / "ci.sh", place / "ci.sh")
    _programs(place / "bin")
    return place


def _programs(folder: Path) -> None:
    folder.mkdir()
    for program in PROGRAMS:
        path = folder / program
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{ROOT}/tests/docs/shims.py" {program} "$@"\n')
        path.chmod(0o755)
    (folder / "kfp").symlink_to(Path(sys.executable).parent / "kfp")


def perform(block: str, folder: Path, **extra: str) -> None:
    """Run a block as the reader's shell would, up to its first failure."""
    text = block.replace("/models/my-llama", str(folder / "my-llama")).replace("source .venv/bin/activate", "true")
    text = text.replace("my-project/store/<digest>", '"$(dirname my-project/store/*/tuneline/config.pbtxt)/.."')
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    given = environment(PATH=path, TUNELINE_ROOT=str(ROOT), SHIMS=str(folder / "bin"), POLL_SECONDS="0.2", **extra)
    began = time.monotonic()
    done = subprocess.run(["bash", "-e", "-c", text], cwd=folder, env=given, capture_output=True, text=True, timeout=600, check=False)
    print(f"{time.monotonic() - began:.0f} s: {block}")
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def read(folder: Path) -> Path:
    """The folder after all that the README says; the other pages go on from there."""
    for block in blocks(README):
        perform(block, folder)
    return folder


@pytest.fixture(scope="module")
def api() -> KfpApi:
    return KfpApi(script=[State("SUCCEEDED")])


@pytest.mark.long
def test_the_commands_of_the_readme_work_and_customise_a_model(read: Path) -> None:
    assert blocks(README)
    finished = [run["result"] for path in read.glob(".tuneline/runs/*/run.json") if (run := json.loads(path.read_text())).get("result")]
    assert finished
    assert all(Path(result["artifacts"]["model"], "manifest.json").exists() for result in finished)


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != README and blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_commands_of_this_page_work(page: Path, read: Path, api: KfpApi) -> None:
    performed = 0
    with serving(api) as kubeflow, kubernetes_api.serving(KubernetesApi(kubernetes_api.plain())) as cluster:
        config = kubernetes_api.kubeconfig(read / "kubeconfig", cluster.url)
        for block in blocks(page):
            perform(block, read, KFP_ENDPOINT=kubeflow.url, KUBECONFIG=str(config), HTTPS_PROXY=NOWHERE)
            performed += 1
    assert performed > 0


def test_every_command_stands_in_a_block_that_is_run() -> None:
    for page in PAGES:
        outside = BLOCK.sub("", page.read_text(encoding="utf-8"))
        fenced = re.findall(r"^```\w*\n(.*?)^```", outside, re.MULTILINE | re.DOTALL)
        commands = [
            line for text in fenced for line in text.splitlines() if re.match(r"(\$ )?(tuneline|make|kfp|dvc|mlflow|pip) [a-z]", line)
        ]
        assert commands == [], f"{page.name} shows commands in a block that is not marked sh"


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
