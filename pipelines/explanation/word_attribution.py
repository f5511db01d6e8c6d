"""The words of the prompt that the answer depends on: leave-one-out scores, and how well they hold up under deletion.

The score of a word is the answer's log-probability minus that without the word. It covers neither words that replace each
other nor words that act only together. The deletion figures measure this: they remove several words at once.
"""

# DeYoung et al., "ERASER" (ACL 2020, arXiv 1911.03429), call the deletion figures comprehensiveness (top words removed)
# and sufficiency (only the top words kept).

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from components.common.models import chat_templates
from components.common.runtime.counts import format_count
from components.common.runtime.reporters import Reporter
from components.evaluation import forward_pass, prefix_trees
from pipelines.explanation.explained_answer import ExplainedAnswer, Question, score_answer
from pipelines.explanation.text_units import Unit, UnitName, remove_units, split_units

if TYPE_CHECKING:
    from components.evaluation.transformers_engine import TransformersEngine

DELETED_SHARES = (0.15, 0.4)  # of the words
RANDOM_RANKINGS = 10
LEAVE_ONE_OUT, GRADIENT_INPUT, RANDOM = "leave one out", "gradient × input", "random"


@dataclass(frozen=True)
class DeletionEffect:
    """The answer's loss of log-probability (nats) when a share of the words is removed, or only that share is kept.

    Attributes:
        method: Method that ranks the words.
        share: Share of the words.
        removed: Loss without the highest-ranked words.
        kept: Loss with only these words.
        removed_error: Standard error over random rankings; None for other methods.
        kept_error: As `removed_error`.
    """

    method: str
    share: float
    removed: float
    kept: float
    removed_error: float | None = None
    kept_error: float | None = None


@dataclass(frozen=True)
class WordAttribution:
    """Scores of the words or sentences of the user's turns.

    Attributes:
        units: The words or sentences.
        scores: Answer's log-probability minus that without the unit, in nats; positive: the unit supports the answer.
        gradient_scores: Gradient × input of each unit; None if the prompt's template hides the position of its text.
        logprob: Log-probability of the answer after the whole prompt, in nats.
        effects: Deletion figures; empty for fewer than two units.
    """

    units: list[Unit]
    scores: list[float]
    gradient_scores: list[float] | None
    logprob: float
    effects: list[DeletionEffect]

    def list_tokens(self) -> list[dict[str, Any]]:
        """Return the units for JSON: {"text", "score", "message"}."""
        return [
            {"text": unit.text, "score": round(score, 6), "message": unit.message}
            for unit, score in zip(self.units, self.scores, strict=True)
        ]

    def list_effects(self) -> list[dict[str, Any]]:
        """Return the deletion figures for JSON."""
        return [
            {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(effect).items()}
            for effect in self.effects
        ]


def attribute_words(
    engine: TransformersEngine, model: Any, answer: ExplainedAnswer, unit: UnitName, seed: int, reporter: Reporter
) -> WordAttribution:
    """Score each word or sentence of the user's turns by leaving it out, and measure the deletion of several.

    Args:
        engine: The loaded model.
        model: The transformers model of the engine, for the gradients.
        answer: The answer to explain.
        unit: Words or sentences.
        seed: Seed of the random rankings.
        reporter: Receives progress.
    """
    messages = answer.question.messages
    units = split_units(messages, unit)
    reporter.step(f"leaving out each of {format_count(len(units), unit)}")
    conversations = [messages, *(remove_units(messages, [one]) for one in units)]
    whole, *shortened = score_answer(engine, answer, conversations, reporter)
    scores = [whole - one for one in shortened]
    gradient_scores = compute_gradient_scores(model, engine.tokenizer, answer, units)
    effects: list[DeletionEffect] = []
    if len(units) > 1:
        reporter.step(f"removing several {unit}s at a time")
        rankings = {LEAVE_ONE_OUT: [_rank(scores)]}
        if gradient_scores is not None:
            rankings[GRADIENT_INPUT] = [_rank(gradient_scores)]
        generator = np.random.default_rng(seed)
        rankings[RANDOM] = [generator.permutation(len(units)).tolist() for _ in range(RANDOM_RANKINGS)]
        effects = measure_deletion(engine, answer, units, rankings, whole, reporter)
    return WordAttribution(units, scores, gradient_scores, whole, effects)


def _rank(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda number: (-scores[number], number))


def measure_deletion(
    engine: TransformersEngine,
    answer: ExplainedAnswer,
    units: Sequence[Unit],
    rankings: Mapping[str, Sequence[Sequence[int]]],
    whole: float,
    reporter: Reporter,
) -> list[DeletionEffect]:
    """Return the loss of log-probability for each method and share, the mean over the rankings of the method.

    Args:
        engine: The loaded model.
        answer: The answer.
        units: The units of the prompt.
        rankings: Rankings of the units by method, most important first.
        whole: Log-probability of the answer after the whole prompt.
        reporter: Receives progress.
    """
    messages, conversations = answer.question.messages, []
    for method_rankings in rankings.values():
        for share in DELETED_SHARES:
            for ranking in method_rankings:
                top = math.ceil(share * len(units))
                conversations += [
                    remove_units(messages, [units[number] for number in removed])
                    for removed in (ranking[:top], ranking[top:])
                ]
    losses = iter([whole - logprob for logprob in score_answer(engine, answer, conversations, reporter)])
    effects = []
    for method, method_rankings in rankings.items():
        for share in DELETED_SHARES:
            pairs = [(next(losses), next(losses)) for _ in method_rankings]
            removed, kept = zip(*pairs, strict=True)
            errors = [stdev(one) / math.sqrt(len(one)) if len(one) > 1 else None for one in (removed, kept)]
            effects.append(DeletionEffect(method, share, fmean(removed), fmean(kept), *errors))
    return effects


def compute_gradient_scores(
    model: Any, tokenizer: Any, answer: ExplainedAnswer, units: Sequence[Unit]
) -> list[float] | None:
    """Return the gradient of the answer's log-probability times the token embeddings, summed over each unit's tokens.

    Returns:
        One score per unit. None if the template changes the user's text, or if the model has virtual tokens.
    """
    import torch

    question = answer.question
    positions = _locate_units(tokenizer, answer, units)
    if positions is None or forward_pass.count_virtual_tokens(model):
        return None
    encoded = answer.encode(tokenizer, question.messages)
    ids = torch.tensor([[*encoded.prompt_ids, *encoded.answer_ids]], device=model.device)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    start = len(encoded.prompt_ids)
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0, start - 1 : -1].float()
    logprob = torch.log_softmax(logits, -1).gather(1, ids[0, start:, None]).sum()
    (gradient,) = torch.autograd.grad(logprob, [embedded])
    by_token = (gradient * embedded).sum(-1)[0].tolist()
    return [math.fsum(by_token[position] for position in own) for own in positions]


def _locate_units(tokenizer: Any, answer: ExplainedAnswer, units: Sequence[Unit]) -> list[list[int]] | None:
    """Return the positions of each unit's tokens in the prompt; None if the template changes the text of a turn."""
    question = answer.question
    text = chat_templates.render_conversation(tokenizer, question.messages, question.tools, prompt=True)
    starts = _locate_messages(tokenizer, question, text)
    if starts is None:
        return None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    prompt_ids = answer.encode(tokenizer, question.messages).prompt_ids
    shared = prefix_trees.count_common_tokens(encoding["input_ids"], prompt_ids)
    offsets = encoding["offset_mapping"][:shared]
    return [
        [
            position
            for position, (start, end) in enumerate(offsets)
            if start < starts[unit.message] + unit.end and end > starts[unit.message] + unit.start
        ]
        for unit in units
    ]


def _locate_messages(tokenizer: Any, question: Question, text: str) -> list[int] | None:
    """Return the position of each message's content in the rendered text; None if the template changes a content."""
    # A search for the content would find a short one in the template's own text.
    contents = [str(message.get("content") or "") for message in question.messages]
    marked = [{**message, "content": chat_templates.CONTENT_MARK} for message in question.messages]
    template = chat_templates.render_conversation(tokenizer, marked, question.tools, prompt=True)
    pieces = template.split(chat_templates.CONTENT_MARK)
    if len(pieces) != len(contents) + 1:
        return None
    for trimmed in (contents, [content.strip() for content in contents]):
        if text == "".join(piece + content for piece, content in zip(pieces, [*trimmed, ""], strict=True)):
            ends = itertools.accumulate(len(piece) + len(own) for piece, own in zip(pieces, trimmed, strict=False))
            return [
                end - len(own) - content.find(own) for end, own, content in zip(ends, trimmed, contents, strict=True)
            ]
    return None
