"""Limits of tokens and cost: a request is sent only if the limits also hold with its estimate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from components.data_curation.reading.section_chunks import CHARACTERS_PER_TOKEN
from pipelines.synthesis.journal import Answer

TOKENS_PER_MESSAGE = 4  # of the chat template, for estimates
PRICE_TOKENS = 1_000_000  # prices are per million tokens


class TeacherBudgetReachedError(Exception):
    """The next request could exceed a limit; the message names the limit and what is spent."""


@dataclass
class TeacherBudget:
    """The limits, prices and tokens of a synthesis, all its interrupted runs included.

    Attributes:
        input_price: price of a million tokens of the prompts.
        output_price: price of a million tokens of the answers.
        max_cost: the limit of the cost, in the unit of the prices; None without a limit.
        max_tokens: the limit of the tokens of prompts and answers; None without a limit.
        requests: the number of answers.
        input_tokens: tokens of the prompts.
        output_tokens: tokens of the answers.
        is_estimated: whether some of the tokens are estimated.
        reserved: the estimates of the requests under way by key, as tokens of prompt and answer.
    """

    input_price: float = 0.0
    output_price: float = 0.0
    max_cost: float | None = None
    max_tokens: int | None = None
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    is_estimated: bool = False
    reserved: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """The cost of all answers."""
        return self.compute_cost(self.input_tokens, self.output_tokens)

    def compute_cost(self, input_tokens: float, output_tokens: float) -> float:
        """Return the cost of prompts and answers, in the unit of the prices."""
        return (input_tokens * self.input_price + output_tokens * self.output_price) / PRICE_TOKENS

    def add(self, answer: Answer) -> None:
        """Count an answer, and release the reservation of its request."""
        self.reserved.pop(answer.key, None)
        self.requests += 1
        self.input_tokens += answer.input_tokens
        self.output_tokens += answer.output_tokens
        self.is_estimated |= answer.is_estimated

    def try_reserve(self, key: str, input_tokens: int, output_tokens: int) -> bool:
        """Reserve the estimate of a request; return False if it has to wait for requests under way.

        Raises:
            TeacherBudgetReachedError: no request is under way, and a limit does not hold with this request.
        """
        estimates = [*self.reserved.values(), (input_tokens, output_tokens)]
        prompts = self.input_tokens + sum(estimate[0] for estimate in estimates)
        answers = self.output_tokens + sum(estimate[1] for estimate in estimates)
        problem = ""
        if self.max_tokens is not None and prompts + answers > self.max_tokens:
            spent = self.input_tokens + self.output_tokens
            problem = f"--max-tokens is {self.max_tokens:,}; {spent:,} tokens are used"
        if self.max_cost is not None and self.compute_cost(prompts, answers) > self.max_cost:
            problem = f"--max-cost is {self.max_cost:g}; {self.cost:.4g} is spent"
        if problem and not self.reserved:
            raise TeacherBudgetReachedError(f"{problem}, and the next request may exceed the limit")
        if not problem:
            self.reserved[key] = (input_tokens, output_tokens)
        return not problem


def estimate_tokens(texts: Iterable[str]) -> int:
    """Return the estimated number of tokens of messages, at 4 characters per token."""
    return sum(-(-len(text) // CHARACTERS_PER_TOKEN) + TOKENS_PER_MESSAGE for text in texts)
