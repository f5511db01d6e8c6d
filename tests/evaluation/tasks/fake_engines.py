"""Reference and fake engines: a model scored sequence by sequence without a cache, scripted answers, NaN likelihoods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.models import model_loading
from components.common.runtime.reporters import Reporter, SilentReporter
from components.evaluation.task_interface import Continuation, Decoding, Likelihood, TaskContext
from tests.tiny import tiny_model


@dataclass
class PlainEngine:
    """A transformers model and its tokenizer; `requests` records the scored continuations."""

    model: Any
    tokenizer: Any
    max_input_tokens: int | None = 2048
    requests: list[Continuation] = field(default_factory=list)

    def compute_likelihoods(self, requests: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        self.requests += requests
        return [self._likelihood(request) for request in requests]

    def _likelihood(self, request: Continuation) -> Likelihood:
        import torch

        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([list(request.ids)[:-1]])).logits[0].double()
        positions = [position for position, is_scored in enumerate(request.scored) if is_scored]
        assert all(position > 0 for position in positions), "the first token never counts"
        logprobs = torch.log_softmax(logits, dim=-1)
        logprob = sum(float(logprobs[position - 1, request.ids[position]]) for position in positions)
        greedy = all(int(logits[position - 1].argmax()) == request.ids[position] for position in positions)
        return Likelihood(logprob, len(positions), greedy)

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        return [self._answer(list(prompt), decoding) for prompt in prompts]

    def _answer(self, ids: list[int], decoding: Decoding) -> str:
        import torch

        generated: list[int] = []
        text = ""
        while len(generated) < decoding.max_new_tokens:
            with torch.inference_mode():
                token = int(self.model(input_ids=torch.tensor([ids + generated])).logits[0, -1].argmax())
            if token == self.tokenizer.eos_token_id:
                break
            generated.append(token)
            text = self.tokenizer.decode(generated, skip_special_tokens=True)
            for stop in decoding.stop:
                if stop in text:
                    return text[: text.index(stop)]
        return text


@dataclass
class ScriptedEngine:
    """An engine that answers by a script: the answer of the first word that the prompt contains, or an empty text."""

    tokenizer: Any
    script: dict[str, str]
    max_input_tokens: int | None = 2048
    prompts: list[str] = field(default_factory=list)
    decodings: list[Decoding] = field(default_factory=list)

    def compute_likelihoods(self, requests: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        raise AssertionError("it has no likelihoods")

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        texts = [self.tokenizer.decode(list(ids)) for ids in prompts]
        self.prompts += texts
        self.decodings.append(decoding)
        return [next((answer for word, answer in self.script.items() if word in text), "") for text in texts]


@dataclass
class BrokenEngine:
    """A model with broken weights: requests that contain one of `tokens` score `logprob`, others -1."""

    tokenizer: Any
    tokens: frozenset[int] | None = None  # None: every request
    logprob: float = float("nan")
    max_input_tokens: int | None = 2048

    def compute_likelihoods(self, requests: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        is_affected = [self.tokens is None or not self.tokens.isdisjoint(request.ids) for request in requests]
        return [Likelihood(self.logprob if affected else -1.0, 1, False) for affected in is_affected]

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        raise AssertionError("it is asked for likelihoods alone")


def plain_engine(folder: Path, *, seed: int = 0) -> PlainEngine:
    """Load a tiny random Llama."""
    model_files = model_loading.open_model(tiny_model(folder, seed=seed))
    return PlainEngine(model_loading.load_model(model_files), model_loading.load_tokenizer(model_files.tokenizer))


def build_context(tokenizer: Any, dataset: Any = None, *, seed: int = 0) -> TaskContext:
    """Build the context that a task gets."""
    return TaskContext(tokenizer=tokenizer, dataset=dataset, max_length=256, seed=seed, reporter=SilentReporter())
