"""The conversation and the answer to explain, and the model's log-probability of the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.models import chat_templates
from components.common.models.chat_templates import EncodedCompletion
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.evaluation.task_interface import Continuation, Decoding
from pipelines.explanation.text_units import Message

if TYPE_CHECKING:
    from components.evaluation.transformers_engine import TransformersEngine


@dataclass(frozen=True)
class Question:
    """A conversation up to the user's last turn, and the definitions of its tools (JSON Schema) or None."""

    messages: list[Message]
    tools: Any = None


@dataclass(frozen=True)
class ExplainedAnswer:
    """An answer to a question.

    Attributes:
        question: The question.
        text: The answer.
        is_generated: Whether the model generated the answer for this explanation.
        is_complete: Whether the answer ends; False if it reached the maximum length. Only the end of a complete answer
            is part of its log-probability.
    """

    question: Question
    text: str
    is_generated: bool
    is_complete: bool

    def encode(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> EncodedCompletion:
        """Return the tokens of a conversation and of this answer after it, in the model's chat template."""
        turn = {"role": "assistant", "content": self.text}
        encoded = chat_templates.encode_completion(tokenizer, messages, [turn], self.question.tools)
        if not self.is_complete and encoded.answer_ids[-1] in tokenizer.all_special_ids:
            return EncodedCompletion(encoded.prompt_ids, encoded.answer_ids[:-1])
        return encoded


def build_answer(
    engine: TransformersEngine, question: Question, given: str | None, max_tokens: int, reporter: Reporter
) -> ExplainedAnswer:
    """Return the given answer, or the model's greedy answer.

    Args:
        engine: The loaded model.
        question: The question.
        given: The answer to explain; None to generate one.
        max_tokens: Maximum length of a generated answer in tokens.
        reporter: Receives progress.

    Raises:
        InputError: the answer is empty, or prompt and answer exceed the model's context.
    """
    limit = engine.max_input_tokens
    prompt_ids = chat_templates.encode_prompt(engine.tokenizer, question.messages, question.tools)
    if limit is not None and len(prompt_ids) >= limit:
        raise InputError(
            f"the prompt has {len(prompt_ids):,} tokens; the model's context has {limit:,}",
            hint="Shorten the prompt, or remove earlier turns of the conversation.",
        )
    if given is not None:
        answer = ExplainedAnswer(question, given, is_generated=False, is_complete=True)
    else:
        reporter.step("generating the answer")
        allowed = max_tokens if limit is None else min(max_tokens, limit - len(prompt_ids))
        (text,) = engine.generate([prompt_ids], Decoding(allowed), reporter)
        answer = ExplainedAnswer(question, text, is_generated=True, is_complete=True)
    if not answer.text.strip():
        raise InputError(
            "the answer is empty", hint="Specify the answer to explain with --answer, or change the prompt."
        )
    encoded = answer.encode(engine.tokenizer, question.messages)
    if given is None and len(encoded.answer_ids) > allowed:
        answer = ExplainedAnswer(question, text, is_generated=True, is_complete=False)
        encoded = answer.encode(engine.tokenizer, question.messages)
    length = len(encoded.prompt_ids) + len(encoded.answer_ids)
    if limit is not None and length > limit:
        raise InputError(
            f"the prompt and the answer have {length:,} tokens; the model's context has {limit:,}",
            hint="Shorten the answer, or remove earlier turns of the conversation.",
        )
    return answer


def score_answer(
    engine: TransformersEngine,
    answer: ExplainedAnswer,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    reporter: Reporter,
) -> list[float]:
    """Return the answer's log-probability after each conversation, in nats. The engine computes shared prefixes once.

    Raises:
        InputError: a log-probability is not finite.
    """
    continuations = []
    for messages in conversations:
        encoded = answer.encode(engine.tokenizer, messages)
        ids = [*encoded.prompt_ids, *encoded.answer_ids]
        continuations.append(Continuation(ids, [n >= len(encoded.prompt_ids) for n in range(len(ids))]))
    logprobs = [likelihood.logprob for likelihood in engine.compute_likelihoods(continuations, reporter)]
    if wrong := next((value for value in logprobs if not math.isfinite(value)), None):
        raise InputError(
            f"the log-probability of the answer is {wrong}, not a finite number",
            hint="Check the model with `tuneline evaluate`, or train it again with a lower learning rate.",
        )
    return logprobs
