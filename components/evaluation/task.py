"""What a task is: items that every model is asked alike, and what one model scores on them.

A task is a small frozen dataclass in tasks/ with `name`, `metrics`, `items` and `score`; its settings are a Pydantic model in
tasks/config.py; tasks/table.py joins the two. Adding one is one entry there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from components.common.artifacts import Artifact
from components.common.progress import Reporter

UNANSWERED = "unanswered"  # the figure of a task that counts what failed in passing: measured again, it may succeed


@dataclass(frozen=True)
class Item:
    """One thing asked. `ask` holds what the task needs to ask it, as JSON values; all of it is part of the task's digest."""

    id: str
    prompt: str  # as a person reads it
    reference: str = ""  # the answer that was expected, where there is one
    source: str = ""
    category: str = ""
    length: int = 0  # tokens the model reads
    ask: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """What a metric means: which direction is better, and whether an item is only ever right (1) or wrong (0).

    Over items it is Σ score / Σ weight; `exponential` is exp of that (perplexity). `per_token` says that only models with the same
    tokenizer can be compared.
    """

    better: Literal["higher", "lower"] = "higher"
    right_or_wrong: bool = False
    exponential: bool = False
    per_token: bool = False


@dataclass(frozen=True)
class Scores:
    """What one model scored: by metric one number an item, in the items' order; not a number where an item could not be measured.

    `weights` holds, for metrics that are not a mean over items, each item's weight (tokens, bytes). `answers` has one text an item, None
    where it was not asked for one, or is empty. `figures` are counts worth telling that no gate compares (a judge's errors, say).
    """

    values: Mapping[str, Sequence[float]]
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    answers: Sequence[str | None] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Continuation:
    """Token ids of which those marked in `counted` (one entry a token) are scored, each given all before it. The first never counts."""

    ids: Sequence[int]
    counted: Sequence[bool]


@dataclass(frozen=True)
class Likelihood:
    """Summed log-likelihood of the counted tokens in nats, their number, and whether each was the model's first choice."""

    logprob: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding, so that every model is asked alike: at most so many new tokens, ended by a stop text (which is cut off)."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    """A loaded model, one role of it (an adapter switched on, or off for its base)."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""

    @property
    def room(self) -> int | None:
        """The longest input in tokens, prompt and answer together; None where the model names none."""

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """One for each, in order. What shares a beginning is computed once."""

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """The answers to prompts (token ids), in order, decoded without special tokens."""


@dataclass(frozen=True)
class Given:
    """What a task may use: the tokenizer and its chat template, the dataset artifact, the folders relative paths start from, the seed."""

    tokenizer: Any
    dataset: Artifact | None
    max_length: int
    seed: int
    reporter: Reporter


class Task(Protocol):
    """A task. `base` is what the base model scored on the same items: only a task with `against_base` is given it."""

    @property
    def settings(self) -> BaseModel:
        """Its settings, part of its digest."""

    @property
    def name(self) -> str:
        """What metrics are named by: name.metric."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Its metrics."""

    @property
    def against_base(self) -> bool:
        """Whether a model's scores depend on the base model's answers (a judge that compares pairs)."""

    def items(self, given: Given) -> list[Item]:
        """What is asked, in a fixed order, the same for every model. Raises InputError for data that cannot be asked."""

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """What one model scores on them."""
