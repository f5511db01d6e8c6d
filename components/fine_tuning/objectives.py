"""Training objectives: accepted rows, encoding of a row, and TRL trainer.

To add an objective, extend `ObjectiveName` and `OBJECTIVES`. Rows are truncated to `max_length` tokens; rows without a
token to learn are left out. Both are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from components.common.models import chat_templates, conversation_rows
from components.common.runtime.errors import InputError
from components.fine_tuning.pair_losses import PairLoss, compute_orpo_loss, compute_simpo_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ObjectiveName = Literal["sft", "text", "dpo", "kto", "orpo", "simpo", "grpo", "rloo", "reward", "distill"]
IGNORED_LABEL = -100  # skipped by torch's cross-entropy
TOKEN_LIST = "list<int32>"
TEXT = "string"
KL_COLUMN = "KL_completion_ids"  # TRL's name for the answer of another prompt
CAUSAL_FEATURES = {"input_ids": TOKEN_LIST, "labels": TOKEN_LIST}
Row = dict[str, Any]
Example = dict[str, Any]


@dataclass(frozen=True)
class EncodedRow:
    """The examples of a row, and the number of tokens cut off. A row without a token to learn has no examples."""

    examples: list[Example]
    cut_tokens: int


@dataclass(frozen=True)
class RowMapping:
    """Mapping of one kind of dataset rows to training rows.

    Attributes:
        columns: Columns to read.
        expand: Function that returns the training rows of a dataset row.
        trained_on: Description of the training rows.
        max_rows_per_row: Maximum number of training rows per dataset row.
    """

    columns: Sequence[str]
    expand: Callable[[Row], Iterable[Row]]
    trained_on: str
    max_rows_per_row: int = 1


@dataclass(frozen=True)
class Objective:
    """A training objective.

    Attributes:
        summary: Learned tokens or preferences; shown in the configuration reference.
        row_mappings: Mappings of the accepted kinds of rows.
        encode: Function that encodes a row as examples of at most the given number of tokens.
        features: Columns of an example, with their Arrow types.
        trl_method: Prefix of TRL's trainer and configuration class, such as SFT.
        collator_path: Dotted path of TRL's data collator.
        accepted_rows: Description of the accepted rows.
        loss_description: Definition of the loss.
        preference_settings: Keys of the section `preference` that the trainer accepts.
        pair_loss: Loss that replaces that of TRL's DPO trainer and needs no reference model. None: the trainer's loss.
        min_micro_batch_size: Minimum number of rows in a micro-batch.
        micro_batch_term: Term of the loss that is a mean over a micro-batch, so that the loss depends on its size.
        precomputes_reference: Whether TRL can compute the reference model's log-probabilities before training.
        epochs: Passes over the training rows if the recipe sets none.
        learning_rate_factor: Factor on the learning rate that the recipe leaves open, relative to sft.
        splits_long_rows: Whether a row longer than max_length gives several examples instead of a truncated one.
        generates: Whether the model answers the prompts during the training.
        has_rewards: Whether rewards score these answers.
        has_teacher: Whether the loss compares the model with a teacher.
        scores_answers: Whether the result is a reward model, which returns one number for a conversation.
        batch_rows: Rows per optimizer step if the recipe sets none.
    """

    summary: str
    row_mappings: dict[str, RowMapping]
    encode: Callable[[PreTrainedTokenizerBase, Row, int], EncodedRow]
    features: dict[str, str]
    trl_method: str
    collator_path: str
    accepted_rows: str
    loss_description: str
    preference_settings: set[str] = field(default_factory=set)
    pair_loss: PairLoss | None = None
    min_micro_batch_size: int = 1
    micro_batch_term: str = ""
    precomputes_reference: bool = False
    epochs: float = 1.0
    learning_rate_factor: float = 1.0
    splits_long_rows: bool = False
    generates: bool = False
    has_rewards: bool = False
    has_teacher: bool = False
    scores_answers: bool = False
    # LoRA loses quality with large batches ("LoRA Without Regret"); QLoRA (arXiv 2305.14314) trains with 16 rows.
    batch_rows: int = 16

    @property
    def is_causal(self) -> bool:
        """Whether the objective predicts labelled tokens of single sequences, instead of comparing answers."""
        return "labels" in self.features

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference model: the model before the training."""
        has_another = self.pair_loss is not None or self.scores_answers or self.has_teacher
        return not self.is_causal and not has_another

    @property
    def disables_dropout(self) -> bool:
        """Whether the training sets every dropout to 0, because noise would change answers or their rewards."""
        return self.generates or self.scores_answers

    @property
    def is_paired(self) -> bool:
        """Whether an example has two sequences, chosen and rejected, whose tokens its length counts together."""
        return "rejected_ids" in self.features

    def get_mapping(self, kind: str, location: str) -> RowMapping:
        """Return the mapping of this kind of rows.

        Args:
            kind: Kind of rows, such as sft or preference.
            location: Beginning of the error message, such as "the dataset in DIR contains".

        Raises:
            InputError: the objective does not accept this kind of rows.
        """
        if kind in self.row_mappings:
            return self.row_mappings[kind]
        suitable = [name for name, objective in OBJECTIVES.items() if kind in objective.row_mappings]
        hint = f"Set fine_tuning.objective to {' or '.join(suitable)}."
        if kind == "text":
            hint = f"Write conversations from the documents with `tuneline synthesize`, or learn the texts themselves: {hint}"
        raise InputError(
            f"{location} {kind} rows, which this objective cannot learn from; expected {self.accepted_rows}",
            hint=hint if suitable else "Curate rows of another kind.",
        )


def _parse_tools(row: Row) -> Any:
    return json.loads(row["tools"]) if row.get("tools") else None


def _encode_conversation(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> EncodedRow:
    """Encode a conversation; only the assistant's tokens, in all turns, are labels.

    A template that rewrites earlier turns gives several examples.
    """
    parts = chat_templates.encode_answers(tokenizer, row["messages"], _parse_tools(row), max_length=max_length)
    examples = []
    for part in parts:
        if any(part.answer_mask[1:]):  # the first token is never predicted
            pairs = zip(part.input_ids, part.answer_mask, strict=True)
            labels = [token if is_answer else IGNORED_LABEL for token, is_answer in pairs]
            examples.append({"input_ids": part.input_ids, "labels": labels, "length": len(labels)})
    return EncodedRow(examples, sum(part.cut_tokens for part in parts))


def _encode_text(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> EncodedRow:
    """Encode a text and its end token; every token is a label. A long text is split into several examples."""
    ids = chat_templates.encode_text(tokenizer, row["text"])
    # A piece starts with the last token of the previous piece as context, so each token is learned once.
    pieces = [ids[start : start + max_length] for start in range(0, len(ids) - 1, max_length - 1)]
    return EncodedRow([{"input_ids": piece, "labels": piece, "length": len(piece)} for piece in pieces], 0)


def _encode_answers(
    tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int, columns: Sequence[str]
) -> EncodedRow:
    """Encode a prompt with one or two answers, each cut to fit max_length; no example for empty or equal answers.

    The answers begin where a token differs from the common prompt: a thinking block can be part of one answer only.
    """
    encoded = [
        chat_templates.encode_completion(tokenizer, row["prompt"], row[column], _parse_tools(row)) for column in columns
    ]
    prompts = [completion.prompt_ids for completion in encoded]
    common = next((i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1), min(map(len, prompts)))
    prompt_ids = prompts[0][:common]
    sequences = [[*completion.prompt_ids, *completion.answer_ids] for completion in encoded]
    answers = [sequence[common:max_length] for sequence in sequences]
    cut_tokens = sum(max(len(sequence) - max_length, 0) for sequence in sequences)
    has_equal_answers = len({tuple(answer) for answer in answers}) < len(answers)
    if not all(answers) or has_equal_answers:
        return EncodedRow([], cut_tokens)
    example: Example = {
        "prompt_ids": prompt_ids,
        **{f"{column}_ids": answer for column, answer in zip(columns, answers, strict=True)},
        "length": sum(len(prompt_ids) + len(answer) for answer in answers),
    }
    if "label" in row:
        example["label"] = bool(row["label"])
    return EncodedRow([example], cut_tokens)


def _encode_pair(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> EncodedRow:
    return _encode_answers(tokenizer, row, max_length, ("chosen", "rejected"))


def _encode_conversation_pair(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> EncodedRow:
    """Encode a pair as two whole conversations, as a reward model reads them."""
    encoded = _encode_pair(tokenizer, row, max_length)
    examples = [
        {
            **{f"{side}_ids": [*example["prompt_ids"], *example[f"{side}_ids"]] for side in ("chosen", "rejected")},
            "length": example["length"],
        }
        for example in encoded.examples
    ]
    return EncodedRow(examples, encoded.cut_tokens)


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> EncodedRow:
    """Encode a prompt up to the beginning of the answer; no example without a reference, or for a prompt that is too long."""
    if not row["reference"]:
        return EncodedRow([], 0)
    ids = chat_templates.encode_prompt(tokenizer, row["prompt"], _parse_tools(row))
    if len(ids) > max_length:
        return EncodedRow([], 0)
    texts = {name: row[name] for name in ("question", "reference", "meta")}
    example = {"prompt": ids, **texts, "length": len(ids)}
    return EncodedRow([example], 0)


def _to_prompt(row: Row, kind: str) -> Iterable[Row]:
    """Return the prompt of a conversation's last answer, with this answer as the reference; "" if it has no text."""
    messages = conversation_rows.extract_conversation(kind, row)
    if not messages:
        return []
    has_answer = len(messages) > 1 and messages[-1]["role"] == "assistant"
    prompt, reference = (messages[:-1], messages[-1]["content"] or "") if has_answer else (messages, "")
    return [
        {
            "prompt": prompt,
            "question": prompt[-1]["content"] or "",
            "reference": reference,
            "tools": row.get("tools"),
            "meta": row.get("meta") or "{}",
        }
    ]


def _keep_row(row: Row) -> Iterable[Row]:
    return [row]


def _unpair(row: Row) -> Iterable[Row]:
    """Return a preference pair as two labelled answers."""
    shared = {"prompt": row["prompt"], "tools": row.get("tools")}
    return [
        {**shared, "completion": row["chosen"], "label": True},
        {**shared, "completion": row["rejected"], "label": False},
    ]


def _to_conversation(row: Row, kind: str) -> Iterable[Row]:
    messages = conversation_rows.extract_conversation(kind, row)
    return [] if messages is None else [{"messages": messages, "tools": row.get("tools")}]


# Full DPO of 7B and 8B models uses 5e-7 (Zephyr, arXiv 2310.16944; Tülu 3, arXiv 2411.15124), a fortieth of their SFT.
PREFERENCE_RATE_FACTOR = 1 / 40
# ORPO also learns the chosen answers. It uses 8e-6 for a 7B model (arXiv 2403.07691), a quarter of the rate of sft.
ORPO_RATE_FACTOR = 1 / 4
# The 8B reward models of RewardBench 2 (arXiv 2506.01937) were trained in full with 3e-6, a tenth of the rate of sft.
REWARD_RATE_FACTOR = 1 / 10
PAIR_COLUMNS = ["prompt", "chosen", "rejected", "tools"]
PAIR_ROWS = {"preference": RowMapping(PAIR_COLUMNS, _keep_row, "the preference pairs")}
PAIR_FEATURES = {"prompt_ids": TOKEN_LIST, "chosen_ids": TOKEN_LIST, "rejected_ids": TOKEN_LIST}
PAIR_COLLATOR = "trl.trainer.dpo_trainer.DataCollatorForPreference"
ACCEPTED_PAIRS = "pairs of a chosen and a rejected answer (preference rows)"
CAUSAL_COLLATOR = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"
GRPO = Objective(
    summary="reinforcement learning, which makes an answer more likely if its reward is above the mean reward of the "
    "answers to the same prompt",
    row_mappings={
        kind: RowMapping([*columns, "tools", "meta"], partial(_to_prompt, kind=kind), "the prompts of the last answers")
        for kind, (columns, _, _) in conversation_rows.ROW_KINDS.items()
    },
    encode=_encode_prompt,
    features={"prompt": TOKEN_LIST, "question": TEXT, "reference": TEXT, "meta": TEXT},
    trl_method="GRPO",
    collator_path="",
    accepted_rows="conversations (sft, preference or unpaired rows)",
    loss_description="training: GRPO's loss (Shao et al., arXiv 2402.03300) with DAPO's mean over tokens (arXiv "
    "2503.14476); validation: 1 − the mean reward of one greedy answer per prompt",
    learning_rate_factor=PREFERENCE_RATE_FACTOR,
    generates=True,
    has_rewards=True,
    batch_rows=8,
)
OBJECTIVES: dict[ObjectiveName, Objective] = {
    "sft": Objective(
        summary="prediction of the assistant's answers, in all turns",
        row_mappings={
            kind: RowMapping([*columns, "tools"], partial(_to_conversation, kind=kind), trained_on)
            for kind, (columns, _, trained_on) in conversation_rows.ROW_KINDS.items()
        },
        encode=_encode_conversation,
        features=CAUSAL_FEATURES,
        trl_method="SFT",
        collator_path=CAUSAL_COLLATOR,
        accepted_rows="conversations (sft, preference or unpaired rows)",
        loss_description="cross-entropy on the assistant's tokens, nats per token",
        epochs=3.0,  # Stanford Alpaca, 52,000 rows; validation selects the best checkpoint
    ),
    "text": Objective(
        summary="prediction of every next token of plain text",
        row_mappings={"text": RowMapping(["text"], _keep_row, "every token of the texts")},
        encode=_encode_text,
        features=CAUSAL_FEATURES,
        trl_method="SFT",
        collator_path=CAUSAL_COLLATOR,
        accepted_rows="plain text (text rows)",
        loss_description="cross-entropy on every token, nats per token",
        splits_long_rows=True,
    ),
    "dpo": Objective(
        summary="preference for the chosen answer of a pair",
        row_mappings=PAIR_ROWS,
        encode=_encode_pair,
        features=PAIR_FEATURES,
        trl_method="DPO",
        collator_path=PAIR_COLLATOR,
        preference_settings={"beta"},
        accepted_rows=ACCEPTED_PAIRS,
        loss_description="DPO's loss (Rafailov et al., arXiv 2305.18290); 0.693 if the model has no preference",
        precomputes_reference=True,
        learning_rate_factor=PREFERENCE_RATE_FACTOR,
    ),
    "kto": Objective(
        summary="preference for answers labelled good",
        row_mappings={
            "unpaired": RowMapping(
                ["prompt", "completion", "label", "tools"], _keep_row, "the answers with their labels"
            ),
            "preference": RowMapping(PAIR_COLUMNS, _unpair, "the preference pairs, each as two labelled answers", 2),
        },
        encode=partial(_encode_answers, columns=("completion",)),
        features={"prompt_ids": TOKEN_LIST, "completion_ids": TOKEN_LIST, KL_COLUMN: TOKEN_LIST, "label": "bool"},
        trl_method="KTO",
        collator_path="trl.trainer.kto_trainer.DataCollatorForUnpairedPreference",
        preference_settings={"beta", "desirable_weight", "undesirable_weight"},
        accepted_rows="answers with a label (unpaired or preference rows)",
        loss_description="KTO's loss (Ethayarajh et al., arXiv 2402.01306); 0.5 if the model has no preference",
        min_micro_batch_size=2,
        micro_batch_term="the reference term",
        learning_rate_factor=PREFERENCE_RATE_FACTOR,
    ),
    "orpo": Objective(
        summary="prediction of the chosen answer of a pair and preference for it, in one training run from a base model",
        row_mappings=PAIR_ROWS,
        encode=_encode_pair,
        features=PAIR_FEATURES,
        trl_method="DPO",
        collator_path=PAIR_COLLATOR,
        pair_loss=PairLoss(compute_orpo_loss, scores_prompts=True),
        micro_batch_term="the likelihood term",
        accepted_rows=ACCEPTED_PAIRS,
        loss_description="ORPO's loss (Hong et al., arXiv 2403.07691): cross-entropy of prompt and chosen answer, plus "
        "the weighted odds-ratio term",
        learning_rate_factor=ORPO_RATE_FACTOR,
    ),
    "simpo": Objective(
        summary="preference for the chosen answer of a pair by its mean log-probability, without a reference model",
        row_mappings=PAIR_ROWS,
        encode=_encode_pair,
        features=PAIR_FEATURES,
        trl_method="DPO",
        collator_path=PAIR_COLLATOR,
        pair_loss=PairLoss(compute_simpo_loss),
        accepted_rows=ACCEPTED_PAIRS,
        loss_description="SimPO's loss (Meng et al., arXiv 2405.14734)",
        learning_rate_factor=PREFERENCE_RATE_FACTOR,
    ),
    "grpo": GRPO,
    "rloo": replace(
        GRPO,
        summary="like grpo, but an answer's reward is compared with the mean reward of the other answers (leave one "
        "out), and the divergence is part of the reward",
        trl_method="RLOO",
        loss_description="training: REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv 2402.14740), the "
        "divergence subtracted from the rewards, and advantages not divided by their standard deviation; validation: "
        "as with grpo, 1 − the mean reward",
    ),
    "distill": Objective(
        summary="distillation, which matches the token probabilities of the model's own answers to those of a larger "
        "teacher",
        row_mappings={
            kind: RowMapping([*columns, "tools"], partial(_to_prompt, kind=kind), "the prompts of the last answers")
            for kind, (columns, _, _) in conversation_rows.ROW_KINDS.items()
        },
        encode=_encode_prompt,
        features={"prompt": TOKEN_LIST},
        trl_method="Distillation",
        collator_path="",
        accepted_rows="conversations (sft, preference or unpaired rows)",
        loss_description="divergence of the model from the teacher on the model's own answers, nats per token (Agarwal et al., "
        "arXiv 2306.13649); validation: on greedy answers",
        # The rate of sft: as there, every token has a target. Tried on small models only.
        generates=True,
        has_teacher=True,
    ),
    "reward": Objective(
        summary="a reward model, which gives the chosen answer of a pair a higher score than the rejected answer",
        row_mappings=PAIR_ROWS,
        encode=_encode_conversation_pair,
        features={"chosen_ids": TOKEN_LIST, "rejected_ids": TOKEN_LIST},
        trl_method="Reward",
        collator_path="trl.trainer.reward_trainer.DataCollatorForPreference",
        accepted_rows=ACCEPTED_PAIRS,
        loss_description="negative log-likelihood of the preferences in the Bradley–Terry model (Ouyang et al., arXiv "
        "2203.02155), plus a weighted term that centers the rewards at 0 (Eisenstein et al., arXiv 2312.09244); 0.693 if "
        "the model has no preference",
        learning_rate_factor=REWARD_RATE_FACTOR,
        scores_answers=True,
    ),
}
