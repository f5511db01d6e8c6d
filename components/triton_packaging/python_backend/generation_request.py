"""A validated generation request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt as token IDs, and the parameters of the answer.

    Attributes:
        temperature: 0 selects greedy decoding.
        json_schema: the JSON schema that constrains the answer; empty for an unconstrained answer.
        logprobs: number of alternatives reported per token; None if the request wants no log-probabilities.
    """

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]
    json_schema: str = ""
    logprobs: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
