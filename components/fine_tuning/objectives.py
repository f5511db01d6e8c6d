"""The objectives: what of a dataset's rows is learned, how a row becomes tokens, and which of TRL's trainers learns from them.

A new one is an entry in OBJECTIVES. Rows are cut at `max_length` tokens at their end, and what is cut is counted; a row of which nothing
that teaches is left is left out, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from components.common import chat, conversations
from components.common.errors import InputError
from components.fine_tuning.config import FineTuningConfig

IGNORED = -100  # the label that cross-entropy skips
Row = dict[str, Any]
Example = dict[str, Any]


@dataclass(frozen=True)
class Encoded:
    """What a row became: its examples (none where nothing in it teaches), and whether something was cut off."""

    examples: list[Example]
    truncated: bool


@dataclass(frozen=True)
class Use:
    """What an objective takes of a kind of rows: the columns it reads, the rows it makes of one, and that in words."""

    columns: Sequence[str]
    rows: Callable[[Row], Iterable[Row]]
    learned: str
    each: int = 1  # rows made of one, at most


@dataclass(frozen=True)
class Objective:
    """One way to learn. `uses`: by the kind of a dataset's rows. `trainer`, `arguments`: TRL's classes; `settings`: what they are told."""

    uses: dict[str, Use]
    encode: Callable[[Any, Row, int], Encoded]
    features: dict[str, str]
    trainer: str
    arguments: str
    settings: Callable[[FineTuningConfig], dict[str, Any]]
    wanted: str
    loss: str

    def of(self, kind: str, where: str) -> Use:
        """What it takes of this kind of rows. Raises InputError where it cannot learn from them; `where` begins the message."""
        if kind not in self.uses:
            raise InputError(f"{where} {kind} rows, which this objective cannot learn from: it learns {self.wanted}", hint=_hint(kind))
        return self.uses[kind]


def _hint(kind: str) -> str:
    fits = [name for name, objective in OBJECTIVES.items() if kind in objective.uses]
    if not fits:
        return "Curate rows of another kind."
    return f"fine_tuning.objective: {' or '.join(fits)} learns from them; or curate other sources."


def _tools(row: Row) -> Any:
    return json.loads(row["tools"]) if row.get("tools") else None


def _of_answers(tokenizer: Any, row: Row, max_length: int) -> Encoded:
    """A conversation, with labels on the assistant's tokens only, in all turns."""
    encoded = chat.encode(tokenizer, row["messages"], _tools(row), max_length=max_length)
    if not any(encoded.answer[1:]):  # the first token of a row has nothing before it that could foretell it
        return Encoded([], encoded.truncated)
    labels = [token if answer else IGNORED for token, answer in zip(encoded.input_ids, encoded.answer, strict=True)]
    return Encoded([{"input_ids": encoded.input_ids, "labels": labels, "length": len(labels)}], encoded.truncated)


def _of_text(tokenizer: Any, row: Row, max_length: int) -> Encoded:
    """A text and its end, every token a label; a longer one in pieces, so that nothing of it is cut off.

    A piece begins with the token that the one before ended with, which is only context there: each token is learned once.
    """
    ids = chat.encode_text(tokenizer, row["text"])
    pieces = [ids[start : start + max_length] for start in range(0, len(ids) - 1, max_length - 1)]
    return Encoded([{"input_ids": piece, "labels": piece, "length": len(piece)} for piece in pieces], False)


def _of_pairs(tokenizer: Any, row: Row, max_length: int) -> Encoded:
    """A prompt with its chosen and its rejected answer. They are compared up to the same length."""
    chosen = chat.encode_completion(tokenizer, row["prompt"], row["chosen"], _tools(row))
    rejected = chat.encode_completion(tokenizer, row["prompt"], row["rejected"], _tools(row))
    room = max_length - len(chosen.prompt_ids)
    good, bad = chosen.answer_ids[: max(room, 0)], rejected.answer_ids[: max(room, 0)]
    truncated = len(good) < len(chosen.answer_ids) or len(bad) < len(rejected.answer_ids)
    if not good or not bad or good == bad or chosen.prompt_ids != rejected.prompt_ids:
        return Encoded([], truncated)
    length = 2 * len(chosen.prompt_ids) + len(good) + len(bad)
    return Encoded([{"prompt_ids": chosen.prompt_ids, "chosen_ids": good, "rejected_ids": bad, "length": length}], truncated)


def _of_labelled(tokenizer: Any, row: Row, max_length: int) -> Encoded:
    """A prompt with one answer, and whether that is wanted."""
    whole = chat.encode_completion(tokenizer, row["prompt"], row["completion"], _tools(row))
    answer = whole.answer_ids[: max(max_length - len(whole.prompt_ids), 0)]
    truncated = len(answer) < len(whole.answer_ids)
    if not answer:
        return Encoded([], truncated)
    length = len(whole.prompt_ids) + len(answer)
    return Encoded([{"prompt_ids": whole.prompt_ids, "completion_ids": answer, "label": bool(row["label"]), "length": length}], truncated)


def _itself(row: Row) -> Iterable[Row]:
    return [row]


def _unpaired(row: Row) -> Iterable[Row]:
    """A pair as two labelled answers."""
    shared = {"prompt": row["prompt"], "tools": row.get("tools")}
    return [{**shared, "completion": row["chosen"], "label": True}, {**shared, "completion": row["rejected"], "label": False}]


def _said(kind: str) -> Callable[[Row], Iterable[Row]]:
    def of(row: Row) -> Iterable[Row]:
        messages = conversations.of(kind, row)
        return [] if messages is None else [{"messages": messages, "tools": row.get("tools")}]

    return of


def _conversations() -> dict[str, Use]:
    return {kind: Use([*columns, "tools"], _said(kind), learned) for kind, (columns, _, learned) in conversations.KINDS.items()}


def _causal(config: FineTuningConfig) -> dict[str, Any]:
    return {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}  # rows come with tokens and labels


def _dpo(config: FineTuningConfig) -> dict[str, Any]:
    return {"max_length": None, "beta": config.preference.beta}


def _kto(config: FineTuningConfig) -> dict[str, Any]:
    weights = {name: getattr(config.preference, name) for name in ("desirable_weight", "undesirable_weight")}
    return {"max_length": None, "beta": config.preference.beta, **weights}


TOKENS = "list<int32>"
PARTNER = "KL_completion_ids"  # as TRL names the answer of another prompt
CAUSAL = {"input_ids": TOKENS, "labels": TOKENS}
ANSWERS = "cross-entropy on the assistant's tokens, nats a token"
OBJECTIVES: dict[str, Objective] = {
    "sft": Objective(
        _conversations(),
        _of_answers,
        CAUSAL,
        "SFTTrainer",
        "SFTConfig",
        _causal,
        "conversations (sft, preference or unpaired rows)",
        ANSWERS,
    ),
    "text": Objective(
        {"text": Use(["text"], _itself, "every token of the texts")},
        _of_text,
        CAUSAL,
        "SFTTrainer",
        "SFTConfig",
        _causal,
        "plain text (text rows)",
        "cross-entropy on every token, nats a token",
    ),
    "dpo": Objective(
        {"preference": Use(["prompt", "chosen", "rejected", "tools"], _itself, "the preference pairs")},
        _of_pairs,
        {"prompt_ids": TOKENS, "chosen_ids": TOKENS, "rejected_ids": TOKENS},
        "DPOTrainer",
        "DPOConfig",
        _dpo,
        "pairs of a chosen and a rejected answer (preference rows)",
        "DPO's loss (Rafailov et al., arXiv 2305.18290); 0.693 where nothing is preferred yet",
    ),
    "kto": Objective(
        {
            "unpaired": Use(["prompt", "completion", "label", "tools"], _itself, "the answers with their labels"),
            "preference": Use(
                ["prompt", "chosen", "rejected", "tools"], _unpaired, "the preference pairs, each as two labelled answers", 2
            ),
        },
        _of_labelled,
        {"prompt_ids": TOKENS, "completion_ids": TOKENS, PARTNER: TOKENS, "label": "bool"},
        "KTOTrainer",
        "KTOConfig",
        _kto,
        "answers with a label (unpaired or preference rows)",
        "KTO's loss (Ethayarajh et al., arXiv 2402.01306); 0.5 where nothing is preferred yet",
    ),
}
