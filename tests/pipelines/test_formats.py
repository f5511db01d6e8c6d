"""A whole run on each of the shapes in which people have their data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.command import answer
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.long]
THINGS = ["letter", "parcel", "invoice", "ticket", "order", "refund", "contract", "report", "meeting", "licence", "visitor", "badge"]
ACTS = ["send", "track", "cancel", "archive", "approve", "translate"]
PAIRS = [(f"How do I {act} a {thing}?", f"To {act} a {thing}, open desk {n} and ask for {act}-{thing}.") for n, (act, thing) in enumerate(
    (act, thing) for act in ACTS for thing in THINGS)]  # fmt: skip


def alpaca(folder: Path) -> Path:
    rows = [{"instruction": question, "input": "", "output": text} for question, text in PAIRS[0::3]]
    path = folder / "alpaca.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    return path


def dolly(folder: Path) -> Path:
    rows = [{"instruction": question, "context": "", "response": text, "category": "open_qa"} for question, text in PAIRS[1::3]]
    return _lines(folder / "dolly.jsonl", rows)


def sharegpt(folder: Path) -> Path:
    rows = [{"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": text}]} for question, text in PAIRS[2::3]]
    return _lines(folder / "sharegpt.jsonl", rows)


def preference(folder: Path) -> Path:
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


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SETTINGS = {
    "fine_tuning.base_model": "tiny",
    "fine_tuning.max_steps": "1",
    "fine_tuning.validation_rows": "0",
    "evaluation.generations": "0",
    "triton_packaging.prove": "false",
    "data_curation.answer_min_words": "1000",
    "data_curation.near_duplicate_threshold": "0.95",
    "data_curation.fractions": "{train: 0.5, validation: 0.2, test: 0.3}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("formats")
    tiny_model(place / "tiny")
    return place


def run_on(folder: Path, workdir: str, *paths: Path) -> dict[str, Any]:
    """The summaries of the dataset and of the model that a run on these files made."""
    sets = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    sources = json.dumps([path.name for path in paths])
    result = answer("run", "--set", f"data_curation.sources={sources}", *sets, "--workdir", workdir, cwd=folder)
    assert result["verdict"] in ("accepted", "refused")
    made = {kind: json.loads((Path(path) / "manifest.json").read_text()) for kind, path in result["artifacts"].items() if path}
    return {kind: manifest["summary"] for kind, manifest in made.items()}


def test_a_run_takes_alpaca_dolly_and_sharegpt_files_together(folder: Path) -> None:
    made = run_on(folder, "conversations", alpaca(folder), dolly(folder), sharegpt(folder))
    assert made["dataset"]["rows_kind"] == "sft"
    assert made["dataset"]["rows"]["in"] == len(PAIRS) == made["dataset"]["rows"]["kept"]
    assert made["model"]["learned"] == "the conversations"
    assert made["model"]["rows"]["train"] == made["dataset"]["splits"]["train"]


def test_a_run_on_preference_pairs_learns_the_chosen_answers(folder: Path) -> None:
    made = run_on(folder, "preferences", preference(folder))
    assert made["dataset"]["rows_kind"] == "preference"
    assert made["dataset"]["rows"]["in"] == len(PAIRS) == made["dataset"]["rows"]["kept"]
    assert made["model"]["learned"] == "the chosen answers of the preference pairs"
