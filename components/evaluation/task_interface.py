"""Data exchanged by tasks and engines: items, metrics, scores and requests to a loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.reporters import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Request = Mapping[str, Any]  # JSON values that a task needs to query a model about one item

DEFAULT_MAX_LENGTH = 2048  # tokens of a row if neither configuration nor candidate states a length
# Defaults per token, in nats. A loss of 5 nats is typical of a garbled answer: uniform predictions over 50,000 tokens
# have 10.8 nats, good ones 2 to 4. A loss of 1 nat divides the probability of every token by e.
MAX_ITEM_LOSS_NATS = 5.0
HARM_NATS = 1.0
UNANSWERED_FIGURE = "unanswered"  # number of transient failures; a rerun may succeed


@dataclass(frozen=True)
class Item:
    """One test case.

    `request` holds the JSON values that the task needs to query a model. It is part of the task's digest.
    """

    id: str
    prompt: str  # human-readable
    reference: str = ""  # expected answer, if any
    source: str = ""
    category: str = ""
    length: int = 0  # input tokens
    request: Request = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """Definition of a metric, computed over items as Σ score / Σ weight.

    Attributes:
        better: Direction of an improvement.
        is_binary: Whether each item scores exactly 0 or 1.
        exponential: Whether the metric is exp(Σ score / Σ weight), such as a perplexity.
        per_token: Whether the metric is comparable only between models with the same tokenizer.
        max_item_loss: Largest loss of an unseen item that the bounds allow for, in the unit of score / weight. None:
            the largest difference between two models on a seen item.
        harm: Loss above which an item counts as harmed, in the unit of score / weight. None: the rule sets it.
        chance: Value of random choices, which the default rules require a candidate to exceed. None: not known.
    """

    better: Literal["higher", "lower"] = "higher"
    is_binary: bool = False
    exponential: bool = False
    per_token: bool = False
    max_item_loss: float | None = None
    harm: float | None = None
    chance: float | None = None

    def get_max_item_loss(self, against: str | float = "base") -> float | None:
        """Return the largest loss of an item against a model or a number; None if the metric has no limit.

        It is 1 for a binary metric against a model. The worst score limits the loss against a number.
        """
        if self.is_binary and not isinstance(against, str):
            return max(0.0, against if self.better == "higher" else 1 - against)
        return 1.0 if self.is_binary else self.max_item_loss

    def get_harm(self) -> float | None:
        """Return the loss above which an item counts as harmed: 1/2 for a binary metric, so every lost item counts."""
        return 0.5 if self.is_binary else self.harm


@dataclass(frozen=True)
class Scores:
    """The scores of one model on one task.

    Attributes:
        values: By metric, one number per item in the order of the items; NaN if the item could not be measured.
        weights: Item weights (tokens, bytes) of the metrics that are not a mean over items.
        answers: One text per item, None for an item without an answer; empty if the task generates no answers.
        figures: Counts that no gate rule compares, such as the number of failed judgements.
        samples: For each item, its sampled answers as {"answer": text, metric: score}; empty with one answer per item.
    """

    values: Mapping[str, Sequence[float]]
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    answers: Sequence[str | None] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Sequence[Mapping[str, str | float]]] = ()


@dataclass(frozen=True)
class Continuation:
    """Token ids with one flag per token in `scored`.

    A flagged token is scored given all preceding tokens. The first token is never scored.
    """

    ids: Sequence[int]
    scored: Sequence[bool]


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation.

    Attributes:
        logprob: Sum over the scored tokens in nats.
        tokens: Number of scored tokens.
        greedy: Whether every scored token is the model's most likely token.
    """

    logprob: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class Sampling:
    """Sampling of answers.

    Attributes:
        temperature: Divisor of the logits, above 0.
        top_p: Probability of the most likely tokens from which each token is drawn.
        seeds: Seed of each prompt's answer. An answer depends on its own seed and not on other prompts.
    """

    temperature: float
    top_p: float
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Decoding:
    """Decoding of up to `max_new_tokens` tokens: greedy without `sampling`.

    A stop text ends the answer and is removed from it.
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    sampling: Sampling | None = None

    def pair_seeds(self, prompts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], int]]:
        """Return each prompt with its seed, 0 for greedy decoding. Equal pairs have equal answers."""
        seeds = self.sampling.seeds if self.sampling else (0,) * len(prompts)
        return [(tuple(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]


class Engine(Protocol):
    """A loaded model that computes log-likelihoods and generates answers."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    @property
    def max_input_tokens(self) -> int | None:
        """Context length in tokens (prompt and answer); None if the model declares no limit."""

    def compute_likelihoods(self, continuations: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """Return one likelihood per continuation, in order. Shared prefixes are computed once."""

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """Return one answer per prompt (token ids), in order, decoded without special tokens."""


@dataclass(frozen=True)
class TaskContext:
    """Inputs of a task in addition to its settings.

    `max_length` is the maximum length of a dataset row in tokens; longer rows are truncated. `items_by_task` holds the
    items of the tasks that generate answers, for tasks that check these answers.
    """

    tokenizer: PreTrainedTokenizerBase
    dataset: Artifact | None
    max_length: int
    seed: int
    reporter: Reporter
    items_by_task: Mapping[str, Sequence[Item]] = field(default_factory=dict)
