"""Rows of MosaicML's in-context-learning files as likelihood requests: (context, continuation) pairs and the correct one.

The files have three forms: a query with choices; two beginnings with one continuation (Winograd schemas); a context with its last words
(LAMBADA). Option tasks request one token: the letter of an option, or yes or no. `<task>_5shot` puts five answered questions before each
question.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TASKS = ("arc_easy", "piqa", "openbook_qa", "winogrande", "lambada_openai")
OPTION_TASKS = ("arc_challenge", "commonsense_qa", "boolq", "mmlu_anatomy")
SHOTS = 5
FEW_SHOT_SUFFIX = f"_{SHOTS}shot"
ALL_TASKS = (*TASKS, *OPTION_TASKS, *(task + FEW_SHOT_SUFFIX for task in OPTION_TASKS))
# The description of an lm-eval MMLU task precedes its questions.
DESCRIPTIONS = {"mmlu_anatomy": "The following are multiple choice questions (with answers) about anatomy.\n\n"}
LETTERS = "ABCDE"
NAMES = ("icl_{}.jsonl.gz", "icl_{}.jsonl", "{}.jsonl.gz", "{}.jsonl")

Item = dict[
    str, Any
]  # requests: [[context, continuation], ...]; gold: the right one's place, or null where the answer has to be greedy


def read(folder: Path, task: str, rows: int | None) -> tuple[list[Item], str]:
    """Return the first rows of a task's file (None: all), and the sha256 of these rows. Raises FileNotFoundError.

    The examples of a few-shot task are the last rows of its file, which no option task scores.
    """
    task, few_shot = task.removesuffix(FEW_SHOT_SUFFIX), task.endswith(FEW_SHOT_SUFFIX)
    path = next((folder / name.format(task) for name in NAMES if (folder / name.format(task)).exists()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} holds no file of {task}: {NAMES[0].format(task)} or {NAMES[1].format(task)}")
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
    if task not in OPTION_TASKS:
        lines = lines[:rows]
        return [item(json.loads(line)) for line in lines], _digest(lines)
    examples, lines = lines[-SHOTS:] if few_shot else [], lines[:-SHOTS][:rows]
    header = DESCRIPTIONS.get(task, "")
    for example in (option_item(json.loads(line)) for line in examples):
        header += "".join(example["requests"][example["gold"]]) + "\n\n"
    return [option_item(json.loads(line), header) for line in lines], _digest([*examples, *lines])


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def option_item(row: dict[str, Any], header: str = "") -> Item:
    """Return a row as requests of one token each: choices of several words are listed, and their letters are the options."""
    query, options = row["query"].strip().removesuffix("\nAnswer:"), row["choices"]
    if any(" " in option or len(option) > len("yes") for option in options):
        options = list(LETTERS[: len(options)])
        query += "".join(f"\n{letter}. {text}" for letter, text in zip(options, row["choices"], strict=True))
    return {"requests": [[f"{header}{query}\nAnswer:", f" {option}"] for option in options], "gold": row["gold"]}


def item(row: dict[str, Any]) -> Item:
    """Return a row as requests. A question is followed by "Answer:", as in MosaicML's settings for these files."""
    if "context_options" in row:
        pairs = [[context, f" {row['continuation']}"] for context in row["context_options"]]
        return {"requests": pairs, "gold": row["gold"]}
    if "choices" in row:
        query = row["query"].strip()
        context = f"{query}\nAnswer:" if query.startswith("Question:") else query
        return {"requests": [[context, f" {choice}"] for choice in row["choices"]], "gold": row["gold"]}
    return {"requests": [[row["context"].rstrip(), f" {row['continuation']}"]], "gold": None}


def right(items: Sequence[Item], answers: Sequence[tuple[float, bool]]) -> list[bool]:
    """Return for each item whether the answer is correct. `answers` are (log-likelihood, greedy) of all requests, item by item."""
    verdicts, at = [], 0
    for one in items:
        mine = answers[at : at + len(one["requests"])]
        at += len(mine)
        best = max(range(len(mine)), key=lambda place: mine[place][0])
        verdicts.append(mine[0][1] if one["gold"] is None else best == one["gold"])
    return verdicts
