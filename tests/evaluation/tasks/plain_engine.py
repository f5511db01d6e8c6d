"""A model asked as plainly as can be: one sequence at a time, all its logits, no cache. What a fast engine has to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import models
from components.common.progress import Reporter, Silent
from components.evaluation.task import Continuation, Decoding, Given, Likelihood
from tests.tiny import tiny_model


@dataclass
class PlainEngine:
    """A transformers model and its tokenizer; `asked` remembers the continuations it was asked."""

    model: Any
    tokenizer: Any
    room: int | None = 2048
    asked: list[Continuation] = field(default_factory=list)

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        self.asked += asked
        return [self._likelihood(one) for one in asked]

    def _likelihood(self, one: Continuation) -> Likelihood:
        import torch

        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([list(one.ids)[:-1]])).logits[0].double()
        places = [place for place, counted in enumerate(one.counted) if counted]
        assert all(place > 0 for place in places), "the first token never counts"
        found = torch.log_softmax(logits, dim=-1)
        logprob = sum(float(found[place - 1, one.ids[place]]) for place in places)
        greedy = all(int(logits[place - 1].argmax()) == one.ids[place] for place in places)
        return Likelihood(logprob, len(places), greedy)

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        return [self._answer(list(prompt), decoding) for prompt in prompts]

    def _answer(self, ids: list[int], decoding: Decoding) -> str:
        import torch

        new: list[int] = []
        text = ""
        while len(new) < decoding.max_new_tokens:
            with torch.inference_mode():
                token = int(self.model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax())
            if token == self.tokenizer.eos_token_id:
                break
            new.append(token)
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            for stop in decoding.stop:
                if stop in text:
                    return text[: text.index(stop)]
        return text


@dataclass
class ScriptedEngine:
    """Answers by rote: for prompts that hold one of its words, what stands beside it; for others, nothing."""

    tokenizer: Any
    script: dict[str, str]
    room: int | None = 2048
    prompts: list[str] = field(default_factory=list)
    decodings: list[Decoding] = field(default_factory=list)

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        raise AssertionError("it has no likelihoods")

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        texts = [self.tokenizer.decode(list(ids)) for ids in prompts]
        self.prompts += texts
        self.decodings.append(decoding)
        return [next((answer for word, answer in self.script.items() if word in text), "") for text in texts]


@dataclass
class BrokenEngine:
    """A model whose weights went wrong: the likelihood of what holds one of its tokens is `logprob`, of all else -1."""

    tokenizer: Any
    tokens: frozenset[int] | None = None  # None: of everything
    logprob: float = float("nan")
    room: int | None = 2048

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        bad = [self.tokens is None or not self.tokens.isdisjoint(one.ids) for one in asked]
        return [Likelihood(self.logprob if one else -1.0, 1, False) for one in bad]

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        raise AssertionError("it is asked for likelihoods alone")


def plain_engine(folder: Path, *, seed: int = 0) -> PlainEngine:
    """A tiny random Llama."""
    opened = models.open_model(tiny_model(folder, seed=seed))
    return PlainEngine(models.load(opened), models.load_tokenizer(opened.tokenizer))


def given(tokenizer: Any, dataset: Any = None, *, seed: int = 0) -> Given:
    """What a task may use."""
    return Given(tokenizer=tokenizer, dataset=dataset, max_length=256, seed=seed, reporter=Silent())
