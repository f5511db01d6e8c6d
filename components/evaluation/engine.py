"""The engine that every machine has: one transformers model in this process, asked in batches.

Log-likelihoods are those of scoring each sequence alone with all its logits, within 1e-4 nats a token in float32: the batch and the
place in a row change the order of sums, nothing else. In bfloat16 the same holds up to its precision. They do not depend on the order of
the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from components.common import cores
from components.common.progress import Reporter
from components.evaluation import generation, passes, prefixes
from components.evaluation.passes import Found
from components.evaluation.prefixes import Group, Tree
from components.evaluation.task import Continuation, Decoding, Likelihood

LOGITS = 1 << 28  # logits held at once: 1 GiB in float32
LEAST = 512  # tokens of a batch from which one thread is busy with it
SMALLEST = 128  # tokens of a batch below which reading the weights takes longer than computing with them
ROUNDS = 4  # batches a thread, where there are tokens for as many: the last to finish keeps the others waiting for a quarter at most


class TransformersEngine:
    """A loaded model as it is: an adapter attached to it is asked with it."""

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int) -> None:
        self._model, self._tokenizer, self._batch_tokens = model, tokenizer, batch_tokens
        generation.plainly(model, tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def room(self) -> int | None:
        """The longest input in tokens, prompt and answer together; an adapter's virtual tokens take their part of it."""
        config = passes.base_of(self._model).config.get_text_config(decoder=True)
        found = getattr(config, "max_position_embeddings", None)
        return int(found) - passes.virtual_tokens(self._model) if found else None

    @cached_property
    def _branches(self) -> bool:
        return passes.takes_branches(self._model)

    def likelihoods(self, asked: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """One for each, in order. Equal requests and common beginnings are computed once."""
        different, which = prefixes.unique(asked)
        found = [Likelihood(0.0, 0, True)] * len(different)
        done = 0
        for tree, scored in self._scored(prefixes.plan(different, sharing=self._sharing(different))):
            for number, places in tree.requests:
                found[number] = _summed(scored, places)
            done += len(tree.requests)
            reporter.progress(done, len(different), "items")
        return [found[place] for place in which]

    def _sharing(self, asked: Sequence[Continuation]) -> bool:
        """Whether rows may branch: not where a token would not see all before it, nor on a model that does not take it."""
        longest = max((len(one.ids) for one in asked), default=0)
        return len(asked) > 1 and longest <= passes.reach(passes.base_of(self._model).config) and self._branches

    def _scored(self, groups: Sequence[Group]) -> Iterator[tuple[Tree, Found]]:
        """Every tree with what was found of it, in an order of their own."""
        vocabulary = int(passes.base_of(self._model).config.get_text_config(decoder=True).vocab_size)
        count = workers(self._model.device.type, self._batch_tokens)
        states = max(1, LOGITS // count // vocabulary)
        with _pool(count) as pool:
            for group in groups:
                header = passes.prefilled(self._model, group.header)
                tokens = share(sum(len(tree.ids) for tree in group.trees), count, self._batch_tokens)
                batches = list(prefixes.batches(group.trees, tokens, header=header.length, states=states))
                scored = pool.map(partial(passes.likelihoods, self._model, header=header), batches)
                for batch, found in zip(batches, scored, strict=True):
                    yield from zip(batch, found, strict=True)

    def answers(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """The greedy answers to prompts, in order. Text equals that of answering one by one, but where two tokens are equally likely."""
        longest = max(map(len, prompts), default=0) + decoding.max_new_tokens
        sharing = longest <= passes.reach(passes.base_of(self._model).config) and self._branches
        return generation.answers(self._model, self._tokenizer, prompts, decoding, self._batch_tokens, reporter, sharing=sharing)

    def close(self) -> None:
        """Let go of the model: the next one may need its memory."""
        self._model = None


@contextmanager
def _pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """What computes so many batches side by side, each with its share of the threads; on an error or an interrupt none is begun any more.

    Threads that share every operation wait for one another at the end of each; those that have a batch of their own do not.
    """
    pool = ThreadPoolExecutor(count)
    with passes.threads(max(1, cores.threads() // count)):
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def workers(device: str, batch_tokens: int) -> int:
    """Batches computed side by side: one on an accelerator; on a processor as many as have a thread and tokens enough to keep it busy."""
    return 1 if device != "cpu" else max(1, min(cores.threads(), batch_tokens // LEAST))


def share(total: int, count: int, batch_tokens: int) -> int:
    """Tokens of a batch, where `count` threads share `batch_tokens` and have `total` tokens to do: few enough that all finish together."""
    most = max(1, batch_tokens // count)
    return most if count == 1 else min(most, max(SMALLEST, -(-total // (count * ROUNDS))))


def _summed(found: Found, places: Sequence[int]) -> Likelihood:
    return Likelihood(math.fsum(found.logprobs[place] for place in places), len(places), all(found.greedy[place] for place in places))
