"""A whole run on each common data format.

Long tier: every test runs the whole pipeline.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.datasets import QUESTION_WORDS
from tests.pipelines.command import answer
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.long]
PAIRS = [
    (f"How do I {verb} a {noun}?", f"To {verb} a {noun}, open desk {n} and ask for {verb}-{noun}.")
    for n, (verb, noun) in enumerate(QUESTION_WORDS[:72])
]


def write_alpaca(folder: Path) -> Path:
    rows = [{"instruction": question, "input": "", "output": text} for question, text in PAIRS[0::3]]
    path = folder / "alpaca.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    return path


def write_dolly(folder: Path) -> Path:
    rows = [
        {"instruction": question, "context": "", "response": text, "category": "open_qa"}
        for question, text in PAIRS[1::3]
    ]
    return _write_json_lines(folder / "dolly.jsonl", rows)


def write_sharegpt(folder: Path) -> Path:
    rows = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": text}]}
        for question, text in PAIRS[2::3]
    ]
    return _write_json_lines(folder / "sharegpt.jsonl", rows)


def write_preferences(folder: Path) -> Path:
    rows = [
        {
            "conversations": [{"from": "human", "value": question}],
            "chosen": {"from": "gpt", "value": text},
            "rejected": {"from": "gpt", "value": f"Nobody knows about {question.split()[-1]}."},
        }
        for question, text in PAIRS
    ]
    path = folder / "preference.json"
    path.write_text(json.dumps(rows))
    return path


def _write_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SETTINGS = {
    "fine_tuning.base_model": "tiny",
    "fine_tuning.max_steps": "1",
    "fine_tuning.validation_rows": "0",
    "evaluation.generations": "0",
    "evaluation.suite": "none",
    "triton_packaging.prove": "false",
    "data_curation.answer_min_words": "1000",
    "data_curation.near_duplicate_threshold": "0.95",
    "data_curation.fractions": "{train: 0.5, validation: 0.2, test: 0.3}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats")
    tiny_model(path / "tiny")
    return path


def run_on_files(folder: Path, workdir: str, *paths: Path) -> dict[str, Any]:
    """Run the pipeline on these files and return the summary of each artifact."""
    sets = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    sources = json.dumps([path.name for path in paths])
    result = answer("run", "--set", f"data_curation.sources={sources}", *sets, "--workdir", workdir, cwd=folder)
    assert result["verdict"] in ("accepted", "refused")
    manifests = {
        kind: json.loads((Path(path) / "manifest.json").read_text())
        for kind, path in result["artifacts"].items()
        if path
    }
    return {kind: manifest["summary"] for kind, manifest in manifests.items()}


def test_run_accepts_alpaca_dolly_and_sharegpt_files_together(folder: Path) -> None:
    summaries = run_on_files(folder, "conversations", write_alpaca(folder), write_dolly(folder), write_sharegpt(folder))
    assert summaries["dataset"]["rows_kind"] == "sft"
    assert summaries["dataset"]["rows"]["in"] == len(PAIRS) == summaries["dataset"]["rows"]["kept"]
    assert summaries["model"]["learned"] == "the conversations"
    assert summaries["model"]["rows"]["train"] == summaries["dataset"]["splits"]["train"]


def test_run_on_preference_pairs_trains_on_the_chosen_answers(folder: Path) -> None:
    summaries = run_on_files(folder, "preferences", write_preferences(folder))
    assert summaries["dataset"]["rows_kind"] == "preference"
    assert summaries["dataset"]["rows"]["in"] == len(PAIRS) == summaries["dataset"]["rows"]["kept"]
    assert summaries["model"]["learned"] == "the chosen answers of the preference pairs"
