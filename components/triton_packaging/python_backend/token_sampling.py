"""Token sampling with a separate random state for each request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers

from .generation_request import GenerationRequest

if TYPE_CHECKING:
    from .answer_grammar import AnswerGrammar

# A smaller divisor could exceed the range of float32. The best token has nearly all probability at this temperature.
MIN_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class TokenScore:
    """A generated token and its log-probability, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    alternatives: Sequence[tuple[int, float]]


def create_sampler(
    request: GenerationRequest, device: torch.device, grammar: AnswerGrammar | None = None
) -> RequestSampler | None:
    """Return the sampler of a request; None if its tokens are those with the best scores, and nothing is recorded."""
    is_plain = request.temperature == 0 and request.logprobs is None and grammar is None
    if is_plain and not (request.frequency_penalty or request.presence_penalty):
        return None
    return RequestSampler(request, device, grammar)


class RequestSampler(transformers.LogitsProcessor):  # type: ignore[misc] # transformers is untyped
    """Chooses the tokens of one request, and makes the chosen token the only finite score.

    All threads share the process-wide random state: seeding it would not make a request repeatable while the
    model answers other requests.

    Attributes:
        token_scores: one entry per token if the request wants log-probabilities; else empty.
        error: the error that ended the answer. Raised in a step, it would fail the other requests of the batch.
        settings: temperature, top_k and top_p of a request that `sample_together` supports; None for others.
    """

    def __init__(self, request: GenerationRequest, device: torch.device, grammar: AnswerGrammar | None) -> None:
        self.token_scores: list[TokenScore] = []
        self.error: Exception | None = None
        self._request, self._grammar = request, grammar
        self._counts: torch.Tensor | None = None  # occurrences of each token in the answer, for the penalties
        self._warpers = transformers.LogitsProcessorList()
        self._generator: torch.Generator | None = None
        has_penalty = bool(request.frequency_penalty or request.presence_penalty)
        only_samples = request.temperature > 0 and not has_penalty and grammar is None and request.logprobs is None
        self.settings = (request.temperature, request.top_k, request.top_p) if only_samples else None
        if request.temperature > 0:
            self._warpers.append(transformers.TemperatureLogitsWarper(max(request.temperature, MIN_TEMPERATURE)))
            if request.top_k > 0:
                self._warpers.append(transformers.TopKLogitsWarper(request.top_k))
            if request.top_p < 1:
                self._warpers.append(transformers.TopPLogitsWarper(request.top_p))
            self._generator = torch.Generator(device)
            self._generator.manual_seed(request.seed)

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (1, vocabulary), in which only the chosen token is finite."""
        token = None if self.error else self._choose(scores)
        if token is None:  # end the answer, which fails
            if self._grammar is None:
                return scores
            token = torch.full((1, 1), self._grammar.end_token, device=scores.device)
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0.0)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Choose a token and record it. Returns its ID, shape (1, 1), or None after an error."""
        try:
            allowed = self._penalize(scores)
            if self._grammar is not None:
                allowed = self._grammar.mask(allowed)
            token = self._sample(allowed)
            if self._counts is not None:
                self._counts[token[0]] += 1
            if self._grammar is not None:
                self._grammar.advance(int(token))
            if self._request.logprobs is not None:
                self.token_scores.append(_score(scores, int(token), self._request.logprobs))
        except Exception as error:
            self.error = error
            return None
        return token

    def _penalize(self, scores: torch.Tensor) -> torch.Tensor:
        """Subtract the penalties of the tokens that the answer contains, as OpenAI's API defines them."""
        frequency, presence = self._request.frequency_penalty, self._request.presence_penalty
        if not (frequency or presence):
            return scores
        if self._counts is None:
            self._counts = torch.zeros(scores.shape[-1], device=scores.device)
        return scores - frequency * self._counts - presence * (self._counts > 0)

    def _sample(self, scores: torch.Tensor) -> torch.Tensor:
        if self._generator is not None:
            probabilities = torch.softmax(self._warpers(None, scores).float(), dim=-1)
            if probabilities.isfinite().all():  # a broken model computes NaN, for which multinomial raises an error
                return torch.multinomial(probabilities, 1, generator=self._generator)
        return scores.argmax(dim=-1, keepdim=True)


def sample_together(samplers: Sequence[RequestSampler], scores: torch.Tensor) -> torch.Tensor:
    """Choose the tokens of requests with equal `settings`, one per sampler, as each would by itself.

    A GPU would wait for the processor once per request, and compute a dozen small operations for each.

    Args:
        scores: shape (requests, vocabulary).

    Returns:
        Scores in which only the chosen tokens are finite.
    """
    probabilities = torch.softmax(samplers[0]._warpers(None, scores).float(), dim=-1)
    tokens = scores.argmax(dim=-1, keepdim=True)
    for row, is_finite in enumerate(probabilities.isfinite().all(dim=-1).tolist()):
        if is_finite:
            tokens[row] = torch.multinomial(probabilities[row], 1, generator=samplers[row]._generator)
    return torch.full_like(scores, -math.inf).scatter_(1, tokens, 0.0)


def _score(scores: torch.Tensor, token: int, alternatives: int) -> TokenScore:
    """Return the log-probabilities of the model's own distribution: before penalties, schema and sampling."""
    logprobs = torch.log_softmax(scores[0].float(), dim=-1)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    return TokenScore(
        token, float(logprobs[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )
