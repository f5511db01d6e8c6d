"""Answers to fixed prompts at every validation, which show how the model changes during training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.models import answer_generation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES_FILENAME = "samples.jsonl"


def log_answers(
    path: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
) -> None:
    """Answer each prompt greedily as the user's turn of a conversation, and append the answers to the log.

    Greedy decoding consumes no random numbers, so the training stays the same.

    Args:
        path: The log; one object {"step", "prompt", "answer"} per line.
        step: Optimizer step.
        model: The model, in evaluation mode.
        tokenizer: The base model's tokenizer.
        prompts: The prompts.
        max_new_tokens: Maximum length of an answer in tokens.
    """
    lines = []
    for prompt in prompts:
        answer = answer_generation.generate_answer(
            model, tokenizer, [{"role": "user", "content": prompt}], max_new_tokens
        )
        lines.append(json.dumps({"step": step, "prompt": prompt, "answer": answer}, ensure_ascii=False) + "\n")
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def tabulate_answers(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Return head and rows of a table with a row per step and a column per prompt; answers with their rewards, if any."""
    prompts = list(dict.fromkeys(line["prompt"] for line in lines))
    answers = {
        (line["step"], line["prompt"]): line["answer"] + (f" (reward {line['reward']:.2g})" if "reward" in line else "")
        for line in lines
    }
    steps = sorted({line["step"] for line in lines})
    return ["step", *prompts], [[step, *(answers.get((step, prompt), "") for prompt in prompts)] for step in steps]
