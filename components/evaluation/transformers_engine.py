"""The default inference engine: one transformers model in this process, queried in batches.

Log-likelihoods equal those of separately scored sequences within 1e-4 nats per token in float32, or within the
precision of bfloat16. Batching changes only the order of summation. The order of the requests has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from components.common.runtime import cpu_cores
from components.common.runtime.reporters import Reporter
from components.evaluation import answer_generation, forward_pass, prefix_trees
from components.evaluation.task_interface import Continuation, Decoding, Likelihood

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_LOGITS = 1 << 28  # logits held at once: 1 GiB in float32
# Tokens per batch that fully use one thread of a CPU. The activations of larger batches do not fit its cache, come from
# fresh pages of memory, and need more padding: 512 tokens instead of 2,048 saved 11% of the CPU time.
TOKENS_PER_WORKER = 512
MIN_BATCH_TOKENS = 128  # in smaller batches, reading the weights takes longer than the computation
BATCHES_PER_WORKER = 4  # limits the idle time at the end to a quarter of the computation


class TransformersEngine:
    """Engine for a loaded model, including an attached and enabled adapter.

    Args:
        model: The loaded model.
        tokenizer: The model's tokenizer.
        batch_tokens: Tokens per batch, including padding.
        input_limit: Upper limit of `max_input_tokens`, so that models with different context lengths get equal inputs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_tokens: int,
        input_limit: int | None = None,
    ) -> None:
        self._model, self.tokenizer = model, tokenizer
        self._batch_tokens, self._input_limit = batch_tokens, input_limit
        self._branching: bool | None = None  # tested on first use
        answer_generation.reset_generation_config(model, tokenizer)

    @property
    def max_input_tokens(self) -> int | None:
        """Context length in tokens (prompt and answer), less the adapter's virtual tokens; None without a limit."""
        positions = getattr(forward_pass.get_decoder_config(self._model), "max_position_embeddings", None)
        own = int(positions) - forward_pass.count_virtual_tokens(self._model) if positions else None
        return min((limit for limit in (own, self._input_limit) if limit), default=None)

    def _can_share_prefixes(self, longest: int) -> bool:
        """Return whether rows may share prefixes: within the attention window and on a supported architecture."""
        if longest > forward_pass.get_full_attention_span(self._model):
            return False
        if self._branching is None:
            self._branching = forward_pass.supports_branching(self._model)
        return self._branching

    def compute_likelihoods(self, continuations: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """Return one likelihood per continuation, in order. Duplicates and shared prefixes are computed once."""
        import torch

        unique, positions = prefix_trees.deduplicate(continuations)
        longest = max((len(continuation.ids) for continuation in unique), default=0)
        groups = prefix_trees.plan_rows(unique, sharing=len(unique) > 1 and self._can_share_prefixes(longest))
        device = self._model.device.type
        workers = count_workers(device, self._batch_tokens)
        max_states = max(1, MAX_LOGITS // workers // int(forward_pass.get_decoder_config(self._model).vocab_size))
        likelihoods = [Likelihood(0.0, 0, True)] * len(unique)
        done = 0
        # Each worker computes one batch with an equal share of the threads. Threads that share an operation wait for
        # each other at its end; threads with separate batches do not.
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, cpu_cores.get_thread_count() // workers))
        pool = ThreadPoolExecutor(workers)
        try:
            for group in groups:
                prefix = forward_pass.prefill(self._model, group.prefix)
                total = sum(len(tree.ids) for tree in group.trees)
                tokens = compute_batch_tokens(total, device, workers, self._batch_tokens)
                batches = list(
                    prefix_trees.make_batches(group.trees, tokens, prefix_length=prefix.length, max_states=max_states)
                )
                batch_scores = pool.map(partial(forward_pass.score_trees, self._model, prefix=prefix), batches)
                for tree, scores in zip(chain(*batches), chain.from_iterable(batch_scores), strict=True):
                    for number, targets in tree.requests:
                        logprob = math.fsum(scores.logprobs[target] for target in targets)
                        greedy = all(scores.greedy[target] for target in targets)
                        likelihoods[number] = Likelihood(logprob, len(targets), greedy)
                    done += len(tree.requests)
                    reporter.progress(done, len(unique), "items")
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)
        return [likelihoods[position] for position in positions]

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """Return the answers in order. Batching has no effect on them, except where two tokens tie."""
        longest = max(map(len, prompts), default=0) + decoding.max_new_tokens
        return answer_generation.generate_answers(
            self._model,
            self.tokenizer,
            prompts,
            decoding,
            self._batch_tokens,
            reporter,
            sharing=self._can_share_prefixes(longest),
        )

    def close(self) -> None:
        """Release the model to free memory for the next model."""
        self._model = None


def count_workers(device: str, batch_tokens: int) -> int:
    """Return the number of concurrent batches: 1 on an accelerator; on a CPU, up to 1 per thread with enough tokens."""
    return 1 if device != "cpu" else max(1, min(cpu_cores.get_thread_count(), batch_tokens // TOKENS_PER_WORKER))


def compute_batch_tokens(total: int, device: str, workers: int, batch_tokens: int) -> int:
    """Return the tokens per batch: on a CPU, no more than a thread's cache holds, and equal work for all workers.

    Args:
        total: Number of tokens to compute.
        device: Type of the device.
        workers: Number of concurrent batches.
        batch_tokens: Maximum number of tokens of all concurrent batches together.
    """
    if device != "cpu":
        return batch_tokens
    limit = min(max(1, batch_tokens // workers), TOKENS_PER_WORKER)
    return limit if workers == 1 else min(limit, max(MIN_BATCH_TOKENS, -(-total // (workers * BATCHES_PER_WORKER))))
