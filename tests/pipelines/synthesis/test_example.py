"""examples/synthetic: PDF files, synthetic rows, a tuned model, held-out questions; and a local teacher.

The long tier tunes a tiny model in 30 to 65 CPU seconds, and the stress tier the embedded model. Their teacher is the stand-in;
a local model is the teacher of another test, which loads it twice.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from components.common.artifacts.hashing import sha256_file
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation.config import DataCurationConfig
from pipelines.synthesis.passages import read_passages
from tests.pipelines.command import ROOT, answer_in_process, refusal
from tests.pipelines.synthesis.documents import write_documents
from tests.pipelines.synthesis.stand_in_teacher import serve_teacher
from tests.tiny import tiny_model

EXAMPLE = ROOT / "examples" / "synthetic"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
EMBEDDED_TIMEOUT_SECONDS = 1800
EMBEDDED = "embedded:smollm2-135m-instruct"
TINY_SETTINGS = ("fine_tuning.learning_rate=5e-3", "fine_tuning.adaptation=full", "fine_tuning.max_steps=30")

pytestmark = [pytest.mark.pipeline, pytest.mark.daft]


def test_rows_of_the_tutorial_quote_every_document_and_suffice_for_the_gate(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    curation = DataCurationConfig.model_validate({"sources": [str(tmp_path / "documents")]})
    passages = read_passages(curation, Workdir(tmp_path / "workdir"), SilentReporter()).passages
    texts = {passage.document: passage.text for passage in passages}
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["source"] for row in rows} == set(texts)
    assert all(row["answer"] in texts[row["source"]] for row in rows)
    dataset = answer_in_process("curate", "-c", "customization.yaml", "-o", "dataset", cwd=tmp_path)
    assert dataset["rows"]["kept"] == len(rows)
    assert dataset["splits"]["test"] >= 29, "the gate needs as many"


@pytest.mark.parametrize(
    "student",
    [
        pytest.param("tiny", marks=pytest.mark.long),
        pytest.param("embedded", marks=[pytest.mark.stress, pytest.mark.timeout(EMBEDDED_TIMEOUT_SECONDS)]),
    ],
)
def test_model_tuned_on_synthetic_rows_is_better_on_held_out_questions(tmp_path: Path, student: str) -> None:
    """The README states the losses of the tiny model."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    base = EMBEDDED if student == "embedded" else str(tiny_model(tmp_path / "tiny"))
    settings = [f"fine_tuning.base_model={base}", *(TINY_SETTINGS if student == "tiny" else ())]
    options = [*("-c", "customization.yaml"), *(part for one in settings for part in ("--set", one))]
    with serve_teacher() as teacher:
        made = answer_in_process(
            "synthesize", "documents", "-o", "synthetic", "--teacher", teacher.url, "--template", "sentences.yaml",
            "--per-passage", 8, "--rows", 104, cwd=tmp_path,
        )  # fmt: skip
    assert made["rows"] == {"requested": 104, "accepted": 104, "rejected": {}}
    shutil.copy(tmp_path / "synthetic" / "rows.jsonl", tmp_path)
    dataset = answer_in_process("curate", "-o", "dataset", *options, cwd=tmp_path)
    assert dataset["rows"]["kept"] == 104
    assert dataset["splits"]["test"] >= 29, "the gate needs as many"
    check_origins(tmp_path)
    answer_in_process("finetune", "dataset", "-o", "model", *options, cwd=tmp_path)
    evaluated = answer_in_process(
        "evaluate", "model", "--dataset", "dataset", "-o", "evaluation", *options, cwd=tmp_path
    )
    loss = evaluated["metrics"]["held_out"]["loss"]
    low, high = sorted(-bound for bound in loss["ci95"])
    print(f"{loss['n']} held-out questions: loss {loss['base']:.2f} before, {loss['candidate']:.2f} after", end=", ")
    print(f"95% interval of the gain {low:.2f} to {high:.2f}")
    assert low > 0, "the interval excludes no gain"
    assert evaluated["verdict"] == "accepted"
    if student == "tiny":
        figures = re.search(r"loss falls from ([\d.]+) to ([\d.]+)", README)
        assert figures
        assert [loss["base"], loss["candidate"]] == pytest.approx([float(text) for text in figures.groups()], rel=0.1)


def check_origins(folder: Path) -> None:
    """Check that every training row names the document and page from which it was written."""
    documents = {sha256_file(path): path.name for path in (folder / "documents").iterdir()}
    for row in pyarrow.parquet.read_table(folder / "dataset" / "train.parquet").to_pylist():
        origin = json.loads(row["meta"])["meta"]
        assert documents[origin["document_sha256"]] == row["source"]
        assert origin["page"] == 1


@pytest.mark.stress
def test_local_teacher_answers_in_the_schema_and_equally_after_an_interruption(tmp_path: Path) -> None:
    """A tiny model with random weights: its answers have the structure, and the checks reject them."""
    write_documents(tmp_path / "docs", 2)
    model = tiny_model(tmp_path / "tiny")
    command = (
        "synthesize",
        "docs",
        "--teacher",
        model,
        "--rows",
        6,
        "--per-passage",
        1,
        "--repairs",
        0,
        "--answer-tokens",
        120,
    )
    whole = refusal(1, *command, "-o", "whole", "--concurrency", 2, cwd=tmp_path)
    assert whole["message"].startswith("no answer of tiny passes the checks: ")
    lines = (tmp_path / "whole" / "answers.jsonl").read_text().splitlines()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "answers.jsonl").write_text("\n".join(lines[:1]) + "\n")
    refusal(1, *command, "-o", "part", "--concurrency", 2, cwd=tmp_path)
    texts = [
        sorted(line.partition('"seconds"')[0] for line in (tmp_path / name / "answers.jsonl").read_text().splitlines())
        for name in ("whole", "part")
    ]
    assert texts[0] == texts[1]
    assert any("question" in line for line in lines)
