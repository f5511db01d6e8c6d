"""Curation and training on files of the common data formats.

Long tier: every test trains a model.
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

pytestmark = [pytest.mark.daft, pytest.mark.long]
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
    "data_curation.answer_min_words": "1000",
    "data_curation.near_duplicate_threshold": "0.95",
    "data_curation.fractions": "{train: 0.5, validation: 0.2, test: 0.3}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats")
    tiny_model(path / "tiny")
    return path


def train_on_files(folder: Path, output: str, *paths: Path) -> dict[str, dict[str, Any]]:
    """Curate these files and train on the dataset; return the summaries of both artifacts."""
    settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    dataset, model = f"{output}/dataset", f"{output}/model"
    answer("curate", *paths, "-o", dataset, *settings, cwd=folder)
    answer("finetune", dataset, "-o", model, *settings, cwd=folder)
    return {
        kind: json.loads((folder / output / kind / "manifest.json").read_text())["summary"]
        for kind in ("dataset", "model")
    }


def test_training_accepts_alpaca_dolly_and_sharegpt_files_together(folder: Path) -> None:
    summaries = train_on_files(
        folder, "conversations", write_alpaca(folder), write_dolly(folder), write_sharegpt(folder)
    )
    assert summaries["dataset"]["rows_kind"] == "sft"
    assert summaries["dataset"]["rows"]["in"] == len(PAIRS) == summaries["dataset"]["rows"]["kept"]
    assert summaries["model"]["learned"] == "the conversations"
    assert summaries["model"]["rows"]["train"] == summaries["dataset"]["splits"]["train"]


def test_training_on_preference_pairs_trains_on_the_chosen_answers(folder: Path) -> None:
    summaries = train_on_files(folder, "preferences", write_preferences(folder))
    assert summaries["dataset"]["rows_kind"] == "preference"
    assert summaries["dataset"]["rows"]["in"] == len(PAIRS) == summaries["dataset"]["rows"]["kept"]
    assert summaries["model"]["learned"] == "the chosen answers of the preference pairs"
